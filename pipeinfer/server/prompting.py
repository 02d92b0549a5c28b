"""Requests -> prompts in tokens, beside the loop that serves clients: chats that come together are rendered together.

Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from pipeinfer.errors import UserError
from pipeinfer.job.body_prompts import BodyPrompts
from pipeinfer.job.request import GenerationRequest
from pipeinfer.job.request_body import Body
from pipeinfer.models.grammar_check import check_grammar
from pipeinfer.server.asked import Asked

T = TypeVar("T")

N_TOGETHER = 64
"""Chats at most that a process is started for."""

N_CHECKING = 2
"""Processes at most that check grammars."""

Found = GenerationRequest | UserError


class Prompting:
    """One thread tokenises, another has chats rendered; grammars, of which some take seconds, are checked by others."""

    def __init__(self, prompts: BodyPrompts) -> None:
        self.prompts = prompts
        self._tokenising = ThreadPoolExecutor(1, "tokenise")
        self._rendering = ThreadPoolExecutor(1, "render")
        self._checking = ThreadPoolExecutor(N_CHECKING, "check")
        self._chats: list[tuple[Body, asyncio.Future[Found]]] = []
        self._renderer: asyncio.Task[None] | None = None
        self._rendering.submit(self._start_ahead)

    def _start_ahead(self) -> None:
        self.prompts.format.template.start_ahead()

    async def ask(self, asked: Asked) -> list[GenerationRequest]:
        """One for each of its texts. Raises UserError for the first prompt that cannot be served."""
        bodies = asked.prompts
        for grammar in {body.sampling.grammar for body in bodies if body.sampling.grammar and not body.ignore_eos}:
            await self._check(grammar)  # what is found is remembered for whoever asks next
        if asked.is_chat:
            found = await self._ask_chats(bodies)
        else:
            found = await self.tokenise(lambda: self.prompts.ask(bodies))
        prompts = [_or_raise(each) for each in found]
        return [
            replace(prompts[at // asked.n], sampling=body.sampling.settled, keep=asked.keep)
            for at, body in enumerate(asked.bodies)
        ]

    async def _check(self, grammar: str) -> None:
        path = self.prompts.tokenizer.path
        await asyncio.get_running_loop().run_in_executor(self._checking, check_grammar, path, grammar)

    async def tokenise(self, work: Callable[[], T]) -> T:
        """Do something with the vocabulary, where nobody waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenising, work)

    async def _ask_chats(self, bodies: Sequence[Body]) -> list[Found]:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Found]] = [loop.create_future() for _ in bodies]
        self._chats += zip(bodies, futures, strict=True)
        if self._renderer is None or self._renderer.done():
            self._renderer = asyncio.create_task(self._render())
        return list(await asyncio.gather(*futures))

    async def _render(self) -> None:
        """Until no chat waits: those that came while others were rendered go together."""
        while self._chats:
            group, self._chats = self._chats[:N_TOGETHER], self._chats[N_TOGETHER:]
            bodies = [body for body, _ in group]
            found: Sequence[Found]
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._rendering, self.prompts.ask, bodies)
            except UserError as error:
                found = [error] * len(group)
            except BaseException as error:  # as where no process can be started: nobody shall wait for ever
                for _, future in (*group, *self._chats):
                    if not future.done():
                        future.set_exception(error)
                self._chats.clear()
                raise
            for (_, future), each in zip(group, found, strict=True):
                if not future.done():
                    future.set_result(each)
        self._rendering.submit(self._start_ahead)


def _or_raise(found: Found) -> GenerationRequest:
    if isinstance(found, UserError):
        raise found
    return found
