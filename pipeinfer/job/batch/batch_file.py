"""The requests of a batch, a JSON object a line: what they may say, and what is wrong with them. Tokenises nothing."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.process.limited import MAX_LENGTH
from pipeinfer.job.requests.field_names import CHAT, COMPLETION
from pipeinfer.job.requests.fields import PassedOver, refuse, shown, without_null
from pipeinfer.job.requests.request_body import Body, Defaults, read_body, read_json

ENVELOPE = ("custom_id", "method", "url", "body")
N_ID_DIGITS, DEFAULTS = 24, SamplingParams()
IF_ANY = ("tools", "variables", "more", "stop_tokens", "text_biases")
"""Fields of a body and of its messages that ids do not have where they are empty."""

ADDED = {"continues": False, "parse_special": None, "adds_special": True}
"""Fields of a body that ids do not have at these values."""

IN_EVERY_ID = {
    "seed", "temp", "top_k", "top_p", "min_p", "repeat_last_n", "repeat_penalty", "frequency_penalty",
    "presence_penalty",
}  # fmt: skip
"""What decides which tokens are chosen, in ids also at its default. All else is not, so that known ids stay."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line. `url`: as what it was asked; empty: plainly. `passed_over`: what of it is not served, and why."""

    index: int
    custom_id: str | None
    url: str
    body: Body
    passed_over: Mapping[str, str] = field(default_factory=dict)

    def id(self, salt: str) -> str:
        """The same for the same question at the same place, or with the same custom_id."""
        asked = asdict(self)
        asked |= asked.pop("body")
        for name in ("priority", "splits", "passed_over"):
            del asked[name]  # no text depends on them
        for said in (asked, *asked["messages"]):
            for name in {*IF_ANY} & said.keys():
                if not said[name]:
                    del said[name]
        for name, default in ADDED.items():
            if asked[name] == default:
                del asked[name]
        asked["sampling"] = {
            name: value
            for name, value in asked["sampling"].items()
            if name in IN_EVERY_ID or value != getattr(DEFAULTS, name)
        }
        if self.custom_id is not None:
            del asked["index"]
        text = json.dumps([asked, salt], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:N_ID_DIGITS]


class BatchFile:
    """An open file of requests, read line by line as often as asked."""

    def __init__(self, path: Path, defaults: Defaults) -> None:
        """Raises UserError when it cannot be opened or read twice."""
        self.path, self.defaults = path, defaults
        try:
            self._file = path.open("rb")
            self._file.seek(0)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}; name a file with a JSON object a line") from None

    def requests(self) -> Iterator[BatchRequest]:
        """From the first line on; empty lines are left out. Raises UserError, with the line, for what is no request."""
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

    @property
    def n_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


def read_request(line: bytes, index: int, defaults: Defaults) -> BatchRequest:
    """Raises UserError, which says what is wrong with the line."""
    if len(line) > MAX_LENGTH:
        refuse(f"the request is longer than {MAX_LENGTH >> 20} MiB")
    given = read_json(line, "the request")
    custom_id = given.pop("custom_id", None)
    if custom_id is not None and not isinstance(custom_id, str):
        refuse(f"custom_id is {shown(custom_id)}; give a text")
    url = ""
    if "body" in given or "url" in given:
        url, given = _unwrap(given, custom_id)
    passed = PassedOver(defaults.strict)
    body = read_body(given, defaults, defaults.as_chat and not url, passed)
    return BatchRequest(index, custom_id, url, body, passed.reasons)


def _unwrap(given: dict[str, Any], custom_id: str | None) -> tuple[str, dict[str, Any]]:
    """OpenAI's envelope: where it goes to, and what is asked."""
    if unknown := set(given) - set(ENVELOPE):
        refuse(f"{min(unknown)} is no field of OpenAI's batch format; it has {', '.join(ENVELOPE)}")
    url, body = given.get("url"), given.get("body")
    if url not in (COMPLETION, CHAT):
        refuse(f"url is {shown(url)}; {COMPLETION} and {CHAT} are served")
    if given.get("method", "POST") != "POST":
        refuse(f"method is {shown(given['method'])}; it must be POST")
    if custom_id is None:
        refuse("there is no custom_id; give each request one of its own")
    if not isinstance(body, dict):
        refuse(f"body is {shown(body)}; give a JSON object")
    wanted, other = ("messages", "prompt") if url == CHAT else ("prompt", "messages")
    if wanted not in body or body.get(other) is not None:
        refuse(f"a body for {url} has {wanted}, and no {other}")
    return str(url), without_null(body)
