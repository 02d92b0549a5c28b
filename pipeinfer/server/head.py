"""The front's end of the channel to the head: what was asked of it, what has come of that. Knows no HTTP, no text."""

import asyncio
import itertools
import math
import time
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.job.requests.logprobs import Entry
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.serve.front import (
    Ask,
    Begun,
    Came,
    Closing,
    Draining,
    Drop,
    Ended,
    FromFront,
    FromHead,
    Listening,
    Picture,
    Read,
    Ready,
    Waits,
    Watch,
)
from pipeinfer.server.channel import decode, encode
from pipeinfer.server.choices import Answer, Changed, Choice
from pipeinfer.server.errors import DRAINING_S, FULL_S, LOADING_S, Refusal, lost
from pipeinfer.server.options import most_of_one

LINE_BYTES = 1 << 26
N_ROW = 16
"""So many clients' pieces are written in a row: to wake who reads them is most of what that costs, and who is awake
need not be woken for the next one; but the first would wait for the last to be made."""

RETRY = {
    "loading": ("the models are being loaded", LOADING_S),
    "draining": ("the server is shutting down", DRAINING_S),
}


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"  # requests are taken, and wait
    DRAINING = "draining"
    LOST = "lost"


class Heard(Protocol):
    """Who is told what comes, after it was noted."""

    def begun(self, choice: Choice) -> None:
        """For the first time."""
        ...

    def came(self, choice: Choice, n_tokens: int, before_s: float) -> None:
        """`before_s`: when the last tokens before these came; NaN if there were none."""
        ...

    def ended(self, choice: Choice, n_runs: int) -> None:
        """Also when it was given up, which its `finish` says."""
        ...

    def shown(self, picture: Picture) -> None: ...

    def recovered(self, seconds: float) -> None:
        """Another head is ready, so long after the one before was lost."""
        ...


class Head:
    """`n_most`: choices that are open or wait. `is_followed`: another head comes after one that is lost."""

    def __init__(self, n_most: int, heard: Heard, is_followed: bool = False) -> None:
        self.n_most, self.heard, self.is_followed = n_most, heard, is_followed
        self.state = State.LOADING
        self.choices: dict[int, Choice] = {}
        self.came_s = self.tried_s = -math.inf  # when a token came last, and was asked for to see whether one does
        self.is_heard = False  # by clients
        self.limit = 0  # tokens of a request
        self.reason, self.lost_s = "", math.nan  # while it recovers: why, and since when
        self.closing_s = 0.0  # once it is lost, how long its clients have
        self._ids = itertools.count()
        self._pictures: set[asyncio.Queue[Picture]] = set()
        self.writer: asyncio.StreamWriter | None = None

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Until the head is lost."""
        try:
            while line := await reader.readline():
                self._take(decode(line))
        except (OSError, ValueError):  # ValueError: a line that is too long, or none of ours
            pass

    def give_up(self) -> None:
        """No head comes any more."""
        self.state = State.LOST
        for choice in list(self.choices.values()):
            self._note(Ended(choice.id, ""), choice)

    def recover(self, why: str = "") -> None:
        """The head is lost, and another one will come: what was asked waits for it."""
        if self.state is not State.RECOVERING:
            self.state, self.lost_s, self.reason = State.RECOVERING, time.monotonic(), "the job was lost"
        self.reason, self.writer, self.tried_s, self.closing_s = why or self.reason, None, -math.inf, 0.0
        for choice in self.choices.values():
            choice.has_turn = False

    def _ready(self, limit: int) -> None:
        """All that waits is asked for, but for what no longer fits."""
        was, self.state, self.limit = self.state, State.READY, limit
        if was is State.RECOVERING:
            self.heard.recovered(time.monotonic() - self.lost_s)
            for choice in list(self.choices.values()):
                if choice.asked.n_ctx > limit:
                    self._note(Ended(choice.id, ""), choice)
                else:
                    self.tell(_ask(choice, choice.begin_again()))
            if self._pictures:
                self.tell(Watch(True))

    # -- what is asked

    def check_ready(self) -> None:
        """Raises Refusal while nothing can be asked."""
        if self.state is State.LOST:
            raise lost()
        if self.state not in (State.READY, State.RECOVERING):
            message, retry_s = RETRY[self.state.value]
            raise Refusal(503, message, retry_s)

    def ask(self, asked: Sequence[GenerationRequest], client: str) -> Answer:
        """Raises Refusal when there is no room."""
        self.check_ready()
        n_own = sum(choice.client == client for choice in self.choices.values())
        most_own = most_of_one(self.n_most)
        for n_there, n_most, whose in ((len(self.choices), self.n_most, ""), (n_own, most_own, " of this address")):
            if n_there + len(asked) > n_most:
                raise Refusal(429, f"{n_there} texts{whose} are being written or wait, and with {len(asked)} more they "
                                   f"were more than {n_most}; ask again later", FULL_S)  # fmt: skip
        if self.limit and (n := max(each.n_ctx for each in asked)) > self.limit:
            raise Refusal(503, f"the request has {n} tokens with the text to come, and since hosts were lost the job "
                               f"holds {self.limit}; ask for less")  # fmt: skip
        answer = Answer([next(self._ids) for _ in asked], asked, client)
        for choice in answer.choices:
            self.choices[choice.id] = choice
            if self.state is State.READY:
                self.tell(_ask(choice))
        return answer

    @property
    def stalls_s(self) -> float:
        """How long no token has come although one was asked for; 0 where one has."""
        return time.monotonic() - self.tried_s if self.tried_s > self.came_s else 0.0

    async def try_out(self, prompt: Sequence[int], idle_s: float) -> None:
        """While nobody asks for anything, ask for a token now and then: a job may be there and do nothing."""
        while True:
            await asyncio.sleep(idle_s)
            is_idle = self.state is State.READY and not self.choices
            if is_idle and not self.stalls_s and time.monotonic() - self.came_s >= idle_s:
                self.tried_s = time.monotonic()
                trial = GenerationRequest(tuple(prompt), 1, len(prompt) + 1, SamplingParams(0, 0.0), frozenset())
                self.tell(_ask(Choice(next(self._ids), trial, Changed())))  # nobody takes what comes

    def drop(self, answer: Answer) -> None:
        """Nobody wants it any more."""
        for choice in answer.choices:
            if choice.finish is None and choice.id in self.choices:
                del self.choices[choice.id]
                choice.finish, choice.was_left = "", True
                self.tell(Drop(choice.id))
                self.heard.ended(choice, 0)

    def watch(self) -> asyncio.Queue[Picture]:
        """Pictures from now on, the newest; `unwatch` ends it."""
        queue = asyncio.Queue[Picture](1)
        self._pictures.add(queue)
        self.tell(Watch(True))
        return queue

    def unwatch(self, queue: asyncio.Queue[Picture]) -> None:
        self._pictures.discard(queue)
        if not self._pictures:
            self.tell(Watch(False))

    def starts(self) -> None:
        """Clients are heard."""
        self.is_heard = True
        self.tell(Listening())

    def tell(self, message: FromFront) -> None:
        if self.writer and self.state is not State.LOST:
            self.writer.write(encode(message))

    # -- what comes

    def _take(self, message: FromHead) -> None:
        if isinstance(message, Came):
            self._came(message)
        elif isinstance(message, Ended) and not message.finish and self.is_followed:
            pass  # launchers stop rank 0 when another rank dies: the next head goes on with what it gives up
        elif isinstance(message, (Begun, Waits, Read, Ended)):
            if choice := self.choices.get(message.id):
                self._note(message, choice)
        elif isinstance(message, Ready):
            self._ready(message.limit)
        elif isinstance(message, Draining):
            self.state = State.DRAINING
        elif isinstance(message, Closing):
            self.closing_s = message.grace_s
        elif isinstance(message, Picture):
            self._show(message)

    def _came(self, message: Came) -> None:
        """It is counted after all of it is written."""
        self.came_s = time.monotonic()
        came = [(self.choices[part[0]], part) for part in message.parts if part[0] in self.choices]
        before_s, n_new = [choice.came_s for choice, _ in came], []
        for choice, (_, tokens, text, entries) in came:
            choice.came_s, choice.told_s = message.at_s, message.told_s
            n_new.append(choice.come(tokens, text, [Entry(*entry) for entry in entries]))
        changes = list({choice.changed: None for choice, _ in came})
        for start in range(0, len(changes), N_ROW):
            self._write(changes[start : start + N_ROW])
        for (choice, _), each_s, n_tokens in zip(came, before_s, n_new, strict=True):
            if n_tokens:
                self.heard.came(choice, n_tokens, each_s)

    def _write(self, changes: Sequence[Changed]) -> None:
        """What can be written at once is; all else comes later."""
        writes = []
        for changed in changes:
            if write := changed.push() if changed.push else None:
                writes.append(write)
            else:
                changed.set()
        for write in writes:
            write()

    def _note(self, message: Begun | Waits | Read | Ended, choice: Choice) -> None:
        if isinstance(message, Read):
            choice.n_read, choice.n_kept = message.n_tokens, message.n_kept
        elif not isinstance(message, Ended):
            choice.n_read = 0
            choice.has_turn = isinstance(message, Begun)
            if choice.has_turn and math.isnan(choice.begun_s):
                choice.begun_s = time.monotonic()
                self.heard.begun(choice)
        else:
            choice.finish, choice.stop, choice.timings = message.finish, message.stop, message.timings
            del self.choices[choice.id]
            self.heard.ended(choice, message.n_runs)
        choice.changed.set()

    def _show(self, picture: Picture) -> None:
        for queue in self._pictures:
            if queue.full():
                queue.get_nowait()  # who is slow misses some
            queue.put_nowait(picture)
        self.heard.shown(picture)


def _ask(choice: Choice, begun: tuple[int, ...] = ()) -> Ask:
    asked = choice.asked
    return Ask(
        choice.id, asked.prompt, asked.n_predict, asked.sampling, tuple(sorted(asked.end_tokens)), asked.stops,
        asked.markers, asked.spans, asked.keep, asked.priority, choice.client, begun,
    )  # fmt: skip
