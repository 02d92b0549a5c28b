"""Requests on their way to prompts: nobody waits for ever, nor for another one's grammar."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.options.text_sections import ChatOptions, ContextOptions, TextOptions
from pipeinfer.job.requests.body import Body, Defaults
from pipeinfer.job.requests.body_prompts import BodyPrompts
from pipeinfer.job.requests.fields import COMPLETION, PassedOver
from pipeinfer.job.requests.request import DEFAULT_CTX
from pipeinfer.models.demo import TARGET
from pipeinfer.models.text.messages import ChatMessage
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server import process
from pipeinfer.server.prompting import Prompting, Turns, parse_request


def prompting(ask: Callable[[Sequence[Body]], Any]) -> Prompting:
    template = SimpleNamespace(process=SimpleNamespace(start_ahead=lambda: None))
    prompts: Any = SimpleNamespace(
        ask=ask, format=SimpleNamespace(template=template), tokenizer=SimpleNamespace(path=Path("m.gguf"))
    )
    return Prompting(prompts)


def query(grammar: str = "", is_chat: bool = False, name: str = "") -> Any:
    body = SimpleNamespace(name=name, sampling=SimpleNamespace(grammar=grammar), ignore_eos=False)
    return SimpleNamespace(prompts=(body,), bodies=(), is_chat=is_chat, n=1, keep=False)


def test_what_many_prompts_have_in_common_is_read_once() -> None:
    """The loop that serves clients reads it, so they would all wait."""
    defaults = Defaults(SamplingParams(), -1, (), False)
    schema = {"properties": {f"p{at}": dict[str, int]() for at in range(60_000)}}
    gc.freeze()  # what other tests left costs the collector time that is not measured here
    begin_s = time.process_time()
    parse_request({"prompt": "0", "json_schema": schema}, COMPLETION, defaults, PassedOver())
    lone_s, begin_s = time.process_time() - begin_s, time.process_time()
    result = parse_request(
        {"prompt": [str(at) for at in range(64)], "n": 2, "json_schema": schema}, COMPLETION, defaults, PassedOver()
    )
    assert [body.prompt for body in result.bodies[::2]] == [str(at) for at in range(64)]
    with pytest.raises(UserError, match="200000 prompts with n 1 are 200000 texts; a request has up to 128"):
        parse_request({"prompt": ["a"] * 200_000}, COMPLETION, defaults, PassedOver())
    gc.unfreeze()
    assert time.process_time() - begin_s < 8 * lone_s


def test_chats_whose_renderer_fails_are_told() -> None:
    def fail(bodies: Sequence[Body]) -> Any:
        raise OSError(12, "Cannot allocate memory")

    async def run() -> list[Any]:
        server = prompting(fail)
        return [
            result
            for _ in range(2)  # the next ones are rendered anew
            for result in await asyncio.wait_for(
                asyncio.gather(*(server.ask(query(is_chat=True), "a") for _ in range(3)), return_exceptions=True), 10
            )
        ]

    assert [type(each) for each in asyncio.run(run())] == [OSError] * 6


def test_a_slow_grammar_keeps_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = threading.Event()

    def check(tokenizer: Any, grammar: str) -> None:
        checked.wait(20)
        raise UserError("it takes too much time")

    monkeypatch.setattr("pipeinfer.server.prompting.check_grammar", check)

    async def run() -> None:
        server = prompting(lambda bodies: [SimpleNamespace(sampling=SimpleNamespace(grammar=""))] * len(bodies))
        slow = [asyncio.create_task(server.ask(query("slow"), "a")) for _ in range(5)]
        for is_chat in (False, True):
            assert await asyncio.wait_for(server.ask(query(is_chat=is_chat), "a"), 10) == []
        assert not any(each.done() for each in slow)
        checked.set()
        for each in slow:
            with pytest.raises(UserError, match="too much time"):
                await each

    asyncio.run(run())


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_client_whose_prompts_take_long_waits_alone(is_chat: bool) -> None:
    taken = threading.Event()

    def ask(bodies: Sequence[Any]) -> list[Any]:
        if any(body.name == "slow" for body in bodies):
            taken.wait(20)
        return [ValueError(body.name) for body in bodies]

    async def run() -> None:
        server = prompting(ask)
        slow = [asyncio.create_task(server.ask(query(is_chat=is_chat, name="slow"), "a")) for _ in range(9)]
        await asyncio.sleep(0.1)
        for _ in range(3):
            with pytest.raises(ValueError, match="quick"):
                await asyncio.wait_for(server.ask(query(is_chat=is_chat, name="quick"), "b"), 10)
        assert not any(each.done() for each in slow)
        taken.set()
        assert {type(each) for each in await asyncio.gather(*slow, return_exceptions=True)} == {ValueError}
        assert not server._chats

    asyncio.run(run())


# -- clients that leave


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("too late")


def test_work_that_runs_has_its_clients_turn_until_it_ends() -> None:
    """Else one client who leaves again and again would have all threads."""
    ends, begun = threading.Event(), list[str]()

    def work(name: str) -> None:
        begun.append(name)
        ends.wait(20)

    async def run() -> None:
        turns = Turns("work")
        first, second, third = (asyncio.create_task(turns.take("a", partial(work, name))) for name in "123")
        await until(lambda: begun == ["1"])
        first.cancel()
        second.cancel()
        other = asyncio.create_task(turns.take("b", partial(work, "b")))
        await until(lambda: begun == ["1", "b"])
        assert second.done() and not first.done()
        ends.set()
        await asyncio.wait({first, third, other})
        assert begun == ["1", "b", "3"] and first.cancelled()

    asyncio.run(run())


def test_chats_that_nobody_awaits_are_not_rendered() -> None:
    taken, rendered = threading.Event(), list[str]()

    def ask(bodies: Sequence[Any]) -> list[Any]:
        rendered.extend(body.name for body in bodies)
        taken.wait(20)
        return [ValueError(body.name) for body in bodies]

    async def run() -> None:
        server = prompting(ask)
        tasks = [asyncio.create_task(server.ask(query(is_chat=True, name=name), "a")) for name in "123"]
        await until(lambda: rendered == ["1", "2", "3"])
        tasks += [asyncio.create_task(server.ask(query(is_chat=True, name=name), "a")) for name in "45"]
        await asyncio.sleep(0.1)
        tasks[3].cancel()
        taken.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert rendered == ["1", "2", "3", "5"] and not server._chats

    asyncio.run(run())


def test_templates_see_the_day_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service may outlive the day of its start; within a day chats that begin alike share a prefix."""
    now_s, begun = 1e9, list[Prompting]()

    def begin(http: Any, setup: Any, head: Any, prompting: Prompting, metrics: Any) -> Any:
        begun.append(prompting)
        raise KeyboardInterrupt

    def shown() -> str:
        return begun[0].prompts.format.render([ChatMessage("user", "a")]).text

    monkeypatch.setattr(process, "Api", begin)
    monkeypatch.setattr(time, "time", lambda: now_s)
    text = TextOptions(chat=ChatOptions(), template="{{ strftime_now('%F %T') }}", now_s=1e8)
    sizes = {"n_ctx": DEFAULT_CTX, "limit": DEFAULT_CTX, "share": 64, "parallel": 1}
    setup: Any = SimpleNamespace(model=TARGET, text=text, context=ContextOptions(), **sizes)
    served: Any = SimpleNamespace(http=SimpleNamespace(alias="m", n_queue=0), setup=setup, is_followed=False)
    unused: Any = SimpleNamespace(getsockname=lambda: ("", 0))
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(process.serve(served, unused, unused))
    for now_s, seen_s in ((1e9, 1e9), (1e9 + 1, 1e9), (1e9 + 86_400, 1e9 + 86_400)):
        assert shown() == time.strftime("%F %T", time.localtime(seen_s)), now_s


@pytest.mark.parametrize(
    ("n_ctx", "ctx_size", "share", "said"),
    [
        (4096, None, 4096, "the context without -c holds 4096; .*, or start with a larger -c, up to 8192$"),
        (4096, 4096, 1024, "-c 4096 holds 4096; .*, or start with a larger -c, up to 8192$"),
        (8192, None, 4096, "the model holds 8192; shorten it to less than 8192$"),
        (2048, None, 1024, "the memory of the ranks holds 2048; shorten it to less than 2048$"),
        (2048, 4096, 1024, "the memory of the ranks holds 2048; shorten it to less than 2048$"),
    ],
)
def test_what_limits_a_prompt_is_said(n_ctx: int, ctx_size: int | None, share: int, said: str) -> None:
    info: Any = SimpleNamespace(n_ctx_train=8192, n_ctx_most=8192)
    tokenizer = Tokenizer(TARGET)
    options = TextOptions(), ContextOptions(ctx_size=ctx_size)
    prompts = BodyPrompts(*options, info, tokenizer, n_ctx, share)
    (error,) = prompts.ask([Body((5,) * 8200, (), 8, SamplingParams(), (), ignore_eos=False)])
    assert isinstance(error, UserError) and re.search(said, str(error)), error
    tokenizer.close()
