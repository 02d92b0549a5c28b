"""Conversations in other orders of roles, for templates that refuse the order as it is. Renders nothing."""

from collections.abc import Sequence
from dataclasses import replace

from pipeinfer.models.text.chat import Message

Conversation = Sequence[Message]


def orders(messages: Conversation) -> list[Conversation]:
    """What to try, in order, where a template refuses the messages: the system's ones as one at the beginning, that
    one as the beginning of what the user says, and neighbours of one role as one message."""
    found: list[Conversation] = [messages]
    for change in (_system_first, _without_system, _alternating):
        if (changed := change(found[-1])) != list(messages) and changed != list(found[-1]):
            found.append(changed)
    return found[1:]


def _system_first(messages: Conversation) -> list[Message]:
    system = [each for each in messages if each.role == "system"]
    rest = [each for each in messages if each.role != "system"]
    return [replace(system[0], content=_joined(system)), *rest] if system else rest


def _without_system(messages: Conversation) -> list[Message]:
    """Of messages whose system speaks first."""
    if not messages or messages[0].role != "system":
        return list(messages)
    system, *rest = messages
    if rest and rest[0].role == "user":
        return [replace(rest[0], content=_joined([system, rest[0]])), *rest[1:]]
    return [replace(system, role="user"), *rest]


def _alternating(messages: Conversation) -> list[Message]:
    found = list[Message]()
    for message in messages:
        if found and found[-1].role == message.role and message.role in ("user", "assistant"):
            last = found[-1]
            calls = [*last.more.get("tool_calls", ()), *message.more.get("tool_calls", ())]
            more = {**last.more, **message.more, **({"tool_calls": calls} if calls else {})}
            found[-1] = replace(last, content=_joined([last, message]), more=more)
        else:
            found.append(message)
    return found


def _joined(messages: Conversation) -> str:
    return "\n\n".join(each.content for each in messages if each.content)
