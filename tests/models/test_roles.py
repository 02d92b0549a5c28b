"""Orders of roles for templates that refuse the order as it is."""

import pytest

from pipeinfer.models.text.chat_template import ChatMessage, orders


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
