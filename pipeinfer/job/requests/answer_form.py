"""A chat's answer in OpenAI's form: text, reasoning and calls. Knows no HTTP."""

import secrets
from collections.abc import Iterable
from typing import Any

from pipeinfer.job.requests.request_body import Body
from pipeinfer.models.text.answers import AnswerReader, Part
from pipeinfer.models.text.tools import AUTO


def reader_of(body: Body, thought: str) -> AnswerReader:
    """`thought`: what ends the reasoning that the prompt begins."""
    must_call = body.tools is not None and body.tools.choice != AUTO
    return AnswerReader(body.tools.schemas if body.tools else None, thought if body.splits else None, must_call)


def message_of(parts: Iterable[Part]) -> dict[str, Any]:
    texts, calls = {"content": "", "reasoning": ""}, list[dict[str, Any]]()
    for kind, text in parts:
        if kind == "call":
            calls.append(call_of(text, ""))
        elif kind == "arguments":
            calls[-1]["function"]["arguments"] += text
        else:
            texts[kind] += text
    found: dict[str, Any] = {"role": "assistant", "content": texts["content"] or (None if calls else "")}
    if texts["reasoning"]:
        found["reasoning_content"] = texts["reasoning"]
    return found | ({"tool_calls": calls} if calls else {})


def call_of(name: str, arguments: str) -> dict[str, Any]:
    """With an id of nine characters, as Mistral's templates want it."""
    function = {"name": name, "arguments": arguments}
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}


def finish_of(finish: str, reader: AnswerReader) -> str:
    """Why an answer ended: a call that is whole ends it too."""
    return "tool_calls" if finish == "stop" and reader.n_calls and not reader.is_in_call else finish
