"""Layers on devices whose memory no rank can read: llama.cpp's RPC servers, one a rank, each of which lends the CPU as
two devices.

With a CPU's types of keys and values such a device has a CPU's bits, as ranks find by trying: so all texts are those of
plain llama-cpp-python, under every policy and split, wherever a layer is.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from pipeinfer.errors import UserError
from pipeinfer.models.demo import TARGET
from pipeinfer.models.llama import rpc
from pipeinfer.models.llama.params import IS_X86
from tests.job.batch.test_batch import texts_of
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.cases import in_long
from tests.support.heads import write_head
from tests.support.jobs import environment, finish, plain_tokens, run_json, start, until
from tests.support.namespaces import hosts, missing
from tests.support.paces import pace_words, slow_target
from tests.support.rpc_server import Counter, Server, address_space, needs_rpc, servers
from tests.support.supervised import Supervised

pytestmark = needs_rpc

PROMPT = ["-p", "def read_lines(path):\n", "-n", "48", "--ignore-eos", "-t", "1"]
TYPES = ["-ctk", "bf16", "-ctv", "f16"] if IS_X86 else ["-ctk", "f16", "-ctv", "bf16"]
GREEDY, SAMPLED = ["--temp", "0"], ["--temp", "0.8", "--seed", "7"]
ALL = ["-ngl", "all"]


@pytest.fixture(scope="module")
def three() -> Iterator[list[Server]]:
    with servers(2, 2, 2) as started:
        yield started


def of(started: Sequence[Server | Counter | None]) -> list[str]:
    return ["--rpc", ",".join(each.endpoint if each else "none" for each in started)]


@pytest.fixture(scope="module")
def texts() -> dict[str, list[int]]:
    """By the temperature, on a CPU, no weights repacked, as on devices: greedy by plain llama-cpp-python."""
    sampled = run_json(1, [*PROMPT, *SAMPLED, "--policy", "iterative", "--no-repack"])
    return {SAMPLED[1]: sampled["tokens"], GREEDY[1]: plain_tokens(TARGET, sampled["prompt_tokens"], 48)}


BOTH = "RPC0+RPC1"
CASES: list[tuple[int, str, list[str], str, list[str | None]]] = [
    (1, "auto", SAMPLED, "-ngl 4 --device RPC1 -ngld 0", ["RPC1"]),
    (1, "pipeinfer", GREEDY, "-ngl all", [BOTH]),
    (2, "pipedec", GREEDY, "-ngl 2", [BOTH, BOTH]),
    (2, "speculative", SAMPLED, "-ngl all -ngld 0", [None, BOTH]),
    (3, "pipeinfer", SAMPLED, "-ngl all,0,all --device RPC0,none,RPC1+RPC0", ["RPC0", "none", "RPC1+RPC0"]),
    (3, "flowspec", GREEDY, "-ngl all,1,all --device RPC1", ["RPC1"] * 3),
    (3, "pipespec", GREEDY, "-ngl 2,all,1 -ngld 0", [None, BOTH, BOTH]),
    (3, "auto", SAMPLED, "-ngl all --device RPC0+RPC1,RPC1,auto", [BOTH, "RPC1", BOTH]),
]


@pytest.mark.parametrize("case", [*CASES[2::2], *map(in_long, [CASES[0], *CASES[1::2]])])
def test_all_texts_are_one(
    case: tuple[int, str, list[str], str, list[str | None]], three: list[Server], texts: dict[str, list[int]]
) -> None:
    n_ranks, policy, sampling, where, devices = case
    there = [None if each == "none" else server for each, server in zip(devices, three, strict=False)]
    done = finish(
        n_ranks, ["run", "--json", *PROMPT, *sampling, *TYPES, "--policy", policy, *where.split(), *of(there)]
    )
    assert done.returncode == 0 and "exact does not hold" not in done.stderr, done.stderr
    result = json.loads(done.stdout)
    assert result["tokens"] == texts[sampling[1]]
    assert re.fullmatch(r"exact-\w+-\w+-gpu-[0-9a-f]{4}", result["numerics_name"])
    assert [rank["device"] for rank in result["ranks"]] == devices


def test_several_requests_share_a_device(three: list[Server], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    asked = [
        {"id": str(n), "prompt": f"def read_lines(path):\n    {'x' * n} = ", "n_predict": 16, "temperature": n / 4}
        for n in range(4)
    ]
    source.write_text("".join(json.dumps(each) + "\n" for each in asked))
    found = []
    for n_ranks, words in ((1, ["--parallel", "1"]), (2, ["--parallel", "4", "--policy", "pipeinfer"])):
        output = tmp_path / f"{n_ranks}.jsonl"
        done = finish(
            n_ranks, ["batch", str(source), "-o", str(output), "--seed", "5", *ALL, *words, *of(three[:n_ranks])]
        )
        assert done.returncode == 0, done.stderr
        found.append(texts_of(output))
    assert found[0] == found[1] and len(set(found[0].values())) == 4


def test_layers_with_states_and_features_for_a_head(
    three: list[Server], tmp_path: Path, texts: dict[str, list[int]]
) -> None:
    model = write_random_model(tmp_path / "states.gguf", replace(MODELS["mamba2"], with_vocab=True))
    words = ["-m", str(model), "-md", "none", "-p", "hello there", "-n", "24", *GREEDY, "--ignore-eos"]
    by_cpu = run_json(1, [*words, "-t", "1", "--no-repack"])["tokens"]
    assert run_json(2, [*words, "--policy", "pipeinfer", "--lookup", *ALL, *of(three[:2])])["tokens"] == by_cpu
    head = write_head(tmp_path / "head.gguf", TARGET, (2, 4, 6))
    words = ["-m", str(TARGET), "-md", str(head), *PROMPT, *GREEDY, "--policy", "pipeinfer"]
    pace = pace_words(tmp_path, slow_target(10.0, draft_layers=1, stages=1))
    result = run_json(2, [*words, *ALL, *TYPES, *of(three[:2]), *pace])
    assert result["tokens"] == texts["0"] and result["speculation"]["draft_n"] > 0


def test_info_and_a_plan_name_devices_and_their_memory() -> None:
    """What the plan puts on a device is there, within a twentieth."""
    with servers(1, 1) as two:
        found = json.loads(finish(1, ["info", "--json", *of(two)]).stdout)["hosts"][0]["llama"]["devices"]
        assert [(each["name"], each["description"]) for each in found[1:]] == [
            (f"RPC{number}", server.endpoint) for number, server in enumerate(two)
        ]
        words = ["-md", "none", "-c", "32000", "--policy", "iterative", *ALL]
        planned = json.loads(finish(2, ["plan", "--json", *words, *of(two)]).stdout)["ranks"]
        assert [rank["device"] for rank in planned] == ["RPC0", "RPC0"]
        guessing = ["-ngl", "all", "--device", "RPC0", "-ngld", "0", "--policy", "pipeinfer"]
        done = finish(2, ["plan", "--json", *guessing, *of(two)])
        assert done.returncode == 0, done.stderr
        assert {"iterative", "pipeinfer"} <= {each["policy"] for each in json.loads(done.stdout)["predictions"]}
    with servers(1, 1) as two:  # new ones: others hold memory that what came before has freed, and use it again
        before = [address_space(server.process.pid) for server in two]
        with start(2, ["run", "-p", "x", "-n", "8000", "--ignore-eos", *words, *of(two)]) as job:
            assert job.stdout and job.stdout.read(1)
            used = [address_space(server.process.pid) - at for server, at in zip(two, before, strict=True)]
            job.terminate()
    assert [rank["gpu_bytes"] for rank in planned] == [pytest.approx(n_bytes, rel=0.05) for n_bytes in used]


@pytest.fixture(scope="module")
def one() -> Iterator[Server]:
    with servers(1) as started:
        yield started[0]


RUNS = """
import sys
import numpy as np
from pipeinfer.core.interfaces import Batch
from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.rpc import connect
from pipeinfer.models.llama.stage import LlamaStage
endpoint, first, last = sys.argv[1], *map(int, sys.argv[2:])
connect([endpoint])
params = LlamaParams(256, n_batch=8, n_outputs_max=8, n_gpu_layers=-1)
stage = LlamaStage(open_slice(read_model_info(TARGET), first, last), params)
for position in range(24):
    if position == 8:
        print("begun", flush=True)
        sys.stdin.readline()
    at = np.array([position], np.int32)
    hidden = None if stage.is_first else np.ones((1, stage.n_embd), np.float32)
    stage.evaluate(Batch(at + 5, at, [(0,)], hidden, np.ones(1, bool)), lambda: False)
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(("layers", "waits"), [((0, 9), 1), ((3, 9), 1), ((3, 6), 2)])
def test_a_run_waits_for_its_result_alone(one: Server, layers: tuple[int, int], waits: int) -> None:
    """The last stage for logits, and the graph is sent once. Others wait for their output, and libllama for logits that
    nobody reads."""
    counter = Counter(one)
    command = [sys.executable, "-c", RUNS, counter.endpoint, *map(str, layers)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as child:
        assert child.stdin and child.stdout and child.stdout.readline() == "begun\n"
        # a stage that has its output goes on while libllama waits for the logits
        until(lambda: counter.counts[Counter.GET_TENSOR] >= 8 * waits)
        counter.counts.clear()
        print(file=child.stdin, flush=True)
        assert child.stdout.readline() == "done\n"
        until(lambda: counter.counts[Counter.GET_TENSOR] >= 16 * waits)
        found = dict(counter.counts)
    again = Counter.GRAPH_RECOMPUTE if waits == 1 else Counter.GRAPH_COMPUTE
    assert found == {Counter.SET_TENSOR: found[Counter.SET_TENSOR], Counter.GET_TENSOR: 16 * waits, again: 16}


def test_a_full_device_is_one_line() -> None:
    with servers(1, 1, n_bytes=12 << 20) as two:
        done = finish(2, ["run", "-md", "none", "-c", "9000", "-p", "x", "-n", "4", *ALL, *of(two)])
    assert done.returncode == 2 and done.stdout == ""
    assert f"failed to allocate RPC0[{two[0].endpoint}] buffer" in done.stderr, done.stderr
    assert "use a smaller context (-c) or more ranks" in done.stderr and "Traceback" not in done.stderr


def test_a_server_that_ends_is_a_fault_of_its_rank() -> None:
    with servers(1, 1) as two:
        with start(
            2, ["run", "-md", "none", "-p", "x", "-n", "6000", "-c", "7000", "--ignore-eos", *ALL, *of(two)]
        ) as job:
            assert job.stdout and job.stdout.read(1)
            two[1].stop()
            _, errors = job.communicate(timeout=30)
        line = errors.splitlines()[-1]
        assert job.returncode and line.startswith("pipeinfer: rank 1 (host ") and " on RPC0): its RPC server " in line
        assert ", stage 1, layers " in line and f"{two[1].endpoint} is gone" in line


def test_a_server_that_stands_still_is_a_fault_of_its_rank_and_one_that_is_slow_is_none() -> None:
    with servers(1, 1) as two:
        words = ["run", "-md", "none", "-p", "x", "-n", "6000", "-c", "7000", "--ignore-eos", "--rank-timeout", "15"]
        with start(2, [*words, *ALL, *of(two)]) as job:
            assert job.stdout and job.stdout.read(1)
            two[1].process.send_signal(signal.SIGSTOP)
            time.sleep(3)
            two[1].process.send_signal(signal.SIGCONT)
            assert job.stdout.read(300)
            two[1].process.send_signal(signal.SIGSTOP)
            _, errors = job.communicate(timeout=60)
        line = errors.splitlines()[-1]
        assert job.returncode and line.startswith("pipeinfer: rank 1 (host ") and " on RPC0): its RPC server " in line
        assert ", stage 1, layers " in line and f"{two[1].endpoint} has not answered for " in line


def test_of_two_clients_that_have_asked_a_server_the_second_ends() -> None:
    take = "import sys; from pipeinfer.models.llama import rpc; rpc.TIMEOUT_S = 0.5; rpc.register(sys.argv[1])"
    with servers(1) as [server]:
        with socket.create_connection(rpc._address(server.endpoint)) as first:
            first.sendall(rpc.HELLO)
            assert first.recv(1)
            command = [sys.executable, "-c", take, server.endpoint]
            done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
            assert done.returncode == 1 and "does not answer in 0.5 s: it serves one client at a time" in done.stderr
        again = finish(1, ["info", *of([server])])
        assert again.returncode == 0 and f"RPC0: {server.endpoint}" in again.stdout, again.stderr


def test_more_devices_than_llama_cpp_takes_are_refused() -> None:
    with servers(20) as [server]:
        done = finish(1, ["run", "-p", "x", *ALL, *of([server])])
    assert done.returncode == 2 and "the rank has 20 devices, and llama.cpp takes 15 at most" in done.stderr


def test_doctor_looks_at_servers_from_the_hosts_of_their_ranks() -> None:
    words = ["doctor", "--hosts", f"{socket.gethostname()}:2", "-ngl", "0,all", "--json"]
    with servers(1) as [server]:
        done = finish(1, [*words, "--rpc", f"none,{server.endpoint}"])
    result = json.loads(done.stdout)
    (line,) = [each["text"] for each in result["findings"] if each["check"] == "servers"]
    assert line.startswith(f"rank 1: {server.endpoint}, RPC0 with "), done.stderr
    assert [rank["device"] for rank in result["plan"]["ranks"]] == [None, "RPC0"]
    assert f" -ngl 0,all --rpc none,{server.endpoint} " in result["command"]
    done = finish(1, [*words, "--rpc", f"none,{server.endpoint}"])
    (fault,) = [each for each in json.loads(done.stdout)["findings"] if each["level"] == "error"]
    why = f"a server of rank 1 cannot be used: --rpc {server.endpoint} cannot be reached"
    assert done.returncode == 2 and fault["text"].startswith(why)


def test_a_supervised_job_goes_on_with_the_server_in_its_place(tmp_path: Path) -> None:
    pace = pace_words(tmp_path, slow_target(10.0, stages=1))  # not at its end before it is struck
    words = ["run", "-p", "def f", "-n", "200", "--ignore-eos", "-t", "1", *SAMPLED, *ALL]
    with servers(1, 1) as two:
        text = finish(1, [*words, "--policy", "iterative", *of(two[:1])]).stdout
        job = Supervised(2, [*words, *of(two), *pace])
        begun = job.read(50)
        two[1].stop()
        errors = job.wait_for(f"waiting for the RPC server {two[1].endpoint}, for 20 s".encode())
        two[1] = two[1].start_again()
        code, rest, more = job.finish()
    assert (code, begun + rest) == (0, text), more
    assert b"is gone" in errors and b"the job starts again" in errors


def test_a_server_outlives_clients_that_are_killed_or_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers a client that was killed meanwhile, then one that did not wait, and then has another."""
    with servers(1) as [server]:
        command = [sys.executable, "-c", RUNS, server.endpoint, "0", "9"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        ) as child:
            assert child.stdin and child.stdout and child.stdout.readline() == "begun\n"
            server.process.send_signal(signal.SIGSTOP)
            print(file=child.stdin, flush=True)
            time.sleep(0.5)  # it waits for logits
            monkeypatch.setattr(rpc, "TIMEOUT_S", 0.2)
            with pytest.raises(UserError, match="it serves one client at a time"):
                rpc.connect([server.endpoint])
            child.kill()
        server.process.send_signal(signal.SIGCONT)
        done = finish(1, ["info", *of([server, server])])
        assert done.returncode == 0 and f"RPC0: {server.endpoint}" in done.stdout, done.stderr
        assert server.process.poll() is None


@pytest.mark.skipif(bool(missing(needs_hydra=False)), reason="no namespaces with links here")
def test_a_server_whose_host_is_lost_is_named() -> None:
    """While its answer is waited for."""
    begin = """
import socket, sys, time
from pipeinfer.models.llama.rpc import KEEPALIVE
KEEPALIVE.update(TCP_KEEPIDLE=1, TCP_KEEPINTVL=1, TCP_USER_TIMEOUT=3000)
while socket.socket().connect_ex((sys.argv[1].split(":")[0], 50052)):
    time.sleep(0.1)
"""
    with hosts(2) as two:
        address = two.address("node2")
        serve = [sys.executable, "-m", "tests.support.rpc_server", "50052", "1", "0", address]
        use = [sys.executable, "-c", begin + RUNS, f"{address}:50052", "0", "9"]
        there, here = (
            two.inside(name, f"exec {shlex.join(words)}") for name, words in (("node2", serve), ("node1", use))
        )
        pipe = subprocess.PIPE
        with (
            subprocess.Popen(there, stdout=subprocess.DEVNULL, env=environment()) as server,
            subprocess.Popen(here, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment()) as child,
        ):
            assert child.stdin and child.stdout and child.stdout.readline() == "begun\n"
            server.send_signal(signal.SIGSTOP)
            print(file=child.stdin, flush=True)
            time.sleep(0.5)
            two.cut("node2")
            try:
                _, errors = child.communicate(timeout=20)
            finally:
                child.kill()
                server.kill()
    assert f"its RPC server {address}:50052 is gone" in errors


@pytest.mark.parametrize("command", [["run", "-p", "x", *ALL], ["info"]])
def test_ranks_of_a_host_do_not_share_a_server(one: Server, command: list[str]) -> None:
    done = finish(3, [*command, "--rpc", f"none,{one.endpoint},{one.endpoint}"])
    assert done.returncode == 2, done.stderr
    assert f"--rpc {one.endpoint}: ranks 1 and 2 have it, and a server serves one rank at a time" in done.stderr
    assert one.process.poll() is None


@contextmanager
def answers(data: bytes) -> Iterator[str]:
    """The address of what serves all clients so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    client.recv(33, socket.MSG_WAITALL)
                    client.sendall(data)
                    client.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "closes the connection: it is none of llama.cpp's RPC servers"),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", "none of this llama.cpp's RPC servers: it answers otherwise"),
        (
            struct.pack("<Q3B25x", 28, 6, 1, 0),
            "none of this llama.cpp's RPC servers: its protocol is 6.1; start the ggml-",
        ),
        (struct.pack("<Q", 28), "none of this llama.cpp's RPC servers: it answers otherwise"),
    ],
)
def test_other_servers_are_refused(data: bytes, why: str) -> None:
    """Other programs, other versions, and one that hangs up in the middle."""
    with answers(data) as server, pytest.raises(UserError, match=why):
        rpc.connect([server])


def test_a_server_that_says_one_byte_at_a_time_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "TIMEOUT_S", 0.5)

    def drip() -> None:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            for _ in range(300):
                client.sendall(b"x")
                time.sleep(0.2)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, daemon=True).start()
        start_s = time.monotonic()
        with pytest.raises(UserError, match=r"does not answer in 0\.5 s"):
            rpc.connect([f"127.0.0.1:{listener.getsockname()[1]}"])
    assert time.monotonic() - start_s < 15


def test_what_does_not_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No port, one that says nothing, as a server does that has a client, and one that hangs up."""
    monkeypatch.setattr(rpc, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UserError, match=f"--rpc {server} does not answer in 0.2 s: it serves one client at a time"):
            rpc.connect([server])
    with pytest.raises(UserError, match=f"--rpc {server} cannot be reached: Connection refused; start llama.cpp's"):
        rpc.connect([server])
