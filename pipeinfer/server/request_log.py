"""What the server says of requests on standard error: a line each, and warnings once. Says nothing of their texts."""

import contextlib
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipeinfer.observe.report import number
from pipeinfer.observe.texts.json_text import json_text
from pipeinfer.server.choices import Answer, Choice
from pipeinfer.server.repeats import Repeats

NAMES = ("prompt_n", "cache_n", "predicted_n", "ttft_s", "predicted_per_second", "draft_n", "draft_n_accepted",
         "contested_n", "queued_s", "preempted_n")  # fmt: skip
"""Of a text's timings."""

MAX_NAMED, MAX_NAMED_AT_ONCE = 1000, 8
"""Names that are told once each, in all and of one request; what a client may call them is longer than that."""

N_CHARACTERS, MAX_REPEATS = 64, 3
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class RequestLog:
    """`form`: text, json or none."""

    def __init__(self, form: str) -> None:
        self.form, self._named, self._repeating = form, set[str](), Counter[str]()
        self._repeats, self._thread = Repeats(), ThreadPoolExecutor(1, "repeats")

    def ended(self, id: str, path: str, answer: Answer) -> None:
        """All has come, or nobody wants more."""
        for index, choice in enumerate(answer.choices if self.form != "none" else ()):
            name = id if len(answer.choices) == 1 else f"{id}#{index}"
            why = choice.finish or ("left" if choice.was_left else "given up")
            if self.form == "json":
                timings = {each: choice.timings.get(each) for each in NAMES} | {"predicted_n": choice.n_tokens}
                at = {"time": round(time.time(), 3), "id": name, "path": path}
                _say(json_text({**at, "client": choice.client, **timings, "finish": why}))
            else:
                _say(f"pipeinfer: {name} {path}: {_figures(choice)}{why}")
        first = answer.choices[0]
        if self.form != "none" and first.asked.keep and first.timings and self._repeating[first.client] < MAX_REPEATS:
            self._thread.submit(self._note_prompt, first)

    def _note_prompt(self, choice: Choice) -> None:
        """A few times for each client: why the cache cannot help."""
        prompt = choice.asked.prompt
        repeat = self._repeats.note(choice.client, prompt, choice.timings.get("cache_n", 0))
        if repeat and len(self._repeating) < MAX_NAMED:
            self._repeating[choice.client] += 1
            at, n_repeated = repeat
            self.warn(
                f"a prompt of {len(prompt)} tokens repeats {n_repeated} of an earlier one, and differs from it from "
                f"token {at} on: nothing behind that comes from the cache; put what changes at the end"
            )

    def passed_over(self, reasons: Mapping[str, str]) -> None:
        """Once for each field or part."""
        new = {
            name[:N_CHARACTERS]: reason for name, reason in reasons.items() if name[:N_CHARACTERS] not in self._named
        }
        for name, reason in list(new.items())[:MAX_NAMED_AT_ONCE]:
            if len(self._named) < MAX_NAMED:
                self._named.add(name)
                self.warn(f"a request is served without a part of it: {reason}")

    def warn(self, what: str) -> None:
        if self.form == "json":
            _say(json_text({"time": round(time.time(), 3), "warning": what}))
        elif self.form == "text":
            _say(f"pipeinfer: {what}")


def _figures(choice: Choice) -> str:
    t: dict[str, Any] = choice.timings
    if not t:
        return f"{choice.n_evaluated} of {len(choice.asked.prompt)} prompt tokens, {choice.n_tokens} tokens, "
    guessed = f", guessed ahead {t['draft_n_accepted']} of {t['contested_n']}" if t["draft_n"] else ""
    return (f"{t['prompt_n'] + t['cache_n']} prompt tokens, {t['cache_n']} from the cache, first after "
            f"{_shown(t['ttft_s'])} s, {choice.n_tokens} tokens, {_shown(t['predicted_per_second'])} tokens/s"
            f"{guessed}, ")  # fmt: skip


def _shown(value: float | None) -> str:
    return "-" if value is None else number(value)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # who reads it may have gone
        print(printable(line), file=sys.stderr, flush=True)


def printable(line: str) -> str:
    """A line that no client's text can break, or end, or make a terminal act on."""
    escaped = CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", line)
    return escaped.encode("ascii", "backslashreplace").decode()
