"""Answers in OpenAI's forms, whole and in pieces, with llama.cpp's timings. Knows no HTTP: makes objects."""

import json
import secrets
import time
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from pipeinfer.job.requests.answer_check import AnswerCheck
from pipeinfer.job.requests.answer_form import call_of, finish_of, message_of, reader_of
from pipeinfer.job.requests.logprobs import Spell, chat_form, completion_form
from pipeinfer.models.text.answers import AnswerReader, Part
from pipeinfer.server.asked import Asked
from pipeinfer.server.choices import Answer, Choice
from pipeinfer.server.errors import Refusal

DONE = b"data: [DONE]\n\n"
MARK = "\0text\0"
"""Stands for a text; no model's name has it."""

TIMES = "predicted_n", "at_s", "told_s"
TIMED = b',"timings":{"predicted_n":%d,"at_s":%.6f,"told_s":%.6f}}\n\n'
"""One more member of an object, which ends with it."""

MAX_CHECKED = 4
"""Texts of an answer that are compared with its schema."""

ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def json_bytes(data: Any) -> bytes:
    """What cannot be said in UTF-8 is replaced."""
    return ENCODER.encode(data).encode("utf-8", "replace")


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(data) + b"\n\n"


class Form:
    """What all objects of one answer have in common. `model`, `version`: what wrote it."""

    def __init__(self, asked: Asked, answer: Answer, model: str, version: str, spell: Spell) -> None:
        self.asked, self.answer, self.spell = asked, answer, spell
        kind = "chat.completion" if asked.is_chat else "text_completion"
        self.common = {
            "id": self._name(),
            "object": f"{kind}.chunk" if asked.stream and asked.is_chat else kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": version,
        }
        self._around: dict[int, tuple[bytes, bytes]] = {}  # of each choice what is before and behind a text
        self._readers: dict[int, AnswerReader] = {}
        self._n_read: dict[int, int] = {}  # of each choice, tokens of its prompt that were told as evaluated
        self._n_told: dict[int, int] = {}  # the number of the last call that was told
        self._checks = [AnswerCheck(asked.schemas) for _ in asked.bodies] if asked.schemas else []

    def _name(self) -> str:
        return f"{'chatcmpl' if self.asked.is_chat else 'cmpl'}-{secrets.token_hex(12)}"

    # -- whole

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(index, choice) for index, choice in enumerate(self.answer.choices)]
        return {**self.common, "choices": choices, "usage": self.usage(), "timings": self._timings()}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        is_chat = self.asked.is_chat
        said = {"message": message_of(self._parts(index, choice))} if is_chat else {"text": self._take(index, choice)}
        finish, seed = self._finish(index, choice), choice.asked.sampling.seed
        return {"index": index, **said, "logprobs": self._logprobs(choice), "finish_reason": finish, "seed": seed}

    def _parts(self, index: int, choice: Choice) -> list[Part]:
        """What a chat's answer has had since the last time."""
        reader = self._reader(index)
        found = reader.push(choice.take())
        found += reader.finish(choice.finish == "length" or bool(choice.stop)) if choice.finish else []
        if self._checks:
            self._checks[index].push(found)
        return found

    def _take(self, index: int, choice: Choice) -> str:
        """What a text has had since the last time."""
        text = choice.take()
        if self._checks:
            self._checks[index].push([Part("content", text)])
        return text

    @property
    def has_checks(self) -> bool:
        """Whether the answer is to be compared with what was asked."""
        return bool(self._checks)

    def mismatches(self) -> list[str]:
        """Of the first texts that were not cut: where they do not fit what was asked, a line each. Takes seconds."""
        ended = zip(self._checks, self.answer.choices, strict=True)
        whole = [check for check, choice in ended if choice.finish == "stop" and not choice.stop]
        return [wrong for check in whole[:MAX_CHECKED] for wrong in check.mismatches()]

    def _reader(self, index: int) -> AnswerReader:
        if index not in self._readers:
            body, asked = self.asked.bodies[index], self.answer.choices[index].asked
            self._readers[index] = reader_of(body, asked.thought)
        return self._readers[index]

    def _finish(self, index: int, choice: Choice) -> str | None:
        reader = self._readers.get(index)
        return finish_of(choice.finish, reader) if reader and choice.finish else choice.finish

    def _progress(self, index: int, choice: Choice) -> dict[str, Any] | None:
        """How much of its prompt is evaluated, in llama-server's words, where that is asked for and has changed."""
        if not self.asked.progress or choice.n_read == self._n_read.get(index, 0):
            return None
        self._n_read[index] = choice.n_read
        counts = {"total": len(choice.asked.prompt), "cache": choice.n_kept, "processed": choice.n_read}
        return {"prompt_progress": counts | {"time_ms": round(1e3 * (time.monotonic() - choice.begun_s))}}

    def _logged(self, choice: Choice) -> dict[str, Any]:
        return {"logprobs": self._logprobs(choice)} if choice.entries else {}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Of what has come since the last time; None if nobody asked for them."""
        if not choice.has_logprobs:
            return None
        return (chat_form if self.asked.is_chat else completion_form)(choice.take_entries(), self.spell)

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many texts continue it."""
        choices = self.answer.choices
        n_prompt = sum(len(choice.asked.prompt) for choice in choices[:: self.asked.n])
        n_kept = sum(choice.timings.get("cache_n", 0) for choice in choices[:: self.asked.n])
        n_completion = sum(choice.n_tokens for choice in choices)
        return {
            "prompt_tokens": n_prompt, "completion_tokens": n_completion, "total_tokens": n_prompt + n_completion,
            "prompt_tokens_details": {"cached_tokens": n_kept},
        }  # fmt: skip

    def _timings(self) -> dict[str, Any]:
        """Of the first text."""
        return self.answer.choices[0].timings

    # -- in pieces, each of them an event

    def first(self) -> bytes:
        """What a chat's stream begins with."""
        if not self.asked.is_chat:
            return b""
        said = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._piece(index, said) for index in range(len(self.answer.choices)))

    def pieces(self, told: set[int]) -> Iterator[bytes]:
        """What has come since the last time. `told`: the choices whose ends were told; further ones are added."""
        for index, choice in enumerate(self.answer.choices):
            if index in told:
                continue
            if progress := self._progress(index, choice):
                yield self._piece(index, self._said("") | self._logged(choice), more=progress)
            for part in (
                self._parts(index, choice) if self.asked.is_chat else [Part("content", self._take(index, choice))]
            ):
                if part.kind == "content" and part.text:
                    yield self._text(index, part.text, choice)
                elif part.text:
                    yield self._piece(index, {"delta": self._delta(index, part)} | self._logged(choice))
            if choice.entries:
                yield self._piece(index, self._said("") | self._logged(choice))
            if choice.finish:
                told.add(index)
                end: dict[str, Any] = {"delta": {}} if self.asked.is_chat else {"text": ""}
                seed = {"seed": choice.asked.sampling.seed}
                yield self._piece(index, end | seed, self._finish(index, choice), {"timings": choice.timings})

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        if part.kind == "reasoning":
            return {"reasoning_content": part.text}
        at = self._n_told.get(index, -1)
        if part.kind == "arguments":
            return {"tool_calls": [{"index": at, "function": {"arguments": part.text}}]}
        self._n_told[index] = at + 1
        return {"tool_calls": [{"index": at + 1, **call_of(part.text, "")}]}

    def last(self) -> bytes:
        usage = {**self.common, "choices": [], "usage": self.usage()}
        return (event(usage) if self.asked.usage else b"") + DONE

    def failed(self, refusal: Refusal) -> bytes:
        """What a stream ends with that cannot go on."""
        return event(refusal.body) + DONE

    def _text(self, index: int, text: str, choice: Choice) -> bytes:
        """Nearly all of it is the same every time."""
        times = choice.n_tokens, choice.came_s, choice.told_s
        if choice.has_logprobs:
            more = {"timings": dict(zip(TIMES, times, strict=True))} if self.asked.timed else {}
            return self._piece(index, self._said(text) | self._logged(choice), more=more)
        if index not in self._around:
            before, _, after = self._piece(index, self._said(MARK)).partition(json_bytes(MARK))
            self._around[index] = before, after.removesuffix(b"}\n\n") if self.asked.timed else after
        before, after = self._around[index]
        return before + json_bytes(text) + (after + TIMED % times if self.asked.timed else after)

    def _said(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self.asked.is_chat else {"text": text}

    def _piece(
        self, index: int, said: dict[str, Any], finish: str | None = None, more: Any = MappingProxyType({})
    ) -> bytes:
        usage = {"usage": None} if self.asked.usage else {}
        choice = {"index": index, "logprobs": None, **said, "finish_reason": finish}
        return event({**self.common, "choices": [choice], **usage, **more})
