"""Large bodies of requests: read beside the loop that serves all clients, and gone when they are answered."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
import httpx

import pipeinfer.server.app as app
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.job.requests.body import Defaults
from pipeinfer.server.front import HttpOptions
from pipeinfer.server.prompting import Prompting

SMALL = {"content": 5}
LARGE = {"content": [7] * 100_000}


def api() -> app.Api:
    template = SimpleNamespace(process=SimpleNamespace(start_ahead=lambda: None))
    prompts: Any = SimpleNamespace(
        format=SimpleNamespace(template=template),
        tokenizer=SimpleNamespace(n_vocab=10, path=Path("m.gguf"), decode_piece=lambda token, special: b"a"),
    )
    defaults = Defaults(SamplingParams(), 1, (), False)
    setup: Any = SimpleNamespace(model=Path("m.gguf"), defaults=defaults, limit=10, parallel=1)
    head: Any = SimpleNamespace(check_ready=lambda: None)
    return app.Api(HttpOptions(), setup, head, Prompting(prompts), SimpleNamespace())  # type: ignore[arg-type]


async def post(fields: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, Any]]:
    served: Any = api().app("127.0.0.1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://localhost") as client:
        answers = [await client.post(path, content=json.dumps(body)) for path, body in fields]
    return [(answer.status_code, answer.json()) for answer in answers]


def test_a_thread_reads_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    read, threads = app.read_json, []

    def noted(data: bytes, what: str) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return read(data, what)

    monkeypatch.setattr(app, "read_json", noted)
    small, large, tokens = asyncio.run(
        post([("/tokenize", SMALL), ("/tokenize", LARGE), ("/detokenize", {"tokens": [1] * 20_000})])
    )
    assert (small[0], large[0]) == (400, 400)
    assert "content is 5;" in small[1]["error"]["message"]
    assert "content is [7, 7," in large[1]["error"]["message"]
    assert tokens == (200, dict.fromkeys(("content", "prompt"), "a" * 20_000))
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/tokenize", LARGE),
        ("/apply-template", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_work_of_a_client_who_has_left_is_not_done(path: str, body: dict[str, Any]) -> None:
    served: Any = api()
    done, ends = list[str](), threading.Event()

    def work(*args: Any) -> Any:
        done.append(path)

    served.spell = served.prompting.prompts.tokenizer.encode = served.prompting.prompts.rendered = work

    async def leave() -> None:
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return messages.pop(0) if messages else await asyncio.sleep(60)

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "client": ("a", 1)}
        await served.app("127.0.0.1")(scope, receive, send)

    async def run() -> None:
        turns = served.prompting._rendering if path == "/apply-template" else served.prompting._tokenising
        first = asyncio.create_task(turns.take("a", lambda: ends.wait(20)))
        await asyncio.wait_for(leave(), 10)
        ends.set()
        await first
        await turns.take("a", lambda: None)

    asyncio.run(run())
    assert not done


def test_nothing_refers_to_a_body_when_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection's objects refer to each other, and live until they are collected."""
    requests: list[Any] = []
    body = app.Api._body

    def noted(self: app.Api, request: Any, read: Any) -> Any:
        requests.append(request)
        return body(self, request, read)

    monkeypatch.setattr(app.Api, "_body", noted)
    asyncio.run(post([("/v1/completions", {"prompt": [-1], "n": 2})]))
    assert vars(requests[0].state)["_state"] == {"fields": frozenset({"prompt", "n"})}
