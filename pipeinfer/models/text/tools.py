"""Tools that a model may call: how it is told of them, and the grammar of calls that it must make. Reads no answers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeinfer.models.text.answer_forms import MARK, THOUGHTS
from pipeinfer.models.text.answers import as_json
from pipeinfer.models.text.chat import Message
from pipeinfer.models.text.grammar_text import ANY_TOKENS
from pipeinfer.models.text.json_schema import json_rule
from pipeinfer.models.text.tokenizer import ATTR_CONTROL, Tokenizer

AUTO, NONE, REQUIRED = "auto", "none", "required"
MAX_CALLS = 16
"""Of one answer that must call: a model that finds no end would call until its text is full."""


@dataclass(frozen=True, slots=True)
class Tools:
    """`functions`: in OpenAI's form, each with a name and the schema of its parameters. `choice`: auto, required, or
    the one function that must be called. `parallel`: several calls may be made at a time."""

    functions: tuple[Mapping[str, Any], ...]
    choice: str = AUTO
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, Any]:
        """By function."""
        found = (each["function"] for each in self.functions)
        return {each["name"]: each.get("parameters") or {"type": "object", "properties": {}} for each in found}


@dataclass(frozen=True, slots=True)
class Style:
    """How a model writes calls that it must make. `signs`: templates of such models have all of them. `call`: before a
    call's arguments, with %s for the name. `single`: an answer has one call."""

    signs: tuple[str, ...]
    call: str
    close: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    single: bool = False


DEEPSEEK = "<｜tool▁calls▁begin｜>"
STYLES = (
    Style((DEEPSEEK, "```json"), "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n", "\n```<｜tool▁call▁end｜>",
          DEEPSEEK, "\n", "<｜tool▁calls▁end｜>"),
    Style((DEEPSEEK,), "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>", "<｜tool▁call▁end｜>", DEEPSEEK, "",
          "<｜tool▁calls▁end｜>"),
    Style(("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]%s[ARGS]"),
    Style(("[TOOL_CALLS]",), '{"name": "%s", "arguments": ', "}", "[TOOL_CALLS][", ", ", "]"),
    Style(("<|channel|>",), "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>", single=True),
    Style(("<|python_tag|>",), '{"name": "%s", "parameters": ', "}", "", "; "),
    Style((), '<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>", "", "\n"),  # Hermes, Qwen and all others
)  # fmt: skip
HARMONY = "<|channel|>analysis<|message|>"
HERMES = STYLES[-1]

TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""Told to models whose template knows no tools, as Qwen's template does."""


def knows_tools(source: str) -> bool:
    """Whether a template tells of tools."""
    return re.search(r"\btools\b", source) is not None


def told_plainly(messages: Sequence[Message], tools: Tools | None) -> list[Message]:
    """The same conversation for a template that knows no tools: they, calls and results are told as texts."""
    told = [_plain(message) for message in messages]
    if tools is None:
        return told
    text = TOLD.format("\n".join(as_json(each) for each in tools.functions))
    if told and told[0].role == "system":
        return [Message("system", f"{told[0].content}\n\n{text}"), *told[1:]]
    return [Message("system", text), *told]


def _plain(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    calls = [each["function"] for each in message.more.get("tool_calls", ())]
    written = [HERMES.call % call["name"] + as_json(call["arguments"]) + HERMES.close for call in calls]
    return Message(message.role, "\n".join(filter(None, [message.content, *written])))


def calls_grammar(tools: Tools, source: str, tokenizer: Tokenizer, thought: str) -> str:
    """The text of a grammar: calls in the style of the template `source`, their arguments held to their schemas, after
    reasoning. `thought`: what ends the reasoning that the prompt begins, if it begins some."""
    style = next(each for each in STYLES if all(sign in source for sign in each.signs))
    schemas = {name: schema for name, schema in tools.schemas.items() if tools.choice in (REQUIRED, name)}
    more = tools.parallel and tools.choice == REQUIRED and not style.single

    def mark(text: str) -> str:
        return _literal(text, tokenizer)

    lines = [f"calls: {' | '.join(f'call{at}' for at in range(len(schemas)))}"]
    for at, (name, schema) in enumerate(schemas.items()):
        lines += [
            f"call{at}: {mark(style.call % name)} given{at} {mark(style.close)}",
            f"given{at}: {json_rule(schema)}",
        ]
    rest = f"({mark(style.between)} calls){{0,{MAX_CALLS - 1}}}" if more else ""
    before, rules = _thoughts(source, thought, mark)
    start = f"start: {before} {mark(style.begin)} calls {rest} {mark(style.end)}"
    return ANY_TOKENS + "\n".join([start, *lines, *rules])


def _thoughts(source: str, thought: str, mark: Any) -> tuple[str, list[str]]:
    """What stands before the calls, and its rules: the reasoning that is open, or may come."""
    begin = HARMONY if "<|channel|>" in source else next((each for each in THOUGHTS if each in source), "")
    if not thought and not begin:
        return "", []
    end, space = mark(thought or THOUGHTS[begin]), "/[ \\n]*/"
    if begin == HARMONY:
        space = mark("<|start|>assistant")
    free = ["free: /(.|\\n)*/", f"thought: free {end} {space}"]
    if end.startswith('"'):  # no token that text cannot have
        free = [f"free[suffix={end}]: /(.|\\n)*/", f"thought: free {space}"]
    return ("thought" if thought else f"({mark(begin)} thought)?"), free


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """In Lark; control tokens by their ids, as no text is one."""
    return " ".join(_control(part, tokenizer) or as_json(part) for part in MARK.split(text) if part)


def _control(text: str, tokenizer: Tokenizer) -> str:
    tokens = tokenizer.encode(text, add_special=False, parse_special=True) if MARK.fullmatch(text) else []
    is_control = len(tokens) == 1 and tokenizer.attributes_of(tokens[0]) & ATTR_CONTROL
    return f"<[{tokens[0]}]>" if is_control else ""
