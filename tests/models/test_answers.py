"""Answers as models write them: reasoning, content and calls, read alike wherever a stream cuts them."""

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from pipeinfer.models.text.answer_forms import CLOSERS, FORMS, NO_TEXT, THOUGHTS
from pipeinfer.models.text.answers import AnswerPart, AnswerReader, opened_thought, unclosed_thought

TOOLS: dict[str, Any] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "list_files": {"type": "object", "properties": {"path": {"type": "string"}, "deep": {"type": "boolean"}}},
    "now": {"type": "object", "properties": {}},
}
ADD = ("add", {"a": 1, "b": 22})
LIST = ("list_files", {"path": 'a "b" {c}\n', "deep": True})
ADD_JSON = '{"name": "add", "arguments": {"a": 1, "b": 22}}'
LIST_ARGUMENTS = json.dumps(LIST[1])
LIST_JSON = f'{{"name": "list_files", "arguments": {LIST_ARGUMENTS}}}'
V3 = "<｜tool▁calls▁begin｜>"
V3_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
V3_END = "<｜tool▁calls▁end｜>"
COMMENTARY = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 22}'
ANALYSIS = "<|channel|>analysis<|message|>We add.<|end|><|start|>assistant"

Read = tuple[str, str, list[tuple[str, Any]]]
ADDED_JSON: Read = ("We add.", '{"a": 1}', [])

SAMPLES: dict[str, tuple[str, Read]] = {
    # Hermes and Qwen
    "qwen": (f"<tool_call>\n{ADD_JSON}\n</tool_call>", ("", "", [ADD])),
    "qwen, two": (
        f"<tool_call>\n{ADD_JSON}\n</tool_call>\n<tool_call>\n{LIST_JSON}\n</tool_call>",
        ("", "", [ADD, LIST]),
    ),
    "qwen, with words": (f"I add.\n\n<tool_call>\n{ADD_JSON}\n</tool_call>", ("", "I add.", [ADD])),
    "qwen, thinking": (
        f"<think>\nTwo numbers.\n</think>\n\n<tool_call>{ADD_JSON}</tool_call>",
        ("Two numbers.", "", [ADD]),
    ),
    "qwen, nothing to give": ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', ("", "", [("now", {})])),
    "arguments first": ('<tool_call>{"arguments": {"a": 1, "b": 22}, "name": "add"}</tool_call>', ("", "", [ADD])),
    "arguments as a text": (
        f'<tool_call>{{"name": "add", "arguments": {json.dumps(json.dumps(ADD[1]))}}}</tool_call>',
        ("", "", [ADD]),
    ),
    "no arguments": ('<tool_call>\n{"name": "now"}\n</tool_call>', ("", "", [("now", {})])),
    "unclosed": (f"<tool_call>\n{ADD_JSON}", ("", "", [ADD])),
    "words behind": (f"<tool_call>\n{ADD_JSON}\n</tool_call>\nDone, I hope.", ("", "Done, I hope.", [ADD])),
    "qwen coder": (
        '<tool_call>\n<function=list_files>\n<parameter=path>\na "b" {c}\n\n</parameter>\n<parameter=deep>\ntrue\n'
        "</parameter>\n</function>\n</tool_call>",
        ("", "", [LIST]),
    ),
    "qwen, a type behind": (
        f'<tool_call>\n{ADD_JSON[:-1]}, "type": "function"}}\n</tool_call>\n<tool_call>{LIST_JSON}</tool_call>',
        ("", "", [ADD, LIST]),
    ),
    # without marks, as small models and Llama 3 write
    "bare": (ADD_JSON, ("", "", [ADD])),
    "fenced": (f"```json\n{ADD_JSON}\n```", ("", "", [ADD])),
    "a list": (f"[{ADD_JSON}, {LIST_JSON}]", ("", "", [ADD, LIST])),
    "llama": ('{"name": "add", "parameters": {"a": 1, "b": 22}}', ("", "", [ADD])),
    "llama, type": ('{"type": "function", "name": "add", "parameters": {"a": 1, "b": 22}}', ("", "", [ADD])),
    "llama, function first": (
        '{"type": "function", "function": "add", "parameters": {"a": 1, "b": 22}}',
        ("", "", [ADD]),
    ),
    "an id first": ('```json\n[{"id": "call 1", "name": "add", "arguments": {"a": 1, "b": 22}}]\n```', ("", "", [ADD])),
    "llama, two": (f'{{"name": "add", "parameters": {{"a": 1, "b": 22}}}}; {LIST_JSON}', ("", "", [ADD, LIST])),
    "members behind": (
        f'[{ADD_JSON[:-1]} , "id" : "}}, \\"x", "more": {{"a": ["}}", {{}}]}}, "strict": null}}, {LIST_JSON}]',
        ("", "", [ADD, LIST]),
    ),
    "words behind an open call": (f"{ADD_JSON[:-1]}, he said", ("", "he said", [ADD])),
    "llama, tag": ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 22}}', ("", "", [ADD])),
    "llama, function": ('<function=add>{"a": 1, "b": 22}</function>', ("", "", [ADD])),
    # Mistral
    "mistral": (f"[TOOL_CALLS][{ADD_JSON}, {LIST_JSON}]", ("", "", [ADD, LIST])),
    "mistral, ids behind": (
        f'[TOOL_CALLS] [{ADD_JSON[:-1]}, "id": "VvvODy9mT"}}, {LIST_JSON[:-1]}, "id": "123456789"}}]',
        ("", "", [ADD, LIST]),
    ),
    "mistral, arguments": (
        f'[TOOL_CALLS]add[ARGS]{{"a": 1, "b": 22}}[TOOL_CALLS]list_files[ARGS]{LIST_ARGUMENTS}',
        ("", "", [ADD, LIST]),
    ),
    "mistral, id": ('[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1, "b": 22}', ("", "", [ADD])),
    "mistral, id alone": (f"[TOOL_CALLS]list_files[CALL_ID]123456789{LIST_ARGUMENTS}", ("", "", [LIST])),
    "mistral, plain name": ('[TOOL_CALLS]add{"a": 1, "b": 22}', ("", "", [ADD])),
    "magistral": (f"[THINK]Add.[/THINK]So: [TOOL_CALLS][{ADD_JSON}]", ("Add.", "So:", [ADD])),
    "gemma 4": ("<|channel>thought\nHm.\n<channel|>Yes", ("Hm.", "Yes", [])),
    # DeepSeek
    "deepseek v3": (
        V3 + V3_CALL.format("add", '{"a": 1, "b": 22}') + "\n" + V3_CALL.format("list_files", LIST_ARGUMENTS) + V3_END,
        ("", "", [ADD, LIST]),
    ),
    "deepseek v3.1": (
        "Now.\n"
        + V3
        + V31_CALL.format("add", '{"a": 1, "b": 22}')
        + V31_CALL.format("list_files", LIST_ARGUMENTS)
        + V3_END,
        ("", "Now.", [ADD, LIST]),
    ),
    # GLM
    "glm": (
        '<think>Hm</think>\n<tool_call>list_files\n<arg_key>path</arg_key>\n<arg_value>a "b" {c}\n</arg_value>\n'
        "<arg_key>deep</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
        ("Hm", "", [LIST]),
    ),
    "glm, nothing to give": ("<tool_call>now</tool_call>", ("", "", [("now", {})])),
    # gpt-oss
    "gpt-oss": (f"{ANALYSIS}{COMMENTARY}<|call|>", ("We add.", "", [ADD])),
    "gpt-oss, role": (
        f'{ANALYSIS} to=functions.add<|channel|>commentary json<|message|>{{"a": 1, "b": 22}}',
        ("We add.", "", [ADD]),
    ),
    "gpt-oss, preamble": (
        f"{ANALYSIS}<|channel|>commentary<|message|>First.<|end|><|start|>assistant{COMMENTARY}",
        ("We add.", "First.", [ADD]),
    ),
    "gpt-oss, text": (f"{ANALYSIS}<|channel|>final<|message|>It is 23.", ("We add.", "It is 23.", [])),
    "gpt-oss, constraint": (f'{ANALYSIS}<|channel|>final <|constrain|>json<|message|>{{"a": 1}}', ADDED_JSON),
    "gpt-oss, arguments alone": (f'{ANALYSIS}<|channel|>commentary json<|message|>{{"a": 1}}', ADDED_JSON),
    # no calls
    "text": ("It is 23, or {x}.\n", ("", "It is 23, or {x}.\n", [])),
    "json": ('{"name": "Bob", "age": 3}', ("", '{"name": "Bob", "age": 3}', [])),
    "json of a stranger": (
        '{"name": "sub", "arguments": {"a": 1}}',
        ("", '{"name": "sub", "arguments": {"a": 1}}', []),
    ),
    "code": ("```json\n[1, 2]\n```", ("", "```json\n[1, 2]\n```", [])),
    "a mark of nothing": (
        "Models write <tool_call> and </tool_call>.",
        ("", "Models write <tool_call> and </tool_call>.", []),
    ),
    "a mark within a text": (
        '<tool_call>\n{"arguments": {"path": "</tool_call>\\""}, "name": "list_files"}\n</tool_call>',
        ("", "", [("list_files", {"path": '</tool_call>"'})]),
    ),
    "a mark of no calls": ("<tool_call>[]</tool_call>", ("", "<tool_call>[]</tool_call>", [])),
    "broken": ('<tool_call>\n{"name": add}\n</tool_call>', ("", '<tool_call>\n{"name": add}\n</tool_call>', [])),
    "thinking alone": ("<think>\nHm.\n", ("Hm.\n", "", [])),
    "thought and text": ("<think>\nHm,\n\nhm.\n</think>\n\nYes. ", ("Hm,\n\nhm.", "Yes. ", [])),
    "no thought": ("<think>\n\n</think>\n\nYes", ("", "Yes", [])),
    "late thought": ("Yes <think> so", ("", "Yes <think> so", [])),
}


def parts_of(pieces: Sequence[str], tools: Any = TOOLS, thought: str | None = "") -> list[AnswerPart]:
    reader = AnswerReader(tools, thought)
    found = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    assert reader.n_calls == sum(part.kind == "call" for part in found)
    return found


def read(pieces: Sequence[str], tools: Any = TOOLS, thought: str | None = "") -> Read:
    texts, calls = {"content": "", "reasoning": ""}, list[list[str]]()
    for kind, text in parts_of(pieces, tools, thought):
        assert text
        if kind == "call":
            calls.append([text, ""])
        elif kind == "arguments":
            calls[-1][1] += text
        else:
            texts[kind] += text
    return texts["reasoning"], texts["content"], [(name, json.loads(given)) for name, given in calls]


@pytest.mark.parametrize("name", SAMPLES)
def test_an_answer_is_read_alike_wherever_it_is_cut(name: str) -> None:
    text, meant = SAMPLES[name]
    assert read([text]) == meant
    assert read(list(text)) == meant
    for at in range(1, len(text)):
        assert read([text[:at], text[at:]]) == meant, text[:at]


@pytest.mark.parametrize("name", SAMPLES)
def test_without_tools_calls_are_text(name: str) -> None:
    text, (thought, *_) = SAMPLES[name]
    for pieces in ([text], list(text)):
        reasoning, content, calls = read(pieces, None)
        assert reasoning == thought and not calls and text.endswith(content)
        assert read(pieces, None, None) == ("", text, [])


def test_channels_that_are_text_are_not_held_back_for_calls() -> None:
    reader, text = AnswerReader(TOOLS, None), f"{ANALYSIS}<|channel|>final<|message|>It is 23."
    assert "".join(part.text for part in reader.push(text)) == text
    assert read(list(f"{ANALYSIS}{COMMENTARY}"), TOOLS, None)[2]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("end", ["", "<|end|>"])
def test_an_answer_may_have_many_channels(tools: Any, end: str) -> None:
    begin, more = "<|channel|>commentary<|message|>", "<|end|><|start|>assistant<|channel|>"
    text = f"{begin}First.{more}analysis<|message|>{{}} Hm.{more}commentary<|message|>{{Now.{more}final<|message|>Yes,"
    for pieces in ([text + end], list(text + end)):
        assert read(pieces, tools) == ("{} Hm.", "First.{Now.Yes,", [])
    assert AnswerReader(tools).push(text)[-1] == AnswerPart("content", "Yes,"), "nothing is held back"


FRAGMENTS = [
    *dict.fromkeys((*THOUGHTS, *THOUGHTS.values(), *NO_TEXT, *CLOSERS, *(form.mark for form in FORMS))),
    *("<|end|><|start|>assistant<|channel|>", "analysis", "commentary", "final", " to=functions.add"),
    *(" <|constrain|>json", "<|message|>", "<tool_call>add", "<function=now>", "<parameter=a>1</parameter>"),
    *("<arg_key>a</arg_key><arg_value>2</arg_value>", "[CALL_ID]x", "[ARGS]"),
    *('{"id": "x", "name": "add", "arguments": ', '{"type": "function", "function": "add", "parameters": '),
    *('{"name": "add", "arguments": ', '{"a": 1}', '{"b": "}"}', ', "id": "x"', *'{}[]"\\ \n,', "text", "```json"),
]


def test_the_parts_of_any_text_do_not_depend_on_where_it_is_cut() -> None:
    random = Random(1)
    for _ in range(1500):
        text = "".join(random.choices(FRAGMENTS, k=random.randint(1, 8)))
        tools, thought = random.choice([None, TOOLS, TOOLS]), random.choice(["", "", "</think>", None])
        is_cut, must_call = random.random() < 0.5, random.random() < 0.2
        places = [0, *sorted(random.choices(range(len(text) + 1), k=3)), len(text)]
        found = []
        for pieces in ([text], list(text), [text[first:last] for first, last in pairwise(places)]):
            reader, merged = AnswerReader(tools, thought, must_call), list[list[str]]()
            for kind, more in [*(part for piece in pieces for part in reader.push(piece)), *reader.finish(is_cut)]:
                assert kind != "arguments" or merged[-1][0] in ("call", "arguments"), text
                if kind != "call" and merged and merged[-1][0] == kind:
                    merged[-1][1] += more
                else:
                    merged.append([kind, more])
            assert reader.n_calls == sum(kind == "call" for kind, _ in merged), text
            found.append((merged, reader.is_in_call))
        assert found[0] == found[1] == found[2], (text, tools, thought, is_cut, must_call)


def test_a_prompt_may_begin_the_reasoning() -> None:
    assert opened_thought("…<|im_start|>assistant\n<think>\n") == "</think>"
    assert opened_thought("…<think>\n\n</think>\n\n") == opened_thought("") == ""
    for pieces in (["Hm.\n</think>\n\nYes"], list("Hm.\n</think>\n\nYes")):
        assert read(pieces, None, "</think>") == ("Hm.", "Yes", [])


def test_arguments_come_as_they_are_written() -> None:
    text, _ = SAMPLES["qwen, two"]
    parts = parts_of(list(text))
    assert [part.text for part in parts if part.kind == "call"] == ["add", "list_files"]
    assert sum(part.kind == "arguments" for part in parts) == len('{"a": 1, "b": 22}') + len(LIST_ARGUMENTS)
    assert {len(part.text) for part in parts if part.kind == "arguments"} == {1}


def test_an_answer_that_is_cut_off_tells_what_it_has() -> None:
    parts = parts_of(['<tool_call>{"name": "add", "arguments": {"a": 1, "b'])
    assert parts == [AnswerPart("call", "add"), AnswerPart("arguments", '{"a": 1, "b')]


MARKS_OF_CALLS = (
    "<tool_call",
    "</tool",
    "<function",
    "<parameter",
    "[TOOL_CALLS",
    "<|python_tag",
    "<arg_",
    "<｜tool",
    "<|channel",
    '{"name"',
    "```json",
)
WITH_MARKS = [name for name, (text, (_, _, calls)) in SAMPLES.items() if calls]


@pytest.mark.parametrize("name", WITH_MARKS)
def test_a_call_that_is_cut_leaves_no_markup_in_the_text(name: str) -> None:
    text, (_, whole, calls) = SAMPLES[name]
    for at in range(1, len(text)):
        for pieces in ([text[:at]], list(text[:at])):
            reader = AnswerReader(TOOLS)
            parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish(is_cut=True)
            content = "".join(part.text for part in parts if part.kind == "content")
            said = content[:-1] if content[-1:] in ("<", "[") else content  # one character may be anything
            assert said.rstrip() in whole, (text[:at], content)
            assert not any(mark in content for mark in MARKS_OF_CALLS), (text[:at], content)
            names = [part.text for part in parts if part.kind == "call"]
            assert names == [name for name, _ in calls][: len(names)]


def test_without_tools_nothing_is_left_out_of_a_text_that_is_cut() -> None:
    for text in ("if a <t", "[T", "<|", "<tool_ca"):
        reader = AnswerReader(None)
        assert "".join(part.text for part in [*reader.push(text), *reader.finish(is_cut=True)]) == text


def test_what_only_looks_like_a_call_stays_text_where_the_answer_is_cut() -> None:
    for text in ("The tag <tool_call> is Hermes' own", "if a <", "[TOOL_CALLS] begins one", "a <tool_call>, or"):
        reader = AnswerReader(TOOLS)
        parts = [*reader.push(text), *reader.finish(is_cut=True)]
        assert "".join(part.text for part in parts) == text and {part.kind for part in parts} == {"content"}


def test_of_a_call_that_must_come_not_even_one_character_is_text() -> None:
    reader = AnswerReader(TOOLS, must_call=True)
    assert [*reader.push("<"), *reader.finish(is_cut=True)] == []


def test_arguments_that_were_cut_are_no_whole_call() -> None:
    for text, is_in_call in (('<tool_call>{"name": "add", "arguments": {"a": 1', True), (SAMPLES["qwen"][0], False)):
        reader = AnswerReader(TOOLS)
        reader.push(text)
        reader.finish(is_cut=True)
        assert reader.n_calls == 1 and reader.is_in_call is is_in_call


HEADS = ["```json", "", "<tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS]add", "[TOOL_CALLS]add[CALL_ID]"]
LONG = [
    *(head + "\n" * 40_000 + end for head in HEADS for end in ("", "x")),
    "<tool_call>add\n" + "<arg_key>a</arg_key><arg_value>" * 1000 + "</tool_call>",
    "<tool_call>add\n" + "<arg_key>a</arg_key>" * 1000 + "</tool_call>",
    "<tool_call>\n<function=add>\n" + "<parameter=a>" * 1500 + "</function>",
    "<tool_call>\n<function=add>\n" + "<parameter=" * 1500 + "</function>",
    "<function=" * 1500,
    "<|end|><|start|>assistant to=f" * 500,
]


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_reading_takes_time_by_an_answers_length(text: str) -> None:
    """A regular expression that searches from each place anew took seconds, or minutes."""
    for is_cut in (False, True):
        reader, start_s = AnswerReader(TOOLS), time.process_time()
        reader.push(text)
        reader.finish(is_cut)
        assert time.process_time() - start_s < 5


def test_pairs_that_were_cut_are_arguments_without_their_end() -> None:
    reader = AnswerReader(TOOLS)
    text = "<tool_call>\n<function=list_files>\n<parameter=path>\nsrc\n</parameter>\n<parameter=deep>\ntr"
    assert [*reader.push(text), *reader.finish(is_cut=True)] == [
        AnswerPart("call", "list_files"),
        AnswerPart("arguments", '{"path": "src"'),
    ]


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "string"}, {"007": "007", "12": "12", "null": "null", "true": "true"}),
        ({"type": ["string", "null"]}, {"12": "12", "null": None, "NULL": None}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"12": "12", "[1]": "[1]", "null": None}),
        ({"enum": ["1", "2"]}, {"1": "1"}),
        ({"$ref": "#/$defs/code"}, {"12": "12"}),
        ({"$ref": "#/$defs/loop"}, {"12": 12}),
        ({"type": "boolean"}, {"True": True, " false\n": False, "yes": "yes"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"5": 5, "null": None, "x": "x"}),
        ({"type": ["string", "integer"]}, {"5": 5, "x": "x"}),
        ({"type": 5, "enum": 5, "anyOf": 5}, {"5": 5}),
        ({"type": "number"}, {"NaN": "NaN", "1e999": "1e999", "-Infinity": "-Infinity", " 2 ": 2}),
        ({}, {"[" * 5000: "[" * 5000, "1 2": "1 2"}),
        (True, {"5": 5}),
    ],
)
def test_arguments_without_quotes_have_the_types_of_their_schema(schema: Any, values: dict[str, Any]) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/nothing/here"}]}
    tool = {"properties": {"x": schema}, "$defs": {"code": {"type": "string"}, "loop": loop}}
    for text, value in values.items():
        reader = AnswerReader({"f": tool})
        call = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
        (_, arguments) = [*reader.push(call), *reader.finish()]
        assert json.loads(arguments.text) == {"x": value}, text


def test_the_beginning_of_an_answer_may_leave_its_reasoning_open() -> None:
    assert unclosed_thought("<think>\nHm") == "</think>"
    assert unclosed_thought("<think>Hm</think> Yes") == unclosed_thought("Yes") == ""


def test_calls_of_any_depth_are_read_or_text() -> None:
    """Some can be read and not be written again: at depths that depend on who asks."""
    for depth in range(900, 1000):
        nested = "[" * depth + "]" * depth
        answer = f'<tool_call>{{"name": "f", "id": 1, "arguments": {nested}}}</tool_call>'
        reader = AnswerReader({"f": {}})
        kinds = {kind for kind, _ in [*reader.push(answer), *reader.finish()]}
        assert kinds in ({"call", "arguments"}, {"content"}), depth


def test_marks_within_texts_of_a_call_take_no_time() -> None:
    answer = '<tool_call>{"x": "' + "</tool_call>" * 20_000
    reader = AnswerReader({"f": {}})
    assert not reader.push(answer) and not reader.push('"') and reader.push("}</tool_call>")
