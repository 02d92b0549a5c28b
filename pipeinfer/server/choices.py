"""The texts that a client's request asks for, and what has come of them. Knows no head and no HTTP."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.job.requests.logprobs import Entry
from pipeinfer.job.requests.request import GenerationRequest

NOTHING = 0, 0, 0


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
    n_read: int = 0  # tokens of its prompt that are evaluated, and of them those that were in the cache
    n_kept: int = 0
    came_s: float = math.nan  # when the target had decided on its last tokens
    told_s: float = math.nan  # when the head said so
    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    n_characters: int = 0  # that have come, and entries
    n_entries: int = 0
    again: tuple[int, int, int] = NOTHING
    """After the job was started again: tokens, characters and entries that come although they were there before."""
    finish: str | None = None
    stop: str = ""  # the stop string that ended it
    was_left: bool = False  # by its client
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        return self.has_turn and self.finish is None

    @property
    def has_logprobs(self) -> bool:
        return self.asked.sampling.n_logprobs >= 0

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_evaluated(self) -> int:
        """Tokens of its prompt."""
        return len(self.asked.prompt) if self.tokens else self.n_read

    def come(self, tokens: Sequence[int], text: str, entries: Sequence[Entry]) -> int:
        """How many of the tokens are new."""
        if self.again != NOTHING:
            tokens, text, entries = self._without_those_before(tokens, text, entries)
        self.text += text
        self.entries += entries
        self.tokens += tokens
        self.n_characters += len(text)
        self.n_entries += len(entries)
        return len(tokens)

    def _without_those_before(
        self, tokens: Sequence[int], text: str, entries: Sequence[Entry]
    ) -> tuple[Sequence[int], str, Sequence[Entry]]:
        n_tokens, n_characters, n_entries = self.again
        self.again = (
            max(0, n_tokens - len(tokens)), max(0, n_characters - len(text)), max(0, n_entries - len(entries))
        )  # fmt: skip
        return tokens[n_tokens:], text[n_characters:], entries[n_entries:]

    def begin_again(self) -> tuple[int, ...]:
        """What another job is to begin with: all tokens but the last, so that there is one to come; none where their
        log-probabilities are wanted, which only come with new ones."""
        begun = () if self.has_logprobs else tuple(self.tokens[:-1])
        self.again = self.n_tokens - len(begun), self.n_characters, self.n_entries
        return begun

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
        return None not in [choice.finish for choice in self.choices]

    @property
    def awaits(self) -> str:
        """Why nothing comes now, as far as that is known."""
        choice = next(choice for choice in self.choices if choice.finish is None)
        if not choice.has_turn:
            return "it waits for room beside other texts"
        return f"{choice.n_evaluated} of {len(choice.asked.prompt)} prompt tokens are evaluated"

    @property
    def was_given_up(self) -> bool:
        """Whether the head has given up one of them."""
        return self.has_failed or any(choice.finish == "" for choice in self.choices)

    @property
    def has_failed(self) -> bool:
        """Whether the grammar of one of them took too much."""
        return any(choice.finish == "error" for choice in self.choices)
