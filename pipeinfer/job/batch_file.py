"""The requests of a batch, a JSON object a line: what they may say, and what is wrong with them. Tokenises nothing."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import settings_of
from pipeinfer.errors import UserError
from pipeinfer.job.limited import MAX_LENGTH
from pipeinfer.job.options import INT32_MAX
from pipeinfer.models.chat import Message

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
"""What OpenAI's batch format may ask for."""

ENVELOPE = ("custom_id", "method", "url", "body")
ALIASES = {"temperature": "temp", "repetition_penalty": "repeat_penalty"}
LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict")
PROMPTS = ("prompt", "messages")
WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_prompt",
    "stream_options",
)  # fmt: skip
ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "echo": (False,), "logprobs": (False, 0), "top_logprobs": (0,),
    "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"), "suffix": ("",),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "parallel_tool_calls": (True, False),
}  # fmt: skip
"""Fields that are accepted with these values alone, with which they change nothing."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
N_ID_DIGITS = 24


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where a request does not say. `as_chat`: prompts are what a user says. `salt`: what else a result
    depends on, the model above all."""

    sampling: SamplingParams
    n_predict: int
    stops: tuple[str, ...]
    ignore_eos: bool
    as_chat: bool
    salt: str


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line. `url`: as what it was asked; empty: plainly. `prompt`: a text or token ids; of a chat `messages`."""

    index: int
    custom_id: str | None
    url: str
    prompt: str | tuple[int, ...]
    messages: tuple[Message, ...]
    n_predict: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    ignore_eos: bool

    def id(self, salt: str) -> str:
        """The same for the same question at the same place, or with the same custom_id."""
        asked = asdict(self)
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
        _refuse(f"is longer than {MAX_LENGTH >> 20} MiB")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        _refuse(f"is no JSON: {error}")
    if not isinstance(found, dict):
        _refuse('is no JSON object; write {"prompt": "…"} or a line of OpenAI\'s batch format')
    given = _without_null(found)
    custom_id = given.pop("custom_id", None)
    if custom_id is not None and not isinstance(custom_id, str):
        _refuse(f"custom_id is {_shown(custom_id)}; give a text")
    url = ""
    if "body" in given or "url" in given:
        url, given = _unwrap(given, custom_id)
    return _request(given, index, custom_id, url, defaults)


def _unwrap(given: dict[str, Any], custom_id: str | None) -> tuple[str, dict[str, Any]]:
    """OpenAI's envelope: where it goes to, and what is asked."""
    if unknown := set(given) - set(ENVELOPE):
        _refuse(f"{min(unknown)} is no field of OpenAI's batch format; it has {', '.join(ENVELOPE)}")
    url, body = given.get("url"), given.get("body")
    if url not in (COMPLETION, CHAT):
        _refuse(f"url is {_shown(url)}; {COMPLETION} and {CHAT} are served")
    if given.get("method", "POST") != "POST":
        _refuse(f"method is {_shown(given['method'])}; it must be POST")
    if custom_id is None:
        _refuse("there is no custom_id; give each request one of its own")
    if not isinstance(body, dict):
        _refuse(f"body is {_shown(body)}; give a JSON object")
    wanted, other = ("messages", "prompt") if url == CHAT else ("prompt", "messages")
    if wanted not in body or body.get(other) is not None:
        _refuse(f"a body for {url} has {wanted}, and no {other}")
    return str(url), _without_null(body)


def _request(given: dict[str, Any], index: int, custom_id: str | None, url: str, defaults: Defaults) -> BatchRequest:
    sampling = {name for name, _, _ in settings_of(SamplingParams)}
    known = {*sampling, *ALIASES, *LENGTHS, *PROMPTS, *WITHOUT_EFFECT, *ONLY, "stop", "ignore_eos"}
    if unknown := set(given) - known:
        _refuse(f"{min(unknown)} is no field that is known here; leave it out")
    for name in ONLY.keys() & given.keys():
        if not any(given[name] == value for value in ONLY[name]):
            offered = " or ".join(json.dumps(value) for value in ONLY[name])
            _refuse(f"{name} is {_shown(given[name])}; only {offered} can be served")
    if sum(name in given for name in PROMPTS) != 1:
        _refuse("there must be one of prompt and messages")
    messages = _messages(given["messages"]) if "messages" in given else ()
    prompt = _prompt(given["prompt"]) if "prompt" in given else ""
    if defaults.as_chat and not url and isinstance(prompt, str) and not messages:
        prompt, messages = "", (Message("user", prompt),)
    return BatchRequest(
        index, custom_id, url, prompt, messages, _length(given, defaults.n_predict),
        replace(defaults.sampling, **_sampling(given)), _stops(given.get("stop"), defaults.stops),
        _flag(given, "ignore_eos", defaults.ignore_eos),
    )  # fmt: skip


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_whole(each) and 0 <= each <= INT32_MAX for each in value):
        return tuple(value)
    _refuse(f"prompt is {_shown(value)}; give one text, or a list of token ids")


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        _refuse(f"messages is {_shown(value)}; give a list of objects with role and content")
    return tuple(_message(each) for each in value)


def _message(value: Any) -> Message:
    if not isinstance(value, dict) or set(_without_null(value)) - {"role", "content", "name"}:
        _refuse(f"the message {_shown(value)} is none that can be served; it has role and content")
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        _refuse(f"the role {_shown(role)} is not known; it is one of {', '.join(ROLES)}")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        _refuse(f"the content {_shown(content)} is no text")
    return Message(ROLES[role], content)  # type: ignore[arg-type]


def _length(given: Mapping[str, Any], default: int) -> int:
    names = [name for name in LENGTHS if name in given]
    if len(names) > 1:
        _refuse(f"{' and '.join(names)} say the same; give one of them")
    value = given[names[0]] if names else default
    if not _is_whole(value) or not 1 <= value <= INT32_MAX:
        _refuse(f"{names[0]} is {_shown(value)}; give a whole number from 1 on: so much room is set aside")
    return int(value)


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, default, setting in settings_of(SamplingParams):
        for written in (name, *(alias for alias, meant in ALIASES.items() if meant == name)):
            if written not in given:
                continue
            value = given[written]
            if name in found:
                _refuse(f"{written} is given by two names; give one of them")
            fits = _is_whole(value) if isinstance(default, int) else _is_number(value)
            most = min(setting.most, INT32_MAX) if isinstance(default, int) and name != "seed" else setting.most
            if not fits or not setting.least <= value <= most:
                kind = "whole number" if isinstance(default, int) else "number"
                _refuse(f"{written} is {_shown(value)}; give a {kind} from {setting.least:g} to {most:g}")
            found[name] = type(default)(value)
    return found


def _stops(value: Any, default: tuple[str, ...]) -> tuple[str, ...]:
    if value is None:
        return default
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        _refuse(f"stop is {_shown(value)}; give a text, or a list of texts, none of them empty")
    return tuple(found)


def _flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        _refuse(f"{name} is {_shown(value)}; give true or false")
    return value


def _without_null(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _refuse(what: str) -> NoReturn:
    raise UserError(what)
