"""Answers as clients get them, whole and as server-sent events: OpenAI's form with llama.cpp's timings, and what other
APIs' forms share. Knows no HTTP: makes objects and bytes."""

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pipeinfer.job.requests.answers import (
    AnswerCheck,
    Spell,
    call_of,
    chat_logprobs,
    completion_logprobs,
    count_reasoning,
    echo_of,
    finish_of,
    message_of,
    prompt_logprobs,
    reader_of,
)
from pipeinfer.job.requests.body import Body
from pipeinfer.models.text.answers import AnswerPart
from pipeinfer.server.choices import Answer, Choice
from pipeinfer.server.errors import Refusal, json_bytes
from pipeinfer.server.prompting import ParsedRequest

DONE = b"data: [DONE]\n\n"
TEXT = "\0text\0"  # stands for a text; no model's name has it
LARGE = 256  # tokens of an answer that takes more than some 20 ms to make, if each has log-probabilities
MAX_CHECKED = 4  # texts of an answer that are compared with their schemas
Object = Mapping[str, Any]
NOTHING: Object = MappingProxyType({})


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(data) + b"\n\n"


class ChoiceOutput:
    """The output of one choice in parts."""

    def __init__(self, index: int, choice: Choice, body: Body, parsed: ParsedRequest) -> None:
        self.index, self.choice = index, choice
        self.check = AnswerCheck(parsed.schemas) if parsed.schemas else None
        self.has_ended = False  # its last event was made
        self.n_calls = 0
        self._reader = reader_of(body, choice.request.thought) if parsed.is_chat else None
        self._n_told = 0  # tokens
        self._n_read = 0 if parsed.progress else None  # tokens of its prompt in the last `progress`

    @property
    def finish(self) -> str | None:
        finish = self.choice.finish
        return finish_of(finish, self._reader) if finish and self._reader else finish

    def parts(self) -> list[AnswerPart]:
        """The parts since the last call."""
        choice, parts = self.choice, [AnswerPart("content", self.choice.take())]
        if self._reader:
            parts = self._reader.push(parts[0].text)
            parts += self._reader.finish(choice.finish == "length" or bool(choice.stop)) if choice.finish else []
        if self.check:
            self.check.push(parts)
        return [part for part in parts if part.text]

    def new_tokens(self) -> list[int]:
        """The tokens since the last call."""
        first, self._n_told = self._n_told, self.choice.n_tokens
        return self.choice.tokens[first:]

    def count_reasoning(self, spell: Spell) -> int:
        """Its tokens of reasoning, so far."""
        return count_reasoning(self._reader, self.choice.tokens, spell) if self._reader else 0

    def progress(self) -> dict[str, Any] | None:
        """llama-server's figures of the prompt, where they are requested and have changed."""
        choice = self.choice
        if self._n_read is None or choice.n_read in (self._n_read, choice.n_prompt):
            return None
        self._n_read = choice.n_read
        counts = {"total": choice.n_prompt, "cache": choice.n_cached, "processed": choice.n_read}
        return {"prompt_progress": counts | {"time_ms": round(1e3 * (time.monotonic() - choice.started_s))}}


class OpenAIForm:
    """OpenAI's form of one answer, whose events other APIs' forms translate. `model`, `version`: named in it."""

    def __init__(self, parsed: ParsedRequest, answer: Answer, model: str, version: str, spell: Spell) -> None:
        self.parsed, self.answer, self.spell = parsed, answer, spell
        kind = "chat.completion" if parsed.is_chat else "text_completion"
        self.common = {
            "id": self.new_id(),
            "object": f"{kind}.chunk" if parsed.stream and parsed.is_chat else kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": version,
        }
        pairs = enumerate(zip(answer.choices, parsed.bodies, strict=True))
        self.outputs = [ChoiceOutput(index, choice, body, parsed) for index, (choice, body) in pairs]
        for output, body in zip(self.outputs, parsed.bodies, strict=True):
            if parsed.echo:
                output.choice.echo(*echo_of(body.prompt, output.choice.request.prompt, spell))
        self._around: dict[int, tuple[bytes, bytes]] = {}  # the bytes around each choice's text

    def new_id(self) -> str:
        return f"{'chatcmpl' if self.parsed.is_chat else 'cmpl'}-{secrets.token_hex(12)}"

    def mismatches(self) -> list[str]:
        """Where the first whole texts do not fit their schemas, a line each. Takes seconds."""
        whole = [each.check for each in self.outputs if each.choice.finish == "stop" and not each.choice.stop]
        return [line for check in whole[:MAX_CHECKED] if check for line in check.mismatches()]

    # -- whole

    @property
    def is_large(self) -> bool:
        """Whether a thread is to make the whole answer."""
        choices = self.answer.choices
        return sum(choice.n_tokens + len(choice.entries) + len(choice.scores) for choice in choices) > LARGE

    def whole(self) -> Any:
        choices = [self._choice(output) for output in self.outputs]
        return {**self.common, "choices": choices, "usage": self.usage(), "timings": self.timings}

    def _choice(self, output: ChoiceOutput) -> dict[str, Any]:
        parts = output.parts()
        plain = {"text": "".join(part.text for part in parts)}
        content = {"message": message_of(parts)} if self.parsed.is_chat else plain
        choice: dict[str, Any] = {"index": output.index, **content, "logprobs": self._logprobs(output.choice)}
        if self.parsed.scores:
            choice["prompt_logprobs"] = prompt_logprobs(output.choice.scores, self.spell)
        return choice | {"finish_reason": output.finish, "seed": output.choice.request.sampling.seed}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not choice.has_logprobs:
            return None
        return (chat_logprobs if self.parsed.is_chat else completion_logprobs)(choice.take_entries(), self.spell)

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many texts continue it."""
        choices = self.answer.choices
        n_prompt = sum(choice.n_prompt for choice in choices[:: self.parsed.n])
        n_cached = sum(choice.timings.get("cache_n", 0) for choice in choices[:: self.parsed.n])
        n_completion = sum(choice.n_tokens for choice in choices)
        counts = {"prompt_tokens": n_prompt, "completion_tokens": n_completion, "total_tokens": n_prompt + n_completion}
        counts_more = {"prompt_tokens_details": {"cached_tokens": n_cached}}
        if self.parsed.is_chat:
            n_reasoning = sum(output.count_reasoning(self.spell) for output in self.outputs)
            counts_more["completion_tokens_details"] = {"reasoning_tokens": n_reasoning}
        return {**counts, **counts_more}

    @property
    def timings(self) -> dict[str, Any]:
        """Those of the first text."""
        return self.answer.choices[0].timings

    def timings_of(self, output: ChoiceOutput) -> Object:
        """Those so far, where each piece has them; the prompt of `echo` comes before them."""
        choice = output.choice
        return {"timings": choice.timings_so_far} if self.parsed.timed and choice.tokens else NOTHING

    # -- events

    def first(self) -> bytes:
        """The beginning of a stream."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(output, delta) for output in self.outputs) if self.parsed.is_chat else b""

    def events(self) -> bytes:
        """All events since the last call."""
        return b"".join(event for output in self.outputs if not output.has_ended for event in self._events(output))

    def _events(self, output: ChoiceOutput) -> Iterator[bytes]:
        if progress := output.progress():
            yield self.progress_event(output, progress)
        for part in output.parts():
            yield self.part(output, part)
        if output.choice.entries:
            yield self.rest(output)
        if output.choice.finish:
            output.has_ended = True
            yield self.end(output)

    def progress_event(self, output: ChoiceOutput, progress: dict[str, Any]) -> bytes:
        return self._chunk(output, self._content(output, ""), more=progress)

    def part(self, output: ChoiceOutput, part: AnswerPart) -> bytes:
        if part.kind == "content":
            return self._text(output, part.text)
        logprobs = {"logprobs": self._logprobs(output.choice)} if output.choice.entries else {}
        return self._chunk(output, {"delta": _delta(output, part)} | logprobs, more=self.timings_of(output))

    def rest(self, output: ChoiceOutput) -> bytes:
        """Log-probabilities without a part."""
        return self._chunk(output, self._content(output, ""), more=self.timings_of(output))

    def end(self, output: ChoiceOutput) -> bytes:
        content: dict[str, Any] = {"delta": {}} if self.parsed.is_chat else {"text": ""}
        seed = {"seed": output.choice.request.sampling.seed}
        return self._chunk(output, content | seed, output.finish, {"timings": output.choice.timings})

    def last(self) -> bytes:
        usage = {**self.common, "choices": [], "usage": self.usage(), "timings": self.timings}
        return (event(usage) if self.parsed.usage else b"") + DONE

    def error_event(self, refusal: Refusal) -> bytes:
        """The end of a stream that cannot go on."""
        return event(refusal.body) + DONE

    def _text(self, output: ChoiceOutput, content: str) -> bytes:
        """Most bytes are the same in all such events."""
        choice = output.choice
        more = self.timings_of(output)
        if choice.has_logprobs:
            return self._chunk(output, self._content(output, content), more=more)
        if output.index not in self._around:
            before, _, after = self._chunk(output, self._content(output, TEXT)).partition(json_bytes(TEXT))
            self._around[output.index] = before, after
        before, after = self._around[output.index]
        after = after.removesuffix(b"}\n\n") + b"," + json_bytes(more)[1:] + b"\n\n" if more else after
        return before + json_bytes(content) + after

    def _content(self, output: ChoiceOutput, content: str) -> dict[str, Any]:
        logprobs = {"logprobs": self._logprobs(output.choice)} if output.choice.entries else {}
        return ({"delta": {"content": content}} if self.parsed.is_chat else {"text": content}) | logprobs

    def _chunk(self, output: ChoiceOutput, content: Object, finish: str | None = None, more: Object = NOTHING) -> bytes:
        usage = {"usage": None} if self.parsed.usage else {}
        choice = {"index": output.index, "logprobs": None, **content, "finish_reason": finish}
        return event({**self.common, "choices": [choice], **usage, **more})


def _delta(output: ChoiceOutput, part: AnswerPart) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"reasoning_content": part.text}
    if part.kind == "arguments":
        return {"tool_calls": [{"index": output.n_calls - 1, "function": {"arguments": part.text}}]}
    output.n_calls += 1
    return {"tool_calls": [{"index": output.n_calls - 1, **call_of(part.text)}]}


# -- blocks


@dataclass(slots=True)
class Block:
    """Parts of one kind in a row; a call has the kind `arguments` and a `name`."""

    index: int
    kind: str
    id: str
    name: str = ""
    text: str = ""


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json_bytes({"type": name, **data}) + b"\n\n"


class BlockForm(OpenAIForm):
    """The form of APIs whose answers are one text in blocks, with events where a block starts, grows and stops."""

    prefix = ""  # the prefix of an answer's id
    blocks: list[Block]

    def new_id(self) -> str:
        self.blocks = []
        return f"{self.prefix}_{secrets.token_hex(12)}"

    @property
    def choice(self) -> Choice:
        return self.answer.choices[0]

    @property
    def finish(self) -> str:
        return self.outputs[0].finish or ""

    def block_start(self, block: Block) -> bytes:
        raise NotImplementedError

    def block_delta(self, block: Block, text: str) -> bytes:
        raise NotImplementedError

    def block_stop(self, block: Block) -> bytes:
        raise NotImplementedError

    def progress_event(self, output: ChoiceOutput, progress: dict[str, Any]) -> bytes:
        return b""

    def part(self, output: ChoiceOutput, part: AnswerPart) -> bytes:
        events = b""
        is_call = part.kind == "call"
        if is_call or not self.blocks or self.blocks[-1].kind != part.kind:
            events = self.block_stop(self.blocks[-1]) if self.blocks else b""
            kind, name = ("arguments", part.text) if is_call else (part.kind, "")
            self.blocks.append(Block(len(self.blocks), kind, secrets.token_hex(12), name))
            events += self.block_start(self.blocks[-1])
        if is_call:
            return events
        self.blocks[-1].text += part.text
        return events + self.block_delta(self.blocks[-1], part.text)

    def rest(self, output: ChoiceOutput) -> bytes:
        return b""

    def end(self, output: ChoiceOutput) -> bytes:
        return self.block_stop(self.blocks[-1]) if self.blocks else b""

    def all_blocks(self) -> list[Block]:
        """The blocks of an answer that has ended."""
        for part in self.outputs[0].parts():
            self.part(self.outputs[0], part)
        return self.blocks

    def error_event(self, refusal: Refusal) -> bytes:
        return named_event("error", refusal.body)


def renamed(fields: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The fields by OpenAI's names."""
    return {names.get(name, name): value for name, value in fields.items()}
