"""Tools that a model may call: their description in a prompt; grammars of required calls, and of an answer behind
reasoning. Reads no answers."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeinfer.models.text.answer_forms import DEEPSEEK, MARK, NO_TEXT, THOUGHTS
from pipeinfer.models.text.arguments import as_json
from pipeinfer.models.text.grammar_text import ANSWER, ANY_TOKENS
from pipeinfer.models.text.json_schema import json_rule
from pipeinfer.models.text.messages import ChatMessage
from pipeinfer.models.text.tokenizer import ATTR_CONTROL, Tokenizer

AUTO, NONE, REQUIRED = "auto", "none", "required"
MAX_SPACE = 4  # characters of white space behind reasoning: a small model may never end it
HARMONY, HARMONY_THOUGHT = "<|channel|>", "<|channel|>analysis<|message|>"
MAX_CALLS = 16  # the most required calls of an answer: a model may never end them


@dataclass(frozen=True, slots=True)
class Tools:
    """`functions`: in OpenAI's form, each with a name and the schema of its parameters. `choice`: auto or required.
    `parallel`: an answer may have several calls. `name`: of the function that must be called; empty: any."""

    functions: tuple[Mapping[str, Any], ...]
    choice: str = AUTO
    parallel: bool = True
    name: str = ""

    @property
    def schemas(self) -> dict[str, Any]:
        functions = (each["function"] for each in self.functions)
        return {each["name"]: each.get("parameters") or {"type": "object", "properties": {}} for each in functions}


@dataclass(frozen=True, slots=True)
class Style:
    """How a model writes required calls. `signs`: templates of such models have all of them. `call`: the text before a
    call's arguments, with %s for the name. `single`: an answer has one call."""

    signs: tuple[str, ...]
    call: str
    close: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    single: bool = False


CALLS, BEGIN = DEEPSEEK
SEPARATOR, END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCED = f"{BEGIN}function{SEPARATOR}%s\n```json\n"
STYLES = (
    Style((CALLS, "```json"), FENCED, f"\n```{END}", CALLS, "\n", "<｜tool▁calls▁end｜>"),
    Style((CALLS,), f"{BEGIN}%s{SEPARATOR}", END, CALLS, "", "<｜tool▁calls▁end｜>"),
    Style(("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]%s[ARGS]"),
    Style(("[TOOL_CALLS]",), '{"name": "%s", "arguments": ', "}", "[TOOL_CALLS][", ", ", "]"),
    Style(("<|channel|>",), "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>", single=True),
    Style(("<|python_tag|>",), '{"name": "%s", "parameters": ', "}", "", "; "),
    Style((), '<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>", "", "\n"),  # Hermes, Qwen and all others
)
HERMES = STYLES[-1]

DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""The system message for models whose template has no tools, from Qwen's template."""


def knows_tools(source: str) -> bool:
    """Whether a template describes tools."""
    return re.search(r"\btools\b", source) is not None


def plain_conversation(messages: Sequence[ChatMessage], tools: Tools | None) -> list[ChatMessage]:
    """The conversation for a template without tools: tools, calls and results become text."""
    plain = [_plain(message) for message in messages]
    if tools is None:
        return plain
    text = DESCRIPTION.format("\n".join(as_json(each) for each in tools.functions))
    if plain and plain[0].role == "system":
        return [ChatMessage("system", f"{plain[0].content}\n\n{text}"), *plain[1:]]
    return [ChatMessage("system", text), *plain]


def _plain(message: ChatMessage) -> ChatMessage:
    if message.role == "tool":
        return ChatMessage("user", f"<tool_response>\n{message.content}\n</tool_response>")
    calls = [each["function"] for each in message.more.get("tool_calls", ())]
    written = [HERMES.call % call["name"] + as_json(call["arguments"]) + HERMES.close for call in calls]
    return ChatMessage(message.role, "\n".join(filter(None, [message.content, *written])))


def calls_grammar(tools: Tools, source: str, tokenizer: Tokenizer, thought: str) -> str:
    """The text of a grammar: calls in the style of the template `source`, with arguments by their schemas, after
    reasoning. `thought`: the mark that ends the reasoning which the prompt begins, if any."""
    style = next(each for each in STYLES if all(sign in source for sign in each.signs))
    schemas = {name: schema for name, schema in tools.schemas.items() if tools.name in ("", name)}
    more = tools.parallel and not tools.name and not style.single

    def mark(text: str) -> str:
        return literal(text, tokenizer)

    lines = [f"calls: {' | '.join(f'call{at}' for at in range(len(schemas)))}"]
    for at, (name, schema) in enumerate(schemas.items()):
        lines += [
            f"call{at}: {mark(style.call % name)} arguments{at} {mark(style.close)}",
            f"arguments{at}: {json_rule(schema)}",
        ]
    rest = f"({mark(style.between)} calls){{0,{MAX_CALLS - 1}}}" if more else ""
    before, rules = thoughts(source, thought, tokenizer)
    start = f"start: {before} {mark(style.begin)} calls {rest} {mark(style.end)}"
    return ANY_TOKENS + "\n".join([start, *lines, *rules])


def behind_reasoning(grammar: str, source: str, thought: str, tokenizer: Tokenizer) -> str:
    """The grammar of an answer, behind the reasoning of a model with the template `source`; the same where it has
    none. `thought`: the mark that ends the reasoning which the prompt begins, if any."""
    before, rules = thoughts(source, thought, tokenizer)
    if not before:
        return grammar
    final = literal(NO_TEXT[0], tokenizer) if HARMONY in source else ""
    lark = "\n".join([f"start: {before} {final} answer", *rules])
    return f"{ANSWER}{json.dumps(lark)}\n{grammar}"


def thoughts(source: str, thought: str, tokenizer: Tokenizer) -> tuple[str, list[str]]:
    """The symbols before calls or an answer, and their rules: reasoning that the prompt begins, or that may come. None
    where a model with the template `source` does not reason. `thought`: of `behind_reasoning`."""
    begin = HARMONY_THOUGHT if HARMONY in source else next((each for each in THOUGHTS if each in source), "")
    if not thought and not begin:
        return "", []
    end, space = literal(thought or THOUGHTS[begin], tokenizer), f"/[ \\n]/{{0,{MAX_SPACE}}}"
    if begin == HARMONY_THOUGHT:
        space = literal("<|start|>assistant", tokenizer)
    free = ["free: /(.|\\n)*/", f"thought: free {end} {space}"]
    if end.startswith('"'):  # no token that text cannot have
        free = [f"free[suffix={end}]: /(.|\\n)*/", f"thought: free {space}"]
    return ("thought" if thought else f"({literal(begin, tokenizer)} thought)?"), free


def literal(text: str, tokenizer: Tokenizer) -> str:
    """A text in Lark, with control tokens by their ids."""
    return " ".join(_control(part, tokenizer) or as_json(part) for part in MARK.split(text) if part)


def _control(text: str, tokenizer: Tokenizer) -> str:
    tokens = tokenizer.encode(text, add_special=False, parse_special=True) if MARK.fullmatch(text) else []
    is_control = len(tokens) == 1 and tokenizer.attributes_of(tokens[0]) & ATTR_CONTROL
    return f"<[{tokens[0]}]>" if is_control else ""
