"""Calls that must be made: their grammar lets through what the model's template writes, and readers read it back."""

import json
from typing import Any

import pytest

from pipeinfer.models.text.answers import AnswerReader
from pipeinfer.models.text.grammar_text import answer, lark_of, matcher, open_tokens
from pipeinfer.models.text.messages import ChatMessage
from pipeinfer.models.text.tokenizer import ATTR_CONTROL
from pipeinfer.models.text.tools import (
    CALLS,
    HERMES,
    STYLES,
    Style,
    Tools,
    behind_reasoning,
    calls_grammar,
    knows_tools,
    plain_conversation,
)

SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "kind": {"$ref": "#/$defs/kind"}},
    "required": ["a"],
    "$defs": {"kind": {"enum": ["int", "float"]}},
}
FUNCTIONS = (
    {"type": "function", "function": {"name": "add", "parameters": SUM}},
    {"type": "function", "function": {"name": "now"}},
)
CONTROLS = ("[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>")
GIVEN: list[tuple[str, Any]] = [("add", {"a": 1, "kind": "int"}), ("now", {}), ("add", {"a": -2})]
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


class Bytes:
    """A vocabulary of bytes and control tokens."""

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [256 + CONTROLS.index(text)] if text in CONTROLS else list(text.encode())

    def attributes_of(self, token: int) -> int:
        return ATTR_CONTROL if token >= 256 else 0


def tokens_of(text: str) -> list[int]:
    for at, name in enumerate(CONTROLS):
        text = text.replace(name, chr(0xE000 + at))
    return [
        token
        for each in text
        for token in ([256 + ord(each) - 0xE000] if "\ue000" <= each < "\ue100" else each.encode())
    ]


def takes(grammar: str, text: str) -> bool:
    """Whether a text is one of the grammar's."""
    pieces = [*(bytes([byte]) for byte in range(256)), *(b"\xff" + name.encode() for name in CONTROLS), b"\xff<end>"]
    at = matcher(open_tokens(pieces, len(pieces) - 1), grammar)
    assert not at.is_error(), at.get_error()
    ids = tokens_of(text)
    return at.try_consume_tokens(ids) == len(ids) and at.is_accepting()


def grammar_of(style: Style, name: str = "", parallel: bool = True, thought: str = "", also: str = "") -> str:
    tokenizer: Any = Bytes()
    return calls_grammar(Tools(FUNCTIONS, "required", parallel, name), " ".join(style.signs) + also, tokenizer, thought)


def written(style: Style, calls: list[tuple[str, Any]]) -> str:
    texts = [style.call % name + json.dumps(given) + style.close for name, given in calls]
    return style.begin + style.between.join(texts) + style.end


@pytest.mark.parametrize("style", STYLES, ids=lambda style: "+".join(style.signs) or "hermes")
def test_required_calls_are_written_as_the_model_writes_them_and_read_back(style: Style) -> None:
    calls = GIVEN[: 1 if style.single else None]
    text, grammar = written(style, calls), grammar_of(style)
    assert takes(grammar, text) and not takes(grammar, "It is 23.") and not takes(grammar, "")
    assert answer({"text": grammar, "n_vocab": 300}) == {"wrong": "", "tokens": []}
    wrong: list[tuple[str, Any]]
    for wrong in ([("add", {"a": "1"})], [("add", {"a": 1, "b": 2})], [("add", {})], [("sub", {"a": 1})]):
        assert not takes(grammar, written(style, wrong))
    assert takes(grammar_of(style, "now"), written(style, [("now", {})]))
    assert not takes(grammar_of(style, "now"), written(style, [("add", {"a": 1})]))
    assert not takes(grammar_of(style, parallel=False), written(style, GIVEN))
    reader = AnswerReader(Tools(FUNCTIONS).schemas)
    found = [part for piece in text for part in reader.push(piece)] + reader.finish()
    assert [part.text for part in found if part.kind == "call"] == [name for name, _ in calls]
    given = "".join(part.text for part in found if part.kind == "arguments")
    assert given == "".join(json.dumps(each) for _, each in calls)
    assert not any(part.kind == "content" for part in found)


def test_a_model_may_think_before_it_calls() -> None:
    text = written(HERMES, GIVEN[:1])
    assert not takes(grammar_of(HERMES), f"<think>Hm.</think>{text}")
    may = grammar_of(HERMES, also="<think>")
    assert takes(may, f"<think>Is {text} it?\n</think>\n\n{text}") and takes(may, text)
    does = grammar_of(HERMES, also="<think>", thought="</think>")
    assert takes(does, f"Hm.\n</think>\n\n{text}") and not takes(does, text)
    gpt_oss = next(style for style in STYLES if style.single)
    for text in (written(gpt_oss, GIVEN[:1]), ANALYSIS + written(gpt_oss, GIVEN[:1])):
        assert takes(grammar_of(gpt_oss), text)


@pytest.mark.parametrize("grammar", ['root ::= "\\n"? ("yes" | "no") end\nend ::= "."', '{"enum": ["yes.", "no."]}'])
def test_a_grammar_holds_the_answer_behind_the_reasoning(grammar: str) -> None:
    tokenizer: Any = Bytes()

    def lark(source: str, thought: str = "") -> str:
        return lark_of(behind_reasoning(grammar, source, thought, tokenizer), int)

    yes = '"yes."' if grammar.startswith("{") else "yes."
    assert behind_reasoning(grammar, "no marks", "", tokenizer) == grammar and takes(lark("no marks"), yes)
    begun = lark("<think>", "</think>")
    assert takes(begun, f"Is {yes} it?\n</think>\n\n{yes}") and not takes(begun, yes)
    assert not takes(begun, f"Hm.</think>{yes}!") and not takes(begun, "Hm.</think>")
    may = lark("<think>")
    assert takes(may, f"<think>Hm.</think>{yes}") and takes(may, yes) and not takes(may, f"Hm.</think>{yes}")
    harmony = lark("<|channel|>")
    assert takes(harmony, f"{ANALYSIS}<|channel|>final<|message|>{yes}") and not takes(harmony, f"{ANALYSIS}{yes}")
    text = behind_reasoning(grammar, "<think>", "</think>", tokenizer)
    assert answer({"text": text, "n_vocab": 300}) == {"wrong": "", "tokens": []}


def test_tools_become_text_for_a_template_without_tools() -> None:
    assert knows_tools("{% if tools %}") and not knows_tools("{{ message.content }} toolset")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [ChatMessage("user", "1?"), ChatMessage("assistant", "", {"tool_calls": [call]}), ChatMessage("tool", "2")]
    system, *plain = plain_conversation(chat, Tools(FUNCTIONS))
    assert system.role == "system" and '"name": "add"' in system.content and "<tool_call>" in system.content
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    response = "<tool_response>\n2\n</tool_response>"
    assert plain == [chat[0], ChatMessage("assistant", written), ChatMessage("user", response)]
    merged = plain_conversation([ChatMessage("system", "Be brief."), *chat], Tools(FUNCTIONS))[0].content
    assert merged.startswith("Be brief.\n\n# Tools")
    assert plain_conversation(chat[:1], None) == chat[:1] and CALLS in STYLES[0].signs
