"""Marks and forms in which models write reasoning and calls, and which mark a text begins with."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product

from pipeinfer.models.text.arguments import PairMarks


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a call is written. `head`: up to its arguments, with the function's `name`; takes time by a text's length
    alone. `close`: the end of calls without a head. `pairs`: of arguments that are no JSON, one by one, up to `close`.
    """

    mark: str
    head: re.Pattern[str]
    close: str = ""
    pairs: PairMarks | None = None


def _form(mark: str, head: str, close: str = "", pairs: PairMarks | None = None) -> CallForm:
    return CallForm(mark, re.compile(head, re.DOTALL), close, pairs)


NAMED = (
    r'(?P<object>\{)\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"id"\s*:\s*"[^"]{0,64}"\s*,\s*)?"(?:name|function)"\s*:\s*'
    r'"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
BARE = re.compile(rf"(?:```(?:json)?\s*(?:\[\s*)?|\[\s*|\s*){NAMED}")
MEMBER = re.compile(r',\s*"[^"\\]{1,64}"\s*:')  # behind the arguments of such an object
MEMBER_BEGINS = re.compile(r'(?:,\s*(?:"[^"\\]{0,64}(?:"\s*)?)?)?')
FENCES, KINDS, IDS = ("", "```", "```json"), ("", '"type":"function",'), ("", '"id":"",')
BARE_BEGINNINGS = tuple(map("".join, product(FENCES, ("{", "[{"), KINDS, IDS, ('"name":"', '"function":"'))))
"""Beginnings of calls without a mark, without white space and without the id, see `BARE_ID`. Such a call is one only at
the beginning of an answer, and only of a function of the request."""
BARE_ID = re.compile(r'(?<="id":")[^"]{1,64}')


def may_be_bare(text: str, names: Collection[str]) -> bool:
    """Whether a text may become a call without a mark, of a function with one of the names."""
    squeezed = BARE_ID.sub("", "".join(text[:256].split()), 1)
    for begins in BARE_BEGINNINGS if squeezed else ():
        if begins.startswith(squeezed):
            return True
        if squeezed.startswith(begins):
            name, quote, _ = squeezed[len(begins) :].partition('"')
            return any(each == name if quote else each.startswith(name) for each in names)
    return False


DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
TURN_MARKS = ("<|channel|>", "<|start|>", "<|end|>")
CHANNEL_END = "<|end|>"
TURN = r"(?:<\|start\|>assistant)?"
TO = r" to=(?:functions\.)?(?P<name>[\w.-]+)"
TYPE = r"(?:\s*<\|constrain\|>[^\s<=]*|\s+[^\s<=]+)?\s*<\|message\|>"
CHANNEL = re.compile(rf"{TURN}<\|channel\|>(?P<name>analysis|commentary|final){TYPE}")  # no call
CHANNEL_BEGINS = re.compile(rf"{TURN}<\|channel\|>\w*(?:\s*<(?!\|m)[^<>]*(?:>[^\s<=]*)?|\s+[^\s<=]+)?\s*(?:<[^<>]*)?")
HARMONY = (
    rf"(?:<\|end\|>)?{TURN}{TO}<\|channel\|>(?:commentary|analysis)(?: to=[\w.-]+)?{TYPE}(?=\{{)",
    rf"(?:<\|end\|>)?{TURN}<\|channel\|>(?:commentary|analysis){TO}{TYPE}(?=\{{)",
)
PARAMETERS = PairMarks("<parameter=", ">", "", "</parameter>")
GLM = r"<tool_call>\n?(?P<name>[\w.-]+)\s*(?=<arg_key>|</tool_call>)"
DEEPSEEK_CALL = (
    rf"(?:{DEEPSEEK[0]})?\s*{DEEPSEEK[1]}(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]+)"
    r"(?:<｜tool▁sep｜>|\n```json\n)\s*(?=\{)"
)
FORMS = (
    _form("<tool_call>", rf"<tool_call>\s*{NAMED}", "</tool_call>"),  # Hermes, Qwen
    _form("<tool_call>", r"<tool_call>\s*<function=(?P<name>[^>\s]{1,256})>", "</function>", PARAMETERS),  # Qwen3-Coder
    _form("<tool_call>", GLM, "</tool_call>", PairMarks("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    _form("<function=", r"<function=(?P<name>[^>\s]{1,256})>\s*(?=\{)"),  # Llama
    _form("<|python_tag|>", rf"<\|python_tag\|>\s*{NAMED}"),
    _form("[TOOL_CALLS]", rf"\[TOOL_CALLS\]\s*(?:\[\s*)?{NAMED}"),  # Mistral
    _form("[TOOL_CALLS]", r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\][^\[{\s]*)?\s*(?:\[ARGS\]\s*)?(?=\{)"),
    *(_form(mark, DEEPSEEK_CALL) for mark in DEEPSEEK),
    *(_form(mark, head) for mark in TURN_MARKS for head in HARMONY),  # gpt-oss
)

CLOSERS = (
    *"</tool_call> </function> } ] , ; ```".split(),
    *"<｜tool▁call▁end｜> <｜tool▁calls▁end｜> <|call|> <|eom_id|> <|eot_id|>".split(),
)
"""Marks that may follow a call's arguments, before the next call."""

ASSISTANT = "<|start|>assistant"
THOUGHTS: Mapping[str, str] = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|end|>",
    f"{ASSISTANT}<|channel|>analysis<|message|>": "<|end|>",
}
"""The marks before reasoning -> the mark behind it."""

NO_TEXT = (
    *(f"{start}<|channel|>{channel}<|message|>" for start in ("", ASSISTANT) for channel in ("final", "commentary")),
    "<|START_RESPONSE|>",
)
"""Marks before a text that are no part of it."""


def start_of(text: str) -> tuple[str, str]:
    """(the mark before reasoning or content that a text begins with, the mark that ends the reasoning); empty: none."""
    if channel := CHANNEL.match(text):
        return channel[0], CHANNEL_END if channel["name"] == "analysis" else ""
    mark = next((each for each in (*THOUGHTS, *NO_TEXT) if text.startswith(each)), "")
    return mark, THOUGHTS.get(mark, "")


def may_start(text: str) -> bool:
    """Whether a text is the beginning of such a mark."""
    is_literal = any(each.startswith(text) for each in (*THOUGHTS, *NO_TEXT))
    return is_literal or CHANNEL_BEGINS.fullmatch(text) is not None


MARK = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])")  # a text that may be a control token
MARKS = frozenset(
    mark
    for text in (*THOUGHTS, *THOUGHTS.values(), *NO_TEXT, *CLOSERS, *(form.mark for form in FORMS))
    for mark in MARK.findall(text)
) - {"<|end|>", "<|start|>", "<|eot_id|>", "<|eom_id|>"}
"""Control tokens that are part of answers, and end no turn."""

CALL_BEGINS = re.compile(r"\s*(?:[\[{<].*|[\w.-]*>?\s*(?:[\[{<].*)?)", re.DOTALL)
"""The beginning of a call behind its mark."""

LEAST_MARK = 2  # the least number of characters of a mark, at the end of an answer that was cut, that are no text
