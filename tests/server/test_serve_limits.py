"""Who may ask `pipeinfer serve`, over what, and how much: keys, TLS, sizes, times, pages of other sites, nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
import h11
import httpx
from click.testing import CliRunner

from pipeinfer.cli.serve import serve_command
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.requests.body import Defaults
from pipeinfer.job.requests.fields import PassedOver
from pipeinfer.server.access import CHUNK_BYTES, MOST_CHUNKS, Access, LimitedConnection
from pipeinfer.server.front import HttpOptions, HttpServer
from pipeinfer.server.prompting import parse_request
from tests.support.jobs import finish
from tests.support.serving import Served

KEY = {"authorization": "Bearer one"}
SMALL: dict[str, Any] = {"prompt": "a", "max_tokens": 2, "seed": 1}
TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(key, certificate)"""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    if not shutil.which("openssl"):
        pytest.skip("there is no openssl to make a certificate with")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            key,
            "-out",
            certificate,
        ],
        check=True,
        capture_output=True,
    )
    return key, certificate


@pytest.fixture(scope="module")
def guarded(certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Everything that can be locked is."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("two\n\nthree\n")
    words = ["--api-key", "one,four", "--api-key-file", str(keys), "--max-body", "2048", "--max-connections", "9"]
    with over_tls(certificate, [*words, "--timeout", "30"]) as server:
        yield server


@pytest.fixture(scope="module")
def hasty(certificate: tuple[Path, Path]) -> Iterator[Served]:
    """Gives its clients little time."""
    with over_tls(certificate, ["--api-key", "one", "--timeout", str(TIMEOUT_S)]) as server:
        yield server


def over_tls(certificate: tuple[Path, Path], words: list[str]) -> Served:
    key, chain = map(str, certificate)
    trusted = ssl.create_default_context(cafile=chain)
    return Served(1, ["-md", "none", *words, "--ssl-key-file", key, "--ssl-cert-file", chain], verify=trusted)


def test_a_key_opens_and_nothing_else_does(guarded: Served) -> None:
    def status(path: str, **headers: str) -> int:
        return guarded.http.get(
            path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        ).status_code

    assert guarded.url.startswith("https://") and status("/health") == 200
    assert [status("/v1/models", authorization=f"Bearer {key}") for key in ("one", "two", "three", "four")] == [200] * 4
    assert status("/v1/models", x_api_key="two") == 200
    for wrong in ("Bearer", "Bearer on", "Bearer one,four", "Basic one", "one", ""):
        assert status("/v1/models", authorization=wrong) == 401
    refused = guarded.http.post("/v1/completions", json=SMALL)
    assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    assert [status(path) for path in ("/metrics", "/slots", "/events", "/v1/models")] == [401] * 4
    assert guarded.http.post("/v1/completions", json=SMALL, headers=KEY).status_code == 200


def test_with_a_key_a_server_may_have_any_name(guarded: Served) -> None:
    """A proxy's, say: a page of another site has no key."""
    for headers in ({"host": "llm.example"}, {"host": "llm.example", "origin": "https://llm.example"}):
        assert guarded.http.get("/v1/models", headers=KEY | headers).status_code == 200
    assert guarded.http.get("/v1/models", headers=KEY | {"sec-fetch-site": "cross-site"}).status_code == 403


@pytest.mark.parametrize(
    ("host", "address", "name", "keys", "lets"),
    [
        ("node7", "127.0.1.1", "Node7:8080", (), True),
        ("node7", "127.0.1.1", "there.example:8080", (), False),
        ("127.0.0.1", "127.0.0.1", "", (), True),
        ("127.0.0.1", "127.0.0.1", "there.example", ("key",), True),
        ("::1", "::1", "[::1]:8080", (), True),
        ("0.0.0.0", "0.0.0.0", "node7.there.example:8080", (), True),
    ],
)
def test_which_names_a_host_has_is_known_of_the_loopback_interface(
    host: str, address: str, name: str, keys: tuple[str, ...], lets: bool
) -> None:
    query: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        query.append(scope["path"])

    async def nothing(*_: Any) -> Any:
        pass

    headers = [(b"host", name.encode()), (b"authorization", b"Bearer key")]
    scope = {"type": "http", "method": "GET", "path": "/slots", "headers": headers if name else []}
    asyncio.run(Access(app, keys, host, address)(scope, nothing, nothing))
    assert bool(query) is lets


def test_pages_of_other_sites_may_not_ask(guarded: Served) -> None:
    for origin, status in (("https://elsewhere.example", 403), ("null", 403), (guarded.url, 200)):
        answer = guarded.http.post("/v1/completions", json=SMALL, headers=KEY | {"origin": origin})
        assert answer.status_code == status, answer.text


def test_a_request_that_is_too_long_is_refused_whatever_it_says_of_itself(guarded: Served) -> None:
    body = json.dumps({**SMALL, "prompt": "a" * 4000}).encode()
    for content in (body, iter([body[:1000], body[1000:]])):
        answer = guarded.http.post("/v1/completions", content=content, headers=KEY)
        assert answer.status_code == 413 and "longer than 2048 bytes" in answer.json()["error"]["message"]


def test_who_sends_all_of_it_before_reading_is_told_so(guarded: Served, certificate: tuple[Path, Path]) -> None:
    """Unread bytes of a closed connection would reset it, and the answer be lost."""
    trusted = ssl.create_default_context(cafile=str(certificate[1]))
    asked = urllib.request.Request(f"{guarded.url}/v1/completions", data=b"a" * (9 << 20), headers=KEY)
    for _ in range(3):
        with pytest.raises(urllib.error.HTTPError, match="413"):
            urllib.request.urlopen(asked, context=trusted, timeout=30)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "the body is not JSON"),
        (b"\xff\xfe", "the body is not UTF-8"),
        (b"[" * 2000, "the body is nested too deeply"),
        (b"[1]", "the body is not a JSON object"),
        (b'{"prompt": "a", "prompt": "b"}', 'the body has the field "prompt" twice'),
        (b'{"prompt": 5}', "prompt is 5"),
        (b'{"max_tokens": 5}', "has prompt, and no messages"),
        (b'{"prompt": "a", "temperature": 1e999}', "give a number"),
        (b'{"prompt": "a", "stream": "yes"}', "give true or false"),
        (b'{"prompt": ' + b"9" * 1000 + b"}", "prompt is 9"),
    ],
)
def test_nonsense_is_a_400_that_says_why(guarded: Served, content: bytes, why: str) -> None:
    answer = guarded.http.post("/v1/completions", content=content, headers=KEY)
    error = answer.json()["error"]
    assert answer.status_code == 400 and why in error["message"] and error["type"] == "invalid_request_error"


def test_a_body_of_two_lengths_is_refused_and_ends_the_connection(guarded: Served) -> None:
    body = json.dumps(SMALL).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer one\r\n"
        b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    )
    with connect(guarded) as link:
        link.sendall(head % (len(body), len(body), body) + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        response = b"".join(iter(lambda: link.recv(4096), b""))
    assert (
        response.startswith(b"HTTP/1.1 400 ") and b"send one of them" in response and response.count(b"HTTP/1.1 ") == 1
    ), response


@pytest.mark.parametrize(
    ("n_chunks", "n_bytes", "is_read"),
    [(MOST_CHUNKS + 1, 1, True), (2 * MOST_CHUNKS, 1, False), (2 * MOST_CHUNKS, CHUNK_BYTES, True)],
)
def test_a_body_of_very_many_small_chunks_is_refused(n_chunks: int, n_bytes: int, is_read: bool) -> None:
    """Reading millions of them would keep all clients waiting for seconds."""
    link = LimitedConnection(h11.SERVER, 1 << 16)
    link.receive_data(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    link.receive_data((b"%x\r\n%b\r\n" % (n_bytes, b" " * n_bytes)) * n_chunks + b"0\r\n\r\n")
    events = iter(link.next_event, h11.NEED_DATA)
    if is_read:
        assert (
            sum(isinstance(event, h11.Data) for event, _ in zip(events, range(n_chunks + 1), strict=False)) == n_chunks
        )
    else:
        with pytest.raises(h11.RemoteProtocolError):
            all(events)


def test_what_is_no_endpoint_is_said_in_openai_s_form(guarded: Served) -> None:
    for method, path in (("GET", "/v1/nothing"), ("POST", "/v1/completions/")):
        answer = guarded.http.request(method, path, headers=KEY)
        assert answer.status_code == 404 and "no such endpoint" in answer.json()["error"]["message"]
    answer = guarded.http.get("/v1/completions", headers=KEY)
    assert answer.status_code == 405 and answer.json()["error"]["code"] == 405


def connect(guarded: Served) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(("127.0.0.1", guarded.port), timeout=60))


def answer_to(served: Served, data: bytes) -> bytes:
    """Empty if the connection is closed without one."""
    with connect(served) as link, contextlib.suppress(ConnectionError, ssl.SSLError):  # it may be closed already
        link.sendall(data)
        return link.recv(1000)
    return b""


def test_half_a_request_is_not_waited_for(hasty: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer one\r\ncontent-length: 100\r\n\r\n{"
    start_s = time.monotonic()
    assert answer_to(hasty, b"") == answer_to(hasty, b"GET /hea") == b""
    assert time.monotonic() - start_s > 1.8 * TIMEOUT_S
    # a client that stood still before it sent that gets nothing
    hasty.until(lambda: b" 408 " in answer_to(hasty, head))
    assert httpx.get(f"{hasty.url}/health", verify=False).status_code == 200


def test_more_connections_than_allowed_are_told_so(guarded: Served) -> None:
    with contextlib.ExitStack() as opened:
        *_, last = (opened.enter_context(connect(guarded)) for _ in range(12))
        assert b"503 Service Unavailable" in last.recv(1000)

    def is_heard() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return guarded.http.get("/health").status_code == 200
        return False

    guarded.until(is_heard)


def is_open(served: Served, link: socket.socket) -> bool:
    """Whether the server has its end of a connection open."""
    ends, established = (f":{served.port:04X}", f":{link.getsockname()[1]:04X}"), "01"
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines())
    return any((words[1][-5:], words[2][-5:], words[3]) == (*ends, established) for words in lines)


def test_what_reads_no_answer_is_cut_off(hasty: Served) -> None:
    """Its answers are larger than what the system keeps for it."""
    size, n_read = len(httpx.get(f"{hasty.url}/metrics", headers=KEY, verify=False).content), 0
    n_asked = (12 << 20) // size

    def has_read() -> bool:
        nonlocal n_read
        with connect(hasty) as deaf, contextlib.suppress(OSError):
            deaf.sendall(b"GET /metrics HTTP/1.1\r\nhost: a\r\nauthorization: Bearer one\r\n\r\n" * n_asked)
            hasty.until(lambda: not is_open(hasty, deaf))
            n_read = 0
            while data := deaf.recv(1 << 20):
                n_read += len(data)
        return n_read > size

    hasty.until(has_read)  # nothing, if it stood still before it had asked
    assert n_read < n_asked * size
    assert httpx.get(f"{hasty.url}/health", verify=False).status_code == 200


def test_tokens_and_back(guarded: Served) -> None:
    def ask(path: str, **query: Any) -> Any:
        answer = guarded.http.post(path, json=query, headers=KEY)
        assert answer.status_code == 200, answer.text
        return answer.json()

    text = "def f(x):\n    return 'é'\n"
    result = ask("/tokenize", content=text)
    assert ask("/detokenize", tokens=result["tokens"])["content"].lstrip() == text and result["count"] > 5
    assert ask("/tokenize", prompt=text, add_special_tokens=False)["tokens"] == result["tokens"]
    assert ask("/detokenize", tokens=result["tokens"])["prompt"].lstrip() == text
    info = guarded.http.get("/tokenizer_info", headers=KEY).json()
    assert set(info) == {"bos_token", "eos_token", "chat_template"} and info["eos_token"]
    pieces = ask("/tokenize", content=text, with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == result["tokens"]
    assert len(ask("/tokenize", content=text, add_special=True)["tokens"]) >= result["count"]
    for wrong in ({}, {"content": 5}, {"content": "a", "with_pieces": 1}):
        assert guarded.http.post("/tokenize", json=wrong, headers=KEY).status_code == 400
    for tokens in (None, "a", [-1], [10**9], [True]):
        assert guarded.http.post("/detokenize", json={"tokens": tokens}, headers=KEY).status_code == 400


def test_metrics_count_what_was_served(guarded: Served) -> None:
    def metrics() -> dict[str, float]:
        lines = guarded.http.get("/metrics", headers=KEY).text.splitlines()
        result = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name.partition("{")[0] if "bucket" not in name else name: float(value) for name, _, value in result}

    before = metrics()
    guarded.http.post("/v1/completions", json={**SMALL, "max_tokens": 5, "ignore_eos": True, "n": 2}, headers=KEY)
    after = metrics()
    more = {name: after[name] - before.get(name, 0) for name in after}
    assert more["llamacpp:tokens_predicted_total"] == more["vllm:generation_tokens_total"] == 10
    n_prompt = more["vllm:prompt_tokens_total"]
    assert n_prompt > 1 and n_prompt % 2 == 0
    assert n_prompt == more["llamacpp:prompt_tokens_total"] + more["vllm:prefix_cache_hits_total"]
    assert more["vllm:time_to_first_token_seconds_count"] == more["vllm:e2e_request_latency_seconds_count"] == 2
    assert more["vllm:inter_token_latency_seconds_count"] == 8 and more["vllm:request_queue_time_seconds_count"] == 2
    assert after["llamacpp:requests_processing"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0 and more["llamacpp:n_decode_total"] >= 5


# -- before anything loads


def test_settings_that_cannot_be_are_said(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    key, chain = certificate
    for values, why in (
        (HttpOptions(port=0, api_key_file=empty), "has no keys"),
        (HttpOptions(port=0, api_key_file=tmp_path / "none"), "No such file"),
        (HttpOptions(port=0, ssl_key_file=key), "go together"),
        (HttpOptions(port=0, ssl_key_file=chain, ssl_cert_file=key), "--ssl-cert-file"),
        (HttpOptions(port=0, host="no.such.host.invalid"), "--host no.such.host.invalid"),
        (HttpOptions(port=0, origins=("chat.example.org",)), "--allow-origin chat.example.org: give SCHEME://HOST"),
        (HttpOptions(port=0, origins=("https://a.org/",)), "--allow-origin https://a.org/: give SCHEME://HOST"),
    ):
        with pytest.raises(UserError, match=why):
            HttpServer(values)
    HttpServer(HttpOptions(port=0, origins=("*", "null", "https://[::1]:8080"))).close(0)
    assert "secret" not in repr(HttpOptions(api_keys=("secret",)))


def test_a_port_is_one_servers_from_the_start() -> None:
    host = "127.1.2.3"  # where no other test takes a port that is free for a moment
    first = HttpServer(HttpOptions(port=0, host=host))
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(UserError, match=f"--port {port}: Address already in use"):
        HttpServer(HttpOptions(port=port, host=host))
    first.close(0)
    HttpServer(HttpOptions(port=port, host=host)).close(0)


def test_a_port_that_others_reach_without_a_key_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for host, keys, is_said in (("0.0.0.0", (), True), ("0.0.0.0", ("one",), False), ("127.0.0.1", (), False)):
        HttpServer(HttpOptions(port=0, host=host, api_keys=keys)).close(0)
        assert ("--host 0.0.0.0 without --api-key" in capsys.readouterr().err) == is_said, (host, keys)


def test_the_way_to_a_port_from_another_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def way_in(host: str) -> str:
        server = HttpServer(HttpOptions(port=0, host=host, api_keys=("one",)))
        server.close(0)
        return server.tunnel.replace(server.address.rpartition(":")[2], "PORT")

    node = socket.gethostname()
    for name in ("SLURMD_NODENAME", "SLURM_SUBMIT_HOST"):
        monkeypatch.delenv(name, raising=False)
    forward = f"ssh -L PORT:127.0.0.1:PORT {node}, then http://127.0.0.1:PORT"
    assert way_in("127.0.0.1") == forward
    for host in ("::1", "[::1]"):
        assert way_in(host) == f"ssh -L PORT:[::1]:PORT {node}, then http://[::1]:PORT"
    assert way_in("0.0.0.0") == f"http://{node}:PORT, or {forward}"
    monkeypatch.setenv("SLURM_SUBMIT_HOST", "login")
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert way_in("127.0.0.1") == "ssh -J login -L PORT:127.0.0.1:PORT n7, then http://127.0.0.1:PORT"
    assert way_in("0.0.0.0") == "ssh -L PORT:n7:PORT login, then http://127.0.0.1:PORT"


def test_a_key_of_nothing_opens_no_server() -> None:
    for words, variables in ((["--api-key", " ,"], {}), ([], {"LLAMA_API_KEY": ","})):
        done = CliRunner(env=variables).invoke(serve_command, words, standalone_mode=False)
        assert isinstance(done.exception, UserError) and "has no key" in str(done.exception), words


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeinfer.server.front.NEEDS", ("starlette", "no_such_module"))
    with pytest.raises(UserError, match=r"needs no_such_module, .* pip install 'pipeinfer\[serve\]'"):
        HttpServer(HttpOptions(port=0))


def test_few_sequences_for_many_texts_are_refused() -> None:
    done = finish(1, ["serve", "--sequences", "3", "--parallel", "4"])
    assert done.returncode == 2 and "--sequences 3 is less than --parallel 4" in done.stderr


def test_a_context_of_less_than_all_requests_is_refused() -> None:
    done = CliRunner().invoke(serve_command, ["-c", "39", "--parallel", "20"], standalone_mode=False)
    assert isinstance(done.exception, UserError) and "give -c 40 or more, or lower --parallel" in str(done.exception)


def test_one_request_is_as_many_texts_as_it_asks_for() -> None:
    defaults = Defaults(SamplingParams(), -1, (), False)
    query = parse_request(
        {"prompt": [[1, 2], [3]], "n": 2, "seed": 2**32 - 1, "best_of": 2}, "/v1/completions", defaults, PassedOver()
    )
    assert [(body.prompt, body.sampling.seed) for body in query.bodies] == [
        ((1, 2), 2**32 - 1),
        ((1, 2), 0),
        ((3,), 2**32 - 1),
        ((3,), 0),
    ]
    assert len(query.prompts) == 2 and not query.keep and not query.stream
    chat = parse_request(
        {"messages": [{"role": "user", "content": "a"}]}, "/v1/chat/completions", defaults, PassedOver()
    )
    assert chat.keep and chat.bodies[0].n_predict == -1
    with pytest.raises(UserError, match="up to 128"):
        parse_request({"prompt": ["a"] * 65, "n": 2}, "/v1/completions", defaults, PassedOver())
