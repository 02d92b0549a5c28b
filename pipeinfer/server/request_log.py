"""What the server says of requests on standard error: a line each, and warnings once. Says nothing of their texts."""

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from pipeinfer.observe.report import number
from pipeinfer.observe.texts.json_text import json_text
from pipeinfer.server.choices import Answer, Choice
from pipeinfer.server.repeats import Repeats

NAMES = ("prompt_n", "cache_n", "predicted_n", "ttft_s", "predicted_per_second", "draft_n", "draft_n_accepted",
         "contested_n", "queued_s", "preempted_n")  # fmt: skip
"""Of a text's timings."""


MAX_WARNED = 1000


class RequestLog:
    """`form`: text, json or none."""

    def __init__(self, form: str) -> None:
        self.form, self._warned, self._repeats = form, set[str](), Repeats()

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
        if answer.choices[0].asked.keep and answer.choices[0].timings:
            self._note_prompt(answer.choices[0])

    def _note_prompt(self, choice: Choice) -> None:
        """Once for each client: why the cache cannot help."""
        prompt, key = choice.asked.prompt, f"prompts of {choice.client}"
        found = self._repeats.note(prompt, choice.timings.get("cache_n", 0))
        if found and key not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(key)
            at, n_repeated = found
            _say(
                f"pipeinfer: a prompt of {len(prompt)} tokens repeats {n_repeated} of an earlier one, and differs from "
                f"it from token {at} on: nothing behind that comes from the cache; put what changes at the end"
            )

    def passed_over(self, reasons: Mapping[str, str]) -> None:
        """Once for each field or part."""
        for name, reason in reasons.items():
            if name not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add(name)
                _say(f"pipeinfer: a request is served without a part of it: {reason}")


def say(what: str) -> None:
    """One line."""
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
        print(line.encode("ascii", "backslashreplace").decode(), file=sys.stderr, flush=True)
