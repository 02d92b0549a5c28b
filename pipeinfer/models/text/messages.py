"""Messages of a chat, in the forms that templates ask for: fields by what a template reads, and other orders of roles
where it refuses one."""

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`more`: further fields for the template, such as tool_calls; a content in it replaces the text."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    more: Mapping[str, Any] = field(default_factory=dict)


Messages = Sequence[ChatMessage]


# -- fields

ASKS_FOR_NONE = re.compile(r"(?<!\w)content['\"\])]*\s*(?:is(?: not)?|[!=]=)\s*none", re.IGNORECASE)
FIRST_CALL = re.compile(r"tool_calls['\"]?\]?\[0\]")
EACH_CALL = re.compile(r"(?:\bin|=)\s{0,9}[\w.'\"\[\]]{0,99}tool_calls(?!['\"\]]*\[)|tool_calls['\"\]]*\s*\|\s*tojson")
THINKING = re.compile(r"message(?:\.|\[['\"])thinking\b")


def fields_of(messages: Messages, source: str) -> list[dict[str, Any]]:
    """What the template `source` sees. Beside calls a content of null is an empty text where the template does not ask
    for null: it would write None. Calls are in messages of their own where it writes the first of each alone, as those
    of Llama 3 and gpt-oss. Reasoning is `thinking` where it reads that, as gpt-oss's, which allows no content then."""
    asks_for_none, reads_thinking, is_of_one_call = _asks(source)
    result = [{"role": each.role, "content": each.content, **each.more} for each in messages]
    for fields in result:
        if fields["content"] is None and not asks_for_none:
            fields["content"] = ""
        if fields.get("reasoning_content") and reads_thinking:
            fields["thinking"] = fields["reasoning_content"]
            fields["content"] = "" if fields.get("tool_calls") else fields["content"]
    return _one_call_each(result) if is_of_one_call else result


@lru_cache(maxsize=8)
def _asks(source: str) -> tuple[bool, bool, bool]:
    """Whether a template asks for a content of null, reads `thinking`, and writes one call a message."""
    is_of_one_call = FIRST_CALL.search(source) and not EACH_CALL.search(source)
    return bool(ASKS_FOR_NONE.search(source)), bool(THINKING.search(source)), bool(is_of_one_call)


def _one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each call is followed by its result: the one with its id, or the next without any."""
    result, rest = list[dict[str, Any]](), deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            result.append(message)
            continue
        results = list(takewhile(lambda each: each["role"] == "tool", rest))
        by_id: dict[str | None, deque[dict[str, Any]]] = defaultdict(deque)
        for each in results:
            by_id[each.get("tool_call_id")].append(rest.popleft())
        for n, call in enumerate(calls):
            first = {"role": message["role"], "content": ""} if n else message
            result.append({**first, "tool_calls": [call]})
            if matches := by_id[call.get("id")] or by_id[None]:
                result.append(matches.popleft())
        rest_ids = {id(each) for matches in by_id.values() for each in matches}
        result += [each for each in results if id(each) in rest_ids]
    return result


# -- orders of roles


def orders(messages: Messages) -> list[Messages]:
    """Conversations to try, in order, where a template refuses the messages: with one system message at the beginning,
    with that as the beginning of the user's first message, with one message for neighbours of one role, and with what
    a user says behind a tool's result as its end."""
    conversations: list[Messages] = [messages]
    for change in (_system_first, _without_system, _alternating, _within_results):
        if (changed := change(conversations[-1])) != list(messages) and changed != list(conversations[-1]):
            conversations.append(changed)
    return conversations[1:]


def without_lost(messages: Messages, text: str) -> list[Messages]:
    """A conversation to try where a template passes over one of several system messages: with one at the beginning."""
    system = [each.content.strip() for each in messages if each.role == "system"]
    return [_system_first(messages)] if len(system) > 1 and not all(each in text for each in system) else []


def _system_first(messages: Messages) -> list[ChatMessage]:
    system = [each for each in messages if each.role == "system"]
    rest = [each for each in messages if each.role != "system"]
    return [replace(system[0], content=_joined(system)), *rest] if system else rest


def _without_system(messages: Messages) -> list[ChatMessage]:
    """`messages`: with at most one system message, the first."""
    if not messages or messages[0].role != "system":
        return list(messages)
    system, *rest = messages
    if rest and rest[0].role == "user":
        return [replace(rest[0], content=_joined([system, rest[0]])), *rest[1:]]
    return [replace(system, role="user"), *rest]


def _alternating(messages: Messages) -> list[ChatMessage]:
    merged = list[ChatMessage]()
    for message in messages:
        if merged and merged[-1].role == message.role and message.role in ("user", "assistant"):
            last = merged[-1]
            calls = [*last.more.get("tool_calls", ()), *message.more.get("tool_calls", ())]
            more = {**last.more, **message.more, **({"tool_calls": calls} if calls else {})}
            if content := _joined([last, message]):
                more.pop("content", None)  # of one that has calls alone
            merged[-1] = replace(last, content=content, more=more)
        else:
            merged.append(message)
    return merged


def _within_results(messages: Messages) -> list[ChatMessage]:
    merged = list[ChatMessage]()
    for message in messages:
        if merged and merged[-1].role == "tool" and message.role == "user":
            merged[-1] = replace(merged[-1], content=_joined([merged[-1], message]))
        else:
            merged.append(message)
    return merged


def _joined(messages: Messages) -> str:
    return "\n\n".join(each.content for each in messages if each.content)
