"""The texts of one HTTP request and their output so far. Knows no rank 0 and no HTTP."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.job.requests.answers import Entry
from pipeinfer.job.requests.request import GenerationRequest


class Changed(asyncio.Event):
    """Set when output is available. `push`, if set, formats it and returns the function that writes it, or None to
    leave both to the waiting coroutine."""

    push: Callable[[], Callable[[], None] | None] | None = None


@dataclass(slots=True, eq=False)
class Choice:
    """One generated text, OpenAI's word. `text`, `entries`: output not yet taken. Times are of this host's clock, but
    `verdict_s` and `told_s` of rank 0's."""

    id: int
    request: GenerationRequest
    changed: Changed
    client: str = ""
    submitted_s: float = field(default_factory=time.monotonic)
    started_s: float = math.nan
    has_turn: bool = False  # the ranks work on it
    n_read: int = 0  # evaluated tokens of its prompt, and those of them that were cached
    n_cached: int = 0
    verdict_s: float = math.nan  # of its newest tokens, and of the message with them
    told_s: float = math.nan
    heard_s: float = math.nan  # when that came, and when the first tokens did
    first_s: float = math.nan
    text: str = ""
    has_new_line: bool = False  # in the generated text
    entries: list[Entry] = field(default_factory=list)
    scores: list[Entry] = field(default_factory=list)  # of the prompt's tokens
    offsets: Sequence[int] = ()  # of these in the text, if it begins with the prompt
    n_echoed: int = 0  # characters of the prompt in the text
    tokens: list[int] = field(default_factory=list)
    n_characters: int = 0  # received, and log-probabilities
    n_entries: int = 0
    skips: tuple[int, int, int] = 0, 0, 0
    """Tokens, characters and entries to skip, as another job generates them again."""
    finish: str | None = None  # OpenAI's reason; empty: given up
    stop: str = ""  # the stop string that ended it
    was_cancelled: bool = False  # by its client
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        return self.has_turn and self.finish is None

    @property
    def has_logprobs(self) -> bool:
        return self.request.sampling.n_logprobs >= 0

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_evaluated(self) -> int:
        """Evaluated tokens of its prompt."""
        return self.n_prompt if self.tokens else self.n_read

    @property
    def timings_so_far(self) -> dict[str, float]:
        """`timings` of a text that goes on. Rates over no time at all are 0."""
        n_prompt, n, prompt_ms = self.n_prompt - self.n_cached, self.n_tokens, 1e3 * (self.first_s - self.started_s)
        predicted_ms = 1e3 * (self.heard_s - self.first_s)
        return {
            "prompt_n": n_prompt,
            "cache_n": self.n_cached,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": _ratio(prompt_ms, n_prompt),
            "prompt_per_second": 1e3 * _ratio(n_prompt, prompt_ms),
            "predicted_n": n,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": _ratio(predicted_ms, n - 1),
            "predicted_per_second": 1e3 * _ratio(n - 1, predicted_ms),
            "at_s": self.verdict_s,
            "told_s": self.told_s,
        }

    def add(self, tokens: Sequence[int], text: str, entries: Sequence[Entry]) -> int:
        """Append output. Returns how many tokens are new."""
        if any(self.skips):
            n_tokens, n_text, n_entries = self.skips
            self.skips = max(0, n_tokens - len(tokens)), max(0, n_text - len(text)), max(0, n_entries - len(entries))
            tokens, text, entries = tokens[n_tokens:], text[n_text:], entries[n_entries:]
        self.text += text
        self.has_new_line = self.has_new_line or "\n" in text
        if not self.tokens:
            self.first_s = self.heard_s
        self.entries += [each._replace(offset=each.offset + self.n_echoed) for each in entries]
        self.tokens += tokens
        self.n_characters += len(text)
        self.n_entries += len(entries)
        return len(tokens)

    def echo(self, text: str, offsets: Sequence[int]) -> None:
        """The text begins with that of the prompt."""
        self.text, self.n_echoed, self.offsets = text, len(text), offsets

    def score(self, entries: Sequence[Entry]) -> None:
        """Take the log-probabilities of the prompt's tokens but the first; another job sends them again."""
        if not self.scores:
            self.scores = [Entry(self.request.prompt[0], None, (), 0), *entries]
            if self.has_logprobs:
                pairs = zip(self.scores, self.offsets, strict=False)
                self.entries += [entry._replace(offset=offset) for entry, offset in pairs]

    def resume(self) -> tuple[int, ...]:
        """The tokens from which another job resumes: all but the last, so that one is left to generate. None with
        log-probabilities, which only come with new tokens."""
        resumed = () if self.has_logprobs else tuple(self.tokens[:-1])
        self.skips = self.n_tokens - len(resumed), self.n_characters, self.n_entries
        return resumed

    def take(self) -> str:
        text, self.text = self.text, ""
        return text

    def take_entries(self) -> list[Entry]:
        entries, self.entries = self.entries, []
        return entries


def _ratio(value: float, of: float) -> float:
    return value / of if of else 0.0


class Answer:
    """The texts of one HTTP request. `changed` is set when any of them has output."""

    def __init__(self, ids: Sequence[int], requests: Sequence[GenerationRequest], client: str = "") -> None:
        self.changed = Changed()
        self.choices = [Choice(id, each, self.changed, client) for id, each in zip(ids, requests, strict=True)]

    @property
    def has_ended(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    async def end(self) -> None:
        """Return when all of them have ended."""
        while not self.has_ended:
            await self.changed.wait()
            self.changed.clear()

    @property
    def awaits(self) -> str:
        """The reason why there is no output now, for clients."""
        choice = next(choice for choice in self.choices if choice.finish is None)
        if not choice.has_turn:
            return "it waits for room beside other texts"
        return f"{choice.n_evaluated} of {choice.n_prompt} prompt tokens are evaluated"

    @property
    def was_given_up(self) -> bool:
        """Whether rank 0 has given up one of them."""
        return any(choice.finish in ("", "error") for choice in self.choices)

    @property
    def has_failed(self) -> bool:
        """Whether the grammar of one of them took too much."""
        return any(choice.finish == "error" for choice in self.choices)
