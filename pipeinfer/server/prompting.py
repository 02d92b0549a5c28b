"""Requests -> prompts in tokens, beside the loop that serves clients: chats that come together are rendered together.

Knows no HTTP.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import TypeVar
from weakref import WeakValueDictionary

from pipeinfer.job.requests.body_prompts import BodyPrompts
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.requests.request_body import Body
from pipeinfer.models.text.grammar_check import check_grammar
from pipeinfer.server.asked import Asked

T = TypeVar("T")

N_TOGETHER = 64
"""Chats at most that a process is started for."""

N_THREADS = 2
"""For each kind of work. One client has one of them at a time: who asks for much waits for it alone."""

Found = GenerationRequest | Exception


class Turns:
    """Threads that work for clients in turn."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(N_THREADS, name)
        self._locks = WeakValueDictionary[str, asyncio.Lock]()

    async def take(self, client: str, work: Callable[[], T]) -> T:
        """What the work comes to, once that which was asked for this client before is done."""
        lock = self._locks.get(client) or asyncio.Lock()
        self._locks[client] = lock
        async with lock:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class Prompting:
    """Some threads tokenise, others have chats rendered, others have grammars checked, of which some take seconds."""

    def __init__(self, prompts: BodyPrompts) -> None:
        self.prompts = prompts
        self._tokenising, self._rendering, self._checking = Turns("tokenise"), Turns("render"), Turns("check")
        self._chats: dict[str, list[tuple[Body, asyncio.Future[Found]]]] = {}  # by client, while it has some
        self._tasks = set[asyncio.Task[None]]()
        Thread(target=self._start_ahead, daemon=True).start()

    def _start_ahead(self) -> None:
        self.prompts.format.template.process.start_ahead()

    async def ask(self, asked: Asked, client: str) -> list[GenerationRequest]:
        """One for each of its texts. Raises UserError for the first prompt that cannot be served."""
        bodies = asked.prompts
        await self._check({body.sampling.grammar for body in bodies if not body.ignore_eos}, client)
        found: Sequence[Found]
        if asked.is_chat:
            found = await self._ask_chats(bodies, client)
        else:
            found = await self.tokenise(client, partial(self.prompts.ask, bodies))
        prompts = [_or_raise(each) for each in found]
        await self._check({prompt.sampling.grammar for prompt in prompts}, client)
        return [
            replace(prompt, sampling=replace(prompt.sampling, seed=body.sampling.seed).settled, keep=asked.keep)
            for at, body in enumerate(asked.bodies)
            for prompt in [prompts[at // asked.n]]
        ]

    async def _check(self, grammars: set[str], client: str) -> None:
        """What is found is remembered for whoever asks next."""
        for grammar in grammars - {""}:
            await self._checking.take(client, partial(check_grammar, self.prompts.tokenizer, grammar))

    async def rendered(self, body: Body, client: str) -> str:
        """The text of a chat. Raises UserError."""
        return (await self._rendering.take(client, lambda: self.prompts.rendered(body))).text

    async def tokenise(self, client: str, work: Callable[[], T]) -> T:
        """Do something with the vocabulary, where nobody else waits for it."""
        return await self._tokenising.take(client, work)

    async def _ask_chats(self, bodies: Sequence[Body], client: str) -> list[Found]:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Found]] = [loop.create_future() for _ in bodies]
        if client not in self._chats:
            self._chats[client] = []
            task = loop.create_task(self._render(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._chats[client] += zip(bodies, futures, strict=True)
        return list(await asyncio.gather(*futures))

    async def _render(self, client: str) -> None:
        """Until no chat of the client waits: those that came while others were rendered go together."""
        while chats := self._chats[client]:
            group, self._chats[client] = chats[:N_TOGETHER], chats[N_TOGETHER:]
            found: Sequence[Found]
            try:
                found = await self._rendering.take(client, partial(self.prompts.ask, [body for body, _ in group]))
            except Exception as error:  # also where no process can be started: nobody shall wait for ever
                found = [error] * len(group)
            for (_, future), each in zip(group, found, strict=True):
                if not future.done():
                    future.set_result(each)
        del self._chats[client]
        await asyncio.to_thread(self._start_ahead)


def _or_raise(found: Found) -> GenerationRequest:
    if isinstance(found, Exception):
        raise found
    return found
