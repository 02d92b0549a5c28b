"""The answer to a request: text, log-probabilities, OpenAI's message, its schema. Knows no engine and no HTTP."""

import secrets
import sys
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from pipeinfer.cluster.verdicts import Likely, ScoredToken
from pipeinfer.job.process.stop import StopFlag
from pipeinfer.job.process.streams import exit_code, lost_output
from pipeinfer.job.process.supervised import own_attempt
from pipeinfer.job.requests.body import Body
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.models.text.answers import AnswerPart, AnswerReader
from pipeinfer.models.text.json_schema import as_schema, mismatch, relaxations
from pipeinfer.models.text.stops import StopStrings
from pipeinfer.models.text.tokenizer import TextStream, Tokenizer

Spell = Callable[[int], bytes]  # a token's bytes, control tokens spelled too
CONTENT = ""  # the key of the content's schema, beside those of functions by their names

# -- text


class Printer:
    """Prints tokens, unless `silent`, and stops the job when nobody reads them. `text`: up to a stop string."""

    def __init__(self, flag: StopFlag, tokenizer: Tokenizer, request: GenerationRequest, silent: bool) -> None:
        self.flag, self.silent = flag, silent
        self.text = ""
        self.n_decoded = 0  # characters, including those held back or cut off
        self._ends = request.end_tokens
        self._stream = TextStream(tokenizer, request.markers)
        self._stops = StopStrings(request.stops, request.thought)

    @property
    def was_cut(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stops.hit

    @property
    def stop(self) -> str:
        """The stop string that has ended the text; empty if none has."""
        return self._stops.stop

    def push(self, tokens: Sequence[int]) -> None:
        """Add tokens; a stop string may end the text."""
        text = "".join(self._stream.push(token) for token in tokens if token not in self._ends)
        self.n_decoded += len(text)
        self._print(self._stops.push(text))

    def finish(self) -> None:
        """Print what was held back, unless a later job of a supervisor may continue the text."""
        if self.flag.reason and own_attempt():
            return
        self._print(self._stops.push(self._stream.flush()) + self._stops.flush())

    def _print(self, text: str) -> None:
        self.text += text
        if self.silent:
            return
        sys.stdout.write(text)
        sys.stdout.flush()
        if error := lost_output(sys.stdout):
            self.flag.set("standard output is lost", exit_code(error))  # the next wait ends the request


# -- log-probabilities


class Entry(NamedTuple):
    """A token of a text. `logprob`: None of a prompt's first one. `offset`: characters of the text before it."""

    token: int
    logprob: float | None
    top: Sequence[Likely]
    offset: int


def prompt_entries(scores: Mapping[int, int]) -> list[Entry]:
    """Those of a prompt's scored tokens, by position; without offsets."""
    ordered = (token for _, token in sorted(scores.items()))
    return [Entry(int(each), each.logprob, each.top, 0) for each in ordered if isinstance(each, ScoredToken)]


class Entries:
    """Holds entries back until their text is certain: those behind a stop string, and `ends`, are dropped."""

    def __init__(self, ends: Collection[int]) -> None:
        self._ends = ends
        self._waiting = deque[Entry]()

    def add(self, token: int, offset: int) -> None:
        if isinstance(token, ScoredToken) and token not in self._ends:
            self._waiting.append(Entry(int(token), token.logprob, token.top, offset))

    def take(self, n_characters: float) -> list[Entry]:
        """Remove and return those that begin within `n_characters`, the certain text; infinity: it has ended, uncut."""
        entries = []
        while self._waiting and self._waiting[0].offset < n_characters:
            entries.append(self._waiting.popleft())
        return entries


def speller(tokenizer: Tokenizer) -> Spell:
    return cache(partial(tokenizer.decode_piece, special=True))


def completion_logprobs(entries: Sequence[Entry], spell: Spell) -> dict[str, Any]:
    """The `logprobs` of /v1/completions. `top_logprobs` have the chosen token; of one spelling the likeliest."""
    return {
        "tokens": [_text(spell(entry.token)) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_by_text(entry, spell) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _by_text(entry: Entry, spell: Spell) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    logprobs: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        logprobs.setdefault(_text(spell(token)), logprob)
    return logprobs


def prompt_logprobs(entries: Sequence[Entry], spell: Spell) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`. `rank`: 1 of the likeliest token; None of one that is not among the likeliest."""
    return [None if entry.logprob is None else _by_id(entry, spell) for entry in entries]


def _by_id(entry: Entry, spell: Spell) -> dict[str, Any]:
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
    return {
        str(token): {"logprob": logprob, "rank": ranks.get(token), "decoded_token": _text(spell(token))}
        for token, logprob in ((entry.token, entry.logprob), *entry.top)
    }


def echo_of(prompt: Any, tokens: Sequence[int], spell: Spell) -> tuple[str, list[int]]:
    """(the text of a prompt as it came, each token's offset in it). Tokens before that text, as bos, have offset 0."""
    decode, text, offsets = getincrementaldecoder("utf-8")("replace").decode, "", list[int]()
    for token in tokens:
        offsets.append(len(text))
        text += decode(spell(token))
    text += decode(b"", True)
    if not isinstance(prompt, str):
        return text, offsets
    n_more = len(text) - len(prompt)
    return prompt, [min(max(0, offset - n_more), len(prompt)) for offset in offsets]


def chat_logprobs(entries: Sequence[Entry], spell: Spell) -> dict[str, Any]:
    """The `logprobs` of /v1/chat/completions."""
    content = [
        {**spelled(entry.token, entry.logprob, spell), "top_logprobs": [spelled(*each, spell) for each in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def spelled(token: int, logprob: float | None, spell: Spell) -> dict[str, Any]:
    """A token, its bytes and its log-probability; its `id` as llama-server has it."""
    data = spell(token)
    return {"id": token, "token": _text(data), "logprob": logprob, "bytes": list(data)}


def _text(data: bytes) -> str:
    """The text of a token; of a part of a character its bytes, as OpenAI writes them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


# -- messages


def reader_of(body: Body, thought: str | None) -> AnswerReader:
    """`thought`: see GenerationRequest."""
    return AnswerReader(body.tools.schemas if body.tools else None, thought, bool(body.forced_schemas))


def message_of(parts: Iterable[AnswerPart]) -> dict[str, Any]:
    """OpenAI's message of an assistant."""
    texts, calls = {"content": "", "reasoning": ""}, list[dict[str, Any]]()
    for kind, text in parts:
        if kind == "call":
            calls.append(call_of(text))
        elif kind == "arguments":
            calls[-1]["function"]["arguments"] += text
        else:
            texts[kind] += text
    message: dict[str, Any] = {"role": "assistant", "content": texts["content"] or (None if calls else "")}
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    return message | ({"tool_calls": calls} if calls else {})


def count_reasoning(reader: AnswerReader, tokens: Sequence[int], spell: Spell) -> int:
    """How many tokens of an answer that was read are of its reasoning, with its marks."""
    n = reader.n_reasoning
    return sum(offset < n for offset in echo_of((), tokens, spell)[1]) if n else 0


def call_of(name: str) -> dict[str, Any]:
    """A call without arguments. Its id has nine characters, as Mistral's templates require."""
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": {"name": name, "arguments": ""}}


def finish_of(finish: str, reader: AnswerReader) -> str:
    """OpenAI's finish reason: `tool_calls` where the answer ended behind a whole call."""
    return "tool_calls" if finish == "stop" and reader.n_calls and not reader.is_in_call else finish


# -- schemas


def schemas_to_check(body: Body) -> dict[str, Any]:
    """The schemas of content and calls of which the grammar leaves something out, by `CONTENT` and function names."""
    schemas = {CONTENT: as_schema(body.sampling.grammar), **body.forced_schemas}
    return {name: schema for name, schema in schemas.items() if schema is not None and relaxations(schema)}


class AnswerCheck:
    """Collects the parts of an answer, and compares them with such schemas."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        self._texts: list[tuple[str, str]] = []  # (name of a schema, text)

    def push(self, parts: Iterable[AnswerPart]) -> None:
        for kind, text in parts:
            if kind == "call":
                self._texts.append((text, ""))
            elif kind in ("arguments", "content"):
                name = self._texts[-1][0] if kind == "arguments" else CONTENT
                if not self._texts or self._texts[-1][0] != name:
                    self._texts.append((name, ""))
                self._texts[-1] = name, self._texts[-1][1] + text

    def mismatches(self) -> list[str]:
        """What does not fit, a line each. Takes up to a second for each text."""
        lines = []
        for name, text in self._texts:
            if name in self._schemas and (reason := mismatch(self._schemas[name], text)):
                subject = f"the arguments of {name} do" if name else "the answer does"
                lines.append(f"{subject} not fit the schema: {reason}")
        return lines
