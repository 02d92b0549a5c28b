"""The files of a batch, a JSON object a line in OpenAI's or the plain format: its requests, their fields, errors, and
its results, appended when each is complete. Tokenises nothing."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.process.streams import MAX_LENGTH, complain
from pipeinfer.job.requests.answers import (
    Entry,
    Spell,
    chat_logprobs,
    completion_logprobs,
    count_reasoning,
    finish_of,
    message_of,
    reader_of,
)
from pipeinfer.job.requests.body import Body, Defaults, read_body
from pipeinfer.job.requests.fields import CHAT, COMPLETION, PassedOver, read_json, refuse, shown, without_null
from pipeinfer.job.requests.journal import open_alone
from pipeinfer.job.session.session import OpenRequest
from pipeinfer.observe.figures import timings
from pipeinfer.outputs import write_error
from pipeinfer.text import json_text

ENVELOPE = ("custom_id", "method", "url", "body")
N_ID_DIGITS, DEFAULTS = 24, SamplingParams()
IF_ANY = ("tools", "variables", "more", "stop_tokens", "text_biases")  # left out of ids if empty
ADDED: dict[str, Any] = {"continues": False, "parse_special": None, "adds_special": True, "adapters": None}
ADDED |= {"reasoning": (-1, "")}
"""Fields of a body that are left out of ids at these values."""

IN_EVERY_ID = {"seed", "temp", "top_k", "top_p", "min_p", "repeat_last_n"}
IN_EVERY_ID |= {"repeat_penalty", "frequency_penalty", "presence_penalty"}
"""Sampling parameters that ids have also at their defaults. Newer ones are left out there, so that ids stay."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line. `url`: the OpenAI endpoint of its format; empty: plain. `passed_over`: fields not served, and why."""

    index: int
    custom_id: str | None
    url: str
    body: Body
    passed_over: Mapping[str, str] = field(default_factory=dict)

    def id(self, salt: str) -> str:
        """The same for the same request at the same place, or with the same custom_id."""
        fields = asdict(self)
        fields |= fields.pop("body")
        for name in ("priority", "splits", "passed_over", "guesses"):
            del fields[name]  # no text depends on them
        for part in (fields, *fields["messages"]):
            for name in {*IF_ANY} & part.keys():
                if not part[name]:
                    del part[name]
        for name, default in ADDED.items():
            if fields[name] == default:
                del fields[name]
        fields["sampling"] = {
            name: value
            for name, value in fields["sampling"].items()
            if name in IN_EVERY_ID or value != getattr(DEFAULTS, name)
        }
        if self.custom_id is not None:
            del fields["index"]
        text = json.dumps([fields, salt], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:N_ID_DIGITS]


class BatchFile:
    """An open file of requests. Each `requests` reads it again, line by line."""

    def __init__(self, path: Path, defaults: Defaults) -> None:
        """Raises UserError when it cannot be opened or read twice."""
        self.path, self.defaults = path, defaults
        try:
            self._file = path.open("rb")
            self._file.seek(0)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}; name a file with a JSON object a line") from None

    def requests(self) -> Iterator[BatchRequest]:
        """From the first line on, without empty lines. Raises UserError, with the line, for what is no request."""
        offset = index = 0
        while True:
            self._file.seek(offset)
            line = self._file.readline(MAX_LENGTH + 1)
            if not line:
                return
            offset += len(line)
            if line.strip():
                try:
                    yield read_request(line, index, self.defaults)
                except UserError as error:
                    raise UserError(f"{self.path} line {index + 1}: {error}") from None
            index += 1

    def close(self) -> None:
        self._file.close()


def read_request(line: bytes, index: int, defaults: Defaults) -> BatchRequest:
    """Raises UserError with what is wrong with the line."""
    if len(line) > MAX_LENGTH:
        refuse(f"the request is longer than {MAX_LENGTH >> 20} MiB")
    fields = read_json(line, "the request")
    custom_id = fields.pop("custom_id", None)
    if custom_id is not None and not isinstance(custom_id, str):
        refuse(f"custom_id is {shown(custom_id)}; give a text")
    url = ""
    if "body" in fields or "url" in fields:
        url, fields = _unwrap(fields, custom_id)
    passed = PassedOver(defaults.strict)
    body = read_body(fields, defaults, defaults.as_chat and not url, passed)
    return BatchRequest(index, custom_id, url, body, passed.reasons)


def _unwrap(envelope: dict[str, Any], custom_id: str | None) -> tuple[str, dict[str, Any]]:
    """(url, body) of OpenAI's envelope."""
    if unknown := set(envelope) - set(ENVELOPE):
        refuse(f"{min(unknown)} is no field of OpenAI's batch format; it has {', '.join(ENVELOPE)}")
    url, body = envelope.get("url"), envelope.get("body")
    if url not in (COMPLETION, CHAT):
        refuse(f"url is {shown(url)}; {COMPLETION} and {CHAT} are served")
    if envelope.get("method", "POST") != "POST":
        refuse(f"method is {shown(envelope['method'])}; it must be POST")
    if custom_id is None:
        refuse("there is no custom_id; give each request one of its own")
    if not isinstance(body, dict):
        refuse(f"body is {shown(body)}; give a JSON object")
    needed, other = ("messages", "prompt") if url == CHAT else ("prompt", "messages")
    if needed not in body or body.get(other) is not None:
        refuse(f"a body for {url} has {needed}, and no {other}")
    return str(url), without_null(body)


WHAT = "--output"
BEGINNING = b'{"id": "'  # of each line; a torn line that begins otherwise is not cut off


class BatchOutput:
    """An open file that this job alone appends to."""

    def __init__(self, path: Path) -> None:
        """Raises UserError when it cannot be written, is no file, or another job writes it."""
        self.path = path
        self._was_there = os.path.exists(path)
        self._n_whole, self._n_torn = 0, 0  # bytes of whole lines, and of a line that an interruption has torn
        self._lacks_newline = False
        if self._was_there and not os.path.isfile(path):
            raise UserError(f"{WHAT} {path} is no file; results are added to a file, so that a job can be resumed")
        self._fd = open_alone(path, WHAT)

    def ids(self) -> Iterator[tuple[int, str]]:
        """(line, id) of each result, without a last one that an interruption has torn; one that lacks its newline alone
        is whole. The file stays as it is. Raises UserError for a line that is no result."""
        self._n_whole, self._n_torn, self._lacks_newline = 0, 0, False
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if line.isspace():  # an editor has added it
                    self._n_whole += len(line)
                    continue
                id = _id_in(line)
                self._lacks_newline = not line.endswith(b"\n")
                written = line.rstrip(b"\0")  # a power cut may leave a file longer than what was written
                if id is None and self._lacks_newline and BEGINNING.startswith(written[: len(BEGINNING)]):
                    self._n_torn, self._lacks_newline = len(line), False
                    return
                if id is None:
                    line_text = f"{WHAT} {self.path} line {number} is no result of a batch"
                    raise UserError(f"{line_text}; name another file, or remove the line")
                self._n_whole += len(line)
                yield number, id

    def go_on(self) -> None:
        """Make the file end with a whole line, before a result is added. Raises UserError when there is no room."""
        if self._n_torn:
            complain(f"{self.path}: what stands behind the last whole line, {self._n_torn} bytes, is cut off")
            os.ftruncate(self._fd, self._n_whole)
        elif self._lacks_newline:
            self._append(b"\n")
        self._n_torn, self._lacks_newline = 0, False

    def write(self, result: dict[str, Any]) -> None:
        """Append one result, whose first field is its id. Raises UserError when there is no room."""
        self._append(f"{json_text(result)}\n".encode())

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise write_error(self.path, WHAT, error) from None

    def close(self) -> None:
        """Close the file, and remove it if this job has made it and written nothing."""
        if not self._was_there and not os.fstat(self._fd).st_size:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


def _id_in(line: bytes) -> str | None:
    """None if it is no whole result."""
    with contextlib.suppress(ValueError, RecursionError):
        result = json.loads(line)
        if isinstance(result, dict) and isinstance(result.get("id"), str):
            return str(result["id"])
    return None


# -- results

SERVED, NOT_SERVED = 200, 400
OBJECTS = {CHAT: "chat.completion"}
TIMES = ("ttft_s", "tpot_s", "total_s")


def result_line(
    id: str, line: BatchRequest, opened: OpenRequest, entries: Sequence[Entry], spell: Spell, model: str
) -> dict[str, Any]:
    """The result of a request that has ended. `model`: its name."""
    form = chat_logprobs if line.body.messages else completion_logprobs
    logprobs = form(entries, spell) if line.body.sampling.n_logprobs >= 0 else None
    state, text, finish = opened.state, opened.printer.text, opened.finish
    n_prompt, n_predicted = len(state.prompt), opened.n_output
    n_cached, seed = opened.metrics.n_kept, state.sampling.seed
    if not line.url:
        times = {name: value for name, value in timings(opened.metrics).items() if name in TIMES}
        counts = {"tokens_evaluated": n_prompt, "tokens_cached": n_cached, "tokens_predicted": n_predicted}
        plain = _plain(id, line) | {"text": text, "finish": finish} | counts | {"seed": seed} | times
        return plain | ({"logprobs": logprobs} if logprobs else {})
    answer, details = dict[str, Any](text=text), dict[str, Any]()
    if line.url == CHAT:
        reader = reader_of(line.body, opened.request.thought)
        parts = [*reader.push(text), *reader.finish(finish == "length" or opened.printer.was_cut)]
        answer, finish = {"message": message_of(parts)}, finish_of(finish, reader)
        n_reasoning = count_reasoning(reader, state.tokens[n_prompt : n_prompt + n_predicted], spell)
        details = {"completion_tokens_details": {"reasoning_tokens": n_reasoning}}
    body = {
        "id": id,
        "object": OBJECTS.get(line.url, "text_completion"),
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **answer, "logprobs": logprobs, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_predicted,
            "total_tokens": n_prompt + n_predicted,
            "prompt_tokens_details": {"cached_tokens": n_cached},
            **details,
        },
        "seed": seed,
    }
    return _response(id, line, SERVED, body, None)


def error_line(id: str, line: BatchRequest, message: str) -> dict[str, Any]:
    """The error of a request that cannot be served."""
    if not line.url:
        return {**_plain(id, line), "error": message}
    error = {"message": message, "type": "invalid_request_error", "code": "invalid_request"}
    return _response(id, line, NOT_SERVED, {"error": error}, {"code": error["code"], "message": message})


def _plain(id: str, line: BatchRequest) -> dict[str, Any]:
    custom = {"custom_id": line.custom_id} if line.custom_id is not None else {}
    return {"id": id, "index": line.index, **custom}


def _response(id: str, line: BatchRequest, status: int, body: dict[str, Any], error: Any) -> dict[str, Any]:
    response = {"status_code": status, "request_id": id, "body": body}
    return {"id": id, "custom_id": line.custom_id, "response": response, "error": error}
