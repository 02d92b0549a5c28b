"""Messages in the forms that templates ask for."""

from dataclasses import replace
from typing import Any

import pytest

from pipeinfer.models.text.messages import ChatMessage, fields_of, orders


def said(*pairs: tuple[str, str]) -> list[ChatMessage]:
    return [ChatMessage(role, content) for role, content in pairs]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (said(("user", "a")), []),
        (said(("user", "a"), ("assistant", "b"), ("user", "c")), []),
        (said(("system", "s"), ("user", "a")), [said(("user", "s\n\na"))]),
        (
            said(("user", "a"), ("system", "s"), ("assistant", "b"), ("user", "c")),
            [
                said(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")),
                said(("user", "s\n\na"), ("assistant", "b"), ("user", "c")),
            ],
        ),
        (
            said(("system", "s"), ("user", "a"), ("user", "b"), ("system", "t")),
            [
                said(("system", "s\n\nt"), ("user", "a"), ("user", "b")),
                said(("user", "s\n\nt\n\na"), ("user", "b")),
                said(("user", "s\n\nt\n\na\n\nb")),
            ],
        ),
        (said(("user", "a"), ("user", "b")), [said(("user", "a\n\nb"))]),
        (
            said(("user", "a"), ("assistant", "b"), ("tool", "c"), ("user", "d")),
            [said(("user", "a"), ("assistant", "b"), ("tool", "c\n\nd"))],
        ),
    ],
)
def test_orders_come_from_the_least_change_to_the_largest(
    messages: list[ChatMessage], expected: list[list[ChatMessage]]
) -> None:
    assert [list(each) for each in orders(messages)] == expected


def test_calls_of_neighbours_stay() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in "fg"]
    first, second = (ChatMessage("assistant", "", {"tool_calls": [call]}) for call in calls)
    (found,) = orders([ChatMessage("user", "a"), first, second])
    assert found[1].more["tool_calls"] == calls


@pytest.mark.parametrize("texts", [("a", ""), ("", "b"), ("", "")])
def test_a_text_stays_beside_calls_without_one(texts: tuple[str, str]) -> None:
    answers = [ChatMessage("assistant", text, {} if text else {"tool_calls": [], "content": None}) for text in texts]
    (found,) = orders([ChatMessage("user", "x"), *answers])
    fields = {"content": found[1].content, **found[1].more}
    assert (fields["content"] or "") == "".join(texts)


def call(name: str, **more: str) -> dict[str, Any]:
    return {**more, "type": "function", "function": {"name": name, "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{{ message.content }}", ""),
        ("{% if message.reasoning_content is not none %}{{ message.content }}", ""),
        ("{% if message['content'] is none %}call", None),
        ("{% if message.content != None %}{{ message.content }}", None),
        ("{% if message.get('content') is not none %}{{ message.content }}", None),
    ],
)
def test_a_content_of_null_is_a_text_where_nobody_asks_for_null(source: str, content: str | None) -> None:
    said = [ChatMessage("assistant", "", {"tool_calls": [call("f")], "content": None})]
    assert fields_of(said, source)[0]["content"] == content


ONE_CALL = "{% set call = message.tool_calls[0].function %}", "{% set call = message['tool_calls'][0] %}"
EACH_CALL = "{% for call in message.tool_calls %}", "{% set calls = message['tool_calls'] %}"


@pytest.mark.parametrize("ids", [("x", "y"), ("y", "x"), ()])
def test_calls_stand_alone_where_only_the_first_is_written(ids: tuple[str, ...]) -> None:
    calls = [call("f", id="x"), call("g", id="y")]
    answer = ChatMessage("assistant", "Look.", {"tool_calls": calls, "reasoning_content": "why"})
    of_x, of_y = ({"tool_call_id": each} if ids else {} for each in "xy")
    results = {"x": ChatMessage("tool", "one", of_x), "y": ChatMessage("tool", "two", of_y)}
    behind = [ChatMessage("tool", "more", {"tool_call_id": "z"}), ChatMessage("user", "So?")]
    conversation = [ChatMessage("user", "a"), answer, *(results[each] for each in ids or "xy"), *behind]
    for source in ONE_CALL:
        found = fields_of(conversation, source)
        assert [each["role"] for each in found] == ["user", *["assistant", "tool"] * 2, "tool", "user"]
        assert [each["tool_calls"] for each in found[1:5:2]] == [[calls[0]], [calls[1]]]
        assert [each["content"] for each in found] == ["a", "Look.", "one", "", "two", "more", "So?"]
        assert "reasoning_content" in found[1] and "reasoning_content" not in found[3]
        for other in EACH_CALL:
            assert len(fields_of(conversation, source + other)) == len(conversation)


def test_a_call_without_its_result_and_a_call_alone_stay_where_they_are() -> None:
    calls = ChatMessage("assistant", "", {"tool_calls": [call("f", id="x"), call("g", id="y")]})
    alone = ChatMessage("assistant", "", {"tool_calls": [call("h", id="z")]})
    conversation = [calls, ChatMessage("tool", "two", {"tool_call_id": "y"}), alone, ChatMessage("tool", "three")]
    found = fields_of(conversation, ONE_CALL[0])
    names = [each["tool_calls"][0]["function"]["name"] if "tool_calls" in each else each["content"] for each in found]
    assert names == ["f", "g", "two", "h", "three"]


def test_reasoning_has_the_name_that_a_template_reads() -> None:
    more = {"reasoning_content": "why"}
    said = [ChatMessage("assistant", "Look.", {**more, "tool_calls": [call("f")]}), ChatMessage("assistant", "b", more)]
    for source in ("{{ message.thinking }}", "{{ message['thinking'] }}"):
        found = fields_of(said, source)
        assert [(each["thinking"], each["content"]) for each in found] == [("why", ""), ("why", "b")]
        assert fields_of([replace(said[0], more={"reasoning_content": ""})], source)[0]["content"] == "Look."
    assert "thinking" not in fields_of(said, "{% if thinking %}{{ message.reasoning_content }}")[0]
