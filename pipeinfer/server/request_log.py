"""The server's log on standard error: a line a request, and warnings once, also of prompts that repeat an earlier one
where the cache does not help. Shows no text of a request."""

import contextlib
import re
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeinfer.server.choices import Answer, Choice
from pipeinfer.text import count_text, json_text, number

NAMES: tuple[str, ...] = ("prompt_n", "cache_n", "predicted_n", "ttft_s", "predicted_per_second")
NAMES += ("draft_n", "draft_n_accepted", "contested_n", "queued_s", "preempted_n")
"""The logged timings."""

MAX_NAMED, MAX_NAMED_AT_ONCE, MAX_REPEATS = 1000, 8, 3
"""Warnings of fields in all and of one request, and of repeated prompts of one client."""

N_CHARACTERS = 64  # logged of a field's name
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class RequestLog:
    """`form`: text, json or none."""

    def __init__(self, form: str) -> None:
        self.form, self._named, self._repeating = form, set[str](), Counter[str]()
        self._repeats, self._thread = Repeats(), ThreadPoolExecutor(1, "repeats")

    def ended(self, id: str, path: str, answer: Answer) -> None:
        """Log an answer that is complete, or whose client has gone."""
        if self.form == "none":
            return
        for index, choice in enumerate(answer.choices):
            name = id if len(answer.choices) == 1 else f"{id}#{index}"
            why = choice.finish or ("left" if choice.was_cancelled else "given up")
            if self.form == "json":
                timings = {each: choice.timings.get(each) for each in NAMES} | {"predicted_n": choice.n_tokens}
                at = {"time": round(time.time(), 3), "id": name, "path": path}
                _print(json_text({**at, "client": choice.client, **timings, "finish": why}))
            else:
                _print(f"pipeinfer: {name} {path}: {_figures(choice)}{why}")
        first = answer.choices[0]
        if first.request.keep and first.timings and self._repeating[first.client] < MAX_REPEATS:
            self._thread.submit(self._note_prompt, first)

    def _note_prompt(self, choice: Choice) -> None:
        prompt = choice.request.prompt
        repeat = self._repeats.note(choice.client, prompt, choice.timings.get("cache_n", 0))
        if repeat and len(self._repeating) < MAX_NAMED:
            self._repeating[choice.client] += 1
            at, n_repeated = repeat
            self.warn(
                f"a prompt of {len(prompt)} tokens repeats {n_repeated} of an earlier one, and differs from it from "
                f"token {at} on: nothing behind that comes from the cache; put what changes at the end"
            )

    def passed_over(self, reasons: Mapping[str, str]) -> None:
        """Warn once of each field or part."""
        new = {name[:N_CHARACTERS]: why for name, why in reasons.items() if name[:N_CHARACTERS] not in self._named}
        for name, why in list(new.items())[:MAX_NAMED_AT_ONCE]:
            if len(self._named) < MAX_NAMED:
                self._named.add(name)
                self.warn(f"a request is served without a part of it: {why}")

    def warn(self, what: str) -> None:
        if self.form == "json":
            _print(json_text({"time": round(time.time(), 3), "warning": what}))
        elif self.form == "text":
            _print(f"pipeinfer: {what}")


def _figures(choice: Choice) -> str:
    t: dict[str, Any] = choice.timings
    if not t:
        return f"{choice.n_evaluated} of {choice.n_prompt} prompt tokens, {count_text(choice.n_tokens, 'token')}, "
    guessed = f", guessed ahead {t['draft_n_accepted']} of {t['contested_n']}" if t["draft_n"] else ""
    n_prompt, speed = t["prompt_n"] + t["cache_n"], _number(t["predicted_per_second"])
    prompt = f"{n_prompt} prompt tokens, {t['cache_n']} from the cache, first after {_number(t['ttft_s'])} s"
    return f"{prompt}, {count_text(choice.n_tokens, 'token')}, {speed} tokens/s{guessed}, "


def _number(value: float | None) -> str:
    return "-" if value is None else number(value)


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # standard error may be closed
        print(printable(line), file=sys.stderr, flush=True)


def printable(line: str) -> str:
    """A line in ASCII, its control characters escaped."""
    escaped = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", line)
    return escaped.encode("ascii", "backslashreplace").decode()


# -- repeated prompts

N_LEAST = 512  # tokens of a compared prompt
N_COMPARED, MAX_CLIENTS = 2, 64  # earlier prompts of a client that a new one is compared with, and remembered clients
N_PASSAGE = 16  # tokens of a passage, by which repeats are found
FACTOR = np.uint64(0x9E3779B97F4A7C15)
Numbers = npt.NDArray[np.uint64]


class Repeats:
    """Compares a client's prompts. Takes tens of milliseconds for 65 thousand tokens."""

    def __init__(self) -> None:
        self._earlier = OrderedDict[str, deque[tuple[Numbers, Numbers]]]()  # (tokens, passages) by client

    def note(self, client: str, prompt: Sequence[int], n_cached: int) -> tuple[int, int] | None:
        """(first token that differs from an earlier prompt, tokens behind it that are in the earlier one too); None
        where the cache has most, or less than half repeats."""
        if len(prompt) < N_LEAST:
            return None
        tokens = np.array(prompt, np.uint64)
        earlier = self._earlier.setdefault(client, deque(maxlen=N_COMPARED))
        self._earlier.move_to_end(client)
        if len(self._earlier) > MAX_CLIENTS:
            self._earlier.popitem(last=False)
        repeats = [_repeat(tokens, *each) for each in earlier] if n_cached < len(prompt) / 2 else []
        earlier.append((tokens, _passages(tokens)))
        at, n_repeated = max(repeats, key=lambda each: each[1], default=(0, 0))
        return (at, n_repeated) if n_repeated >= len(prompt) / 2 else None


def _repeat(tokens: Numbers, earlier: Numbers, passages: Numbers) -> tuple[int, int]:
    """(the first token that differs, passages behind it that are in the earlier prompt too)."""
    n = min(len(tokens), len(earlier))
    differ = np.flatnonzero(tokens[:n] != earlier[:n])
    at = int(differ[0]) if len(differ) else n
    return at, int(np.isin(_passages(tokens[at:]), passages).sum())


def _passages(tokens: Numbers) -> Numbers:
    """A hash of the passage from each token on: (n - N_PASSAGE + 1,)."""
    n = max(0, len(tokens) - N_PASSAGE + 1)
    numbers = np.zeros(n, np.uint64)
    for at in range(N_PASSAGE):
        numbers = numbers * FACTOR + tokens[at : at + n]
    return numbers
