"""The front's end of the channel to the head: what was asked of it, what has come of that. Knows no HTTP, no text."""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

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
    Picture,
    Ready,
    Waits,
    Watch,
)
from pipeinfer.server.channel import decode, encode
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
    DRAINING = "draining"
    LOST = "lost"


class Changed(asyncio.Event):
    """Something has come. `push`, while a client's connection takes what there is: makes of what has come what is to be
    written, and returns how; None where that is left to who waits."""

    push: Callable[[], Callable[[], None] | None] | None = None


@dataclass(slots=True, eq=False)
class Choice:
    """One text that is generated. `text`, `entries`: what nobody has taken yet. `has_turn`: the ranks work on it; else
    it waits. Times are by this host's clock."""

    id: int
    asked: GenerationRequest
    changed: Changed
    client: str = ""
    asked_s: float = field(default_factory=time.monotonic)
    begun_s: float = math.nan
    has_turn: bool = False
    came_s: float = math.nan  # when the target had decided on its last tokens
    told_s: float = math.nan  # when the head said so
    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    n_tokens: int = 0
    finish: str | None = None
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        return self.has_turn and self.finish is None

    @property
    def has_logprobs(self) -> bool:
        return self.asked.sampling.n_logprobs >= 0

    def take(self) -> str:
        text, self.text = self.text, ""
        return text

    def take_entries(self) -> list[Entry]:
        entries, self.entries = self.entries, []
        return entries


class Answer:
    """All texts of one request of a client; `changed` is set when something has come of any."""

    def __init__(self, ids: Sequence[int], asked: Sequence[GenerationRequest], client: str = "") -> None:
        self.changed = Changed()
        self.choices = [Choice(id, each, self.changed, client) for id, each in zip(ids, asked, strict=True)]

    @property
    def has_ended(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    @property
    def was_given_up(self) -> bool:
        """Whether the head has given up one of them."""
        return self.has_failed or any(choice.finish == "" for choice in self.choices)

    @property
    def has_failed(self) -> bool:
        """Whether the grammar of one of them took too much."""
        return any(choice.finish == "error" for choice in self.choices)


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


class Head:
    """`n_most`: choices that are open or wait."""

    def __init__(self, n_most: int, heard: Heard) -> None:
        self.n_most, self.heard = n_most, heard
        self.state = State.LOADING
        self.choices: dict[int, Choice] = {}
        self.closing_s = 0.0  # once it is lost, how long its clients have
        self._ids = itertools.count()
        self._pictures: set[asyncio.Queue[Picture]] = set()
        self.writer: asyncio.StreamWriter | None = None

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Until the head is lost: then what was asked of it is given up."""
        try:
            while line := await reader.readline():
                self._take(decode(line))
        except (OSError, ValueError):  # ValueError: a line that is too long, or none of ours
            pass
        self.state = State.LOST
        for choice in list(self.choices.values()):
            self._take(Ended(choice.id, ""))

    # -- what is asked

    def check_ready(self) -> None:
        """Raises Refusal while nothing can be asked."""
        if self.state is State.LOST:
            raise lost()
        if self.state is not State.READY:
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
        answer = Answer([next(self._ids) for _ in asked], asked, client)
        for choice in answer.choices:
            self.choices[choice.id] = choice
            self.tell(_ask(choice))
        return answer

    def drop(self, answer: Answer) -> None:
        """Nobody wants it any more."""
        for choice in answer.choices:
            if choice.finish is None and choice.id in self.choices:
                del self.choices[choice.id]
                choice.finish = ""
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

    def tell(self, message: FromFront) -> None:
        if self.writer and self.state is not State.LOST:
            self.writer.write(encode(message))

    # -- what comes

    def _take(self, message: FromHead) -> None:
        if isinstance(message, Came):
            self._came(message)
        elif isinstance(message, (Begun, Waits, Ended)):
            if choice := self.choices.get(message.id):
                self._note(message, choice)
        elif isinstance(message, Ready):
            self.state = State.READY
        elif isinstance(message, Draining):
            self.state = State.DRAINING
        elif isinstance(message, Closing):
            self.closing_s = message.grace_s
        elif isinstance(message, Picture):
            self._show(message)

    def _came(self, message: Came) -> None:
        """It is counted after all of it is written."""
        came = [(self.choices[part[0]], part) for part in message.parts if part[0] in self.choices]
        before_s = [choice.came_s for choice, _ in came]
        for choice, (_, n_tokens, text, entries) in came:
            choice.came_s, choice.told_s = message.at_s, message.told_s
            choice.text += text
            choice.entries += [Entry(*entry) for entry in entries]
            choice.n_tokens += n_tokens
        changes = list({choice.changed: None for choice, _ in came})
        for start in range(0, len(changes), N_ROW):
            self._write(changes[start : start + N_ROW])
        for (choice, part), each_s in zip(came, before_s, strict=True):
            self.heard.came(choice, part[1], each_s)

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

    def _note(self, message: Begun | Waits | Ended, choice: Choice) -> None:
        if not isinstance(message, Ended):
            choice.has_turn = isinstance(message, Begun)
            if choice.has_turn and math.isnan(choice.begun_s):
                choice.begun_s = time.monotonic()
                self.heard.begun(choice)
        else:
            choice.finish, choice.timings = message.finish, message.timings
            del self.choices[choice.id]
            self.heard.ended(choice, message.n_runs)
        choice.changed.set()

    def _show(self, picture: Picture) -> None:
        for queue in self._pictures:
            if queue.full():
                queue.get_nowait()  # who is slow misses some
            queue.put_nowait(picture)
        self.heard.shown(picture)


def _ask(choice: Choice) -> Ask:
    asked = choice.asked
    return Ask(
        choice.id, asked.prompt, asked.n_predict, asked.sampling, bool(asked.end_tokens), asked.stops, asked.markers,
        asked.spans, asked.keep, asked.priority, choice.client,
    )  # fmt: skip
