"""Read a model's answer: reasoning, content and tool calls, in any form that models write. Knows no
tokens and no HTTP. All forms are read at once: a model that is prompted in one often answers in another, and their
marks do not collide."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from pipeinfer.models.text.answer_forms import (
    BARE,
    CALL_BEGINS,
    CHANNEL,
    CHANNEL_END,
    CLOSERS,
    FORMS,
    LEAST_MARK,
    MEMBER,
    MEMBER_BEGINS,
    THOUGHTS,
    TURN_MARKS,
    CallForm,
    may_be_bare,
    may_start,
    start_of,
)
from pipeinfer.models.text.arguments import PairMarks, argument_value, as_json, kinds_of, read_value
from pipeinfer.models.text.stops import n_partial

Kind = Literal["content", "reasoning", "call", "arguments"]


class AnswerPart(NamedTuple):
    """A piece of an answer. `text`: of a call the function's name, of arguments a piece of the last call's JSON."""

    kind: Kind
    text: str


QUOTE = re.compile(r'\\.|"', re.DOTALL)  # of JSON, or what is escaped
Step = list[AnswerPart] | None  # the parts of a step, maybe none; None if it needs more text


def opened_thought(prompt: str) -> str:
    """The mark that ends the reasoning which a prompt begins; empty if it begins none."""
    return next((end for begin, end in THOUGHTS.items() if prompt.rstrip().endswith(begin)), "")


def closes_thought(prompt: str) -> bool:
    """Whether a prompt ends with the end of reasoning, behind which the content begins."""
    return prompt.rstrip().endswith(tuple(THOUGHTS.values()))


def unclosed_thought(answer: str) -> str:
    """The mark that ends the reasoning which the beginning of an answer leaves open; empty if it leaves none."""
    return next((end for begin, end in THOUGHTS.items() if answer.rfind(begin) > answer.rfind(end)), "")


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


def _is_closed(text: str, close: str) -> bool:
    """Whether a mark, which may be empty, ends the JSON that a text begins with, whose strings may have marks too."""
    at, is_quoted = text.find(close) if close else -1, False
    for match in QUOTE.finditer(text) if at >= 0 else ():
        while 0 <= at < match.end():
            if not is_quoted:
                return True
            at = text.find(close, at + 1)
        is_quoted ^= match[0] == '"'
    return at >= 0 and not is_quoted


class AnswerReader:
    """Reads an answer piece by piece; the parts do not depend on where it is cut.

    `tools`: of each function the schema of its arguments; None: a call is text like any other. `must_call`: the answer
    is a call, however little of it has come. `thought`: the mark that ends the reasoning at its beginning, see
    `opened_thought`; None: reasoning is content."""

    def __init__(
        self, tools: Mapping[str, Any] | None = None, thought: str | None = "", must_call: bool = False
    ) -> None:
        self._least_mark, self._is_partial = 1 if must_call else LEAST_MARK, False
        self.tools, self.n_calls = tools, 0
        self._marks = tuple(dict.fromkeys(form.mark for form in FORMS)) if tools is not None else ()
        self._splits, self._in_channel = thought is not None, False
        self._thought = thought or ""
        self._state: Callable[[], Step] = self._thinking if thought else self._starting
        self._rest, self._is_blank, self._has_ended, self._is_cut = "", bool(thought), False, False
        self._n_pushed = self._n_reasoning = 0
        self._depth, self._is_quoted, self._is_escaped = 0, False, False  # within arguments, or behind them
        self._behind: Callable[[], Step] = self._after_call  # the state behind arguments

    @property
    def is_in_call(self) -> bool:
        """Whether the arguments of the last call are incomplete."""
        return self._is_partial or self._state == self._arguing

    @property
    def n_reasoning(self) -> int:
        """Characters of the answer up to the end of its reasoning."""
        return self._n_pushed if self._state == self._thinking else self._n_reasoning

    def push(self, text: str) -> list[AnswerPart]:
        self._rest += text
        self._n_pushed += len(text)
        parts = list[AnswerPart]()
        while self._rest and (step := self._state()) is not None:
            parts += [part for part in step if part.text]
        return parts

    def finish(self, is_cut: bool = False) -> list[AnswerPart]:
        """The parts held back, at the answer's end. `is_cut`: it ended before its time, so that the beginning of a call
        is no text; of arguments in pairs the complete ones are returned, without the closing bracket."""
        self._has_ended, self._is_cut = True, is_cut
        return self.push("")

    def _take(self, n: int) -> str:
        text, self._rest = self._rest[:n], self._rest[n:]
        return text

    # -- reasoning and content

    def _starting(self) -> Step:
        """Before the content. `_is_blank`: white space before it is dropped."""
        text = self._rest.lstrip()
        mark, thought = start_of(text) if self._splits else ("", "")
        if mark:
            self._rest, self._is_blank = text[len(mark) :], True
            if CHANNEL.fullmatch(mark):
                self._in_channel, self._marks = True, self._marks or (CHANNEL_END,)
            if thought:
                self._thought, self._state = thought, self._thinking
            return []
        if self.tools is not None and (bare := self._bare(text)) is not False:
            return bare
        if not text or (self._splits and may_start(text)):
            if not self._has_ended:
                return None
            if self._is_cut and self._marks and len(text) >= self._least_mark:
                return self._drop_rest()
        self._rest = text if self._is_blank else self._rest
        self._state = self._content
        return []

    def _thinking(self) -> Step:
        if self._is_blank:
            self._rest = self._rest.lstrip()
        at = self._rest.find(self._thought)
        if at >= 0:
            text = self._take(at).rstrip()
            self._take(len(self._thought))
            self._n_reasoning = self._n_pushed - len(self._rest)
            self._state, self._is_blank = self._starting, True
            return [AnswerPart("reasoning", text)]
        return self._take_certain("reasoning", [self._thought])

    def _content(self) -> Step:
        match = _any_of(self._marks).search(self._rest) if self._marks else None
        if not match:
            return self._take_certain("content", self._marks)
        at = match.start()
        if self._rest[:at].strip():
            return [AnswerPart("content", self._take(len(self._rest[:at].rstrip())))]
        if (channel := self._next_channel(at)) is not False:
            return channel
        is_channel = not self._splits and CHANNEL.match(self._rest[at:].removeprefix(CHANNEL_END))
        if self.tools is not None and not is_channel and (call := self._call(at)) is not False:
            return call
        mark = next(mark for mark in self._marks if self._rest.startswith(mark, at))
        return [AnswerPart("content", self._take(at + len(mark)))]  # a mark without a call is text

    def _next_channel(self, at: int) -> Step | Literal[False]:
        """Behind the end of a channel's message at `at`; False if neither another one nor the answer's end follows."""
        if not self._splits or not self._rest.startswith(CHANNEL_END, at):
            return False
        behind = self._rest[at + len(CHANNEL_END) :].lstrip()
        if CHANNEL.match(behind):
            self._rest, self._state = behind, self._starting
            return []
        if not may_start(behind) or (self._has_ended and not self._in_channel):
            return False
        return self._drop_rest() if self._has_ended else None

    def _take_certain(self, kind: Kind, marks: Sequence[str]) -> Step:
        """The text that no mark can begin in, without white space before one."""
        n, n_mark = len(self._rest), n_partial(self._rest, marks) if marks else 0
        if self._is_cut and self._marks and n_mark >= self._least_mark:
            self._rest = self._rest[: n - n_mark]
            n = len(self._rest)
        if marks and not self._has_ended:
            n = len(self._rest[: n - n_mark].rstrip())
        if not n:
            return None
        self._is_blank = False
        return [AnswerPart(kind, self._take(n))]

    # -- calls

    def _call(self, at: int) -> Step | Literal[False]:
        """The parts of a call whose mark is at `at`; False if it is none."""
        text = self._rest[at:]
        forms = [form for form in FORMS if text.startswith(form.mark)]
        for form in forms:
            match = form.head.match(text)
            end = text.find(form.close, match.end()) if match and form.pairs else -1
            if match and form.pairs and end >= 0:
                arguments = self._arguments_of(form.pairs, match["name"], text[match.end() : end])
                self._take(at + end + len(form.close))
                return self._end_calls([AnswerPart("call", match["name"]), AnswerPart("arguments", arguments)])
            if match and not form.pairs:
                return self._begin(match, at)
            if match and not self._has_ended:
                return None
        is_closed = _is_closed(text, forms[0].close)
        if not self._has_ended and not is_closed:
            return None
        if self._is_cut and not is_closed and (cut := self._cut_call(text, forms)) is not None:
            return cut
        return self._whole(at + len(forms[0].mark))

    def _cut_call(self, text: str, forms: Sequence[CallForm]) -> Step:
        """The parts of a call that was cut before its arguments, or within those in pairs; None if it is none."""
        for form in forms:
            if form.pairs and (match := form.head.match(text)):
                arguments = self._arguments_of(form.pairs, match["name"], text[match.end() :]).removesuffix("}")
                self._rest, self._is_partial = "", True
                return self._end_calls([AnswerPart("call", match["name"]), AnswerPart("arguments", arguments)])
        mark = forms[0].mark
        is_call = mark in TURN_MARKS or CALL_BEGINS.fullmatch(text[len(mark) :])
        return self._drop_rest() if is_call else None

    def _drop_rest(self) -> Step:
        """Drop the beginning of a call, which is no text."""
        self._rest = ""
        return []

    def _begin(self, match: re.Match[str], before: int) -> Step:
        """`before`: characters before the match."""
        self._take(before + match.end())
        self.n_calls += 1
        self._behind = self._after_arguments if "object" in match.groupdict() else self._after_call
        self._state = self._arguing
        return [AnswerPart("call", match["name"])]

    def _end_calls(self, parts: list[AnswerPart]) -> Step:
        self.n_calls += len(parts) // 2
        self._state = self._after_call
        return parts

    def _whole(self, start: int) -> Step | Literal[False]:
        """The parts of calls in JSON whose fields have another order, or whose arguments are a text; False if none."""
        start += len(self._rest[start:]) - len(self._rest[start:].lstrip())
        try:
            value, end = read_value(self._rest, start)
        except ValueError:
            return False
        parts = list[AnswerPart]()
        for each in value if isinstance(value, list) else [value]:
            call = each.get("function", each) if isinstance(each, dict) else None
            if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
                return False
            arguments = call.get("arguments", call.get("parameters")) or {}
            text = arguments if isinstance(arguments, str) else as_json(arguments)
            parts += [AnswerPart("call", call["name"]), AnswerPart("arguments", text)]
        if parts:
            self._take(end)
        return self._end_calls(parts) if parts else False

    def _bare(self, text: str) -> Step | Literal[False]:
        """The parts of a call without a mark, behind white space; False if it is none."""
        if (match := BARE.match(text)) and match["name"] in (self.tools or ()):
            return self._begin(match, len(self._rest) - len(text))
        if not may_be_bare(text, self.tools or ()):
            return False
        if self._is_cut:
            return self._whole(self._rest.find("{")) or self._drop_rest()
        return self._whole(self._rest.find("{")) if self._has_ended else None

    def _arguing(self) -> Step:
        """Within the arguments of a call, a JSON object."""
        if end := self._object_end():
            self._state = self._behind
        return [AnswerPart("arguments", self._take(end or len(self._rest)))]

    def _object_end(self) -> int:
        """The characters up to the end of the JSON object that the rest is within; 0: it has not ended."""
        for at, character in enumerate(self._rest):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_quoted:
                self._is_escaped, self._is_quoted = character == "\\", character != '"'
            elif character == '"':
                self._is_quoted = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if not self._depth:
                    return at + 1
        return 0

    def _after_arguments(self) -> Step:
        """Behind the arguments of a call that is an object: its end, or further members, such as an id."""
        text = self._rest.lstrip()
        if MEMBER.match(text):
            self._depth, self._state = 1, self._skipping
            return []
        if MEMBER_BEGINS.fullmatch(text):
            if not self._has_ended:
                return None
            if self._is_cut:
                return self._drop_rest()
        self._state = self._after_call
        return []

    def _skipping(self) -> Step:
        """Within further members of a call, which are no text."""
        if end := self._object_end():
            self._state = self._after_call
        self._take(end or len(self._rest))
        return []

    def _after_call(self) -> Step:
        """Behind a call: its closing mark, or the next call."""
        text = self._rest.lstrip()
        if closer := next((each for each in CLOSERS if text.startswith(each)), ""):
            self._rest = text[len(closer) :]
            return []
        if (bare := self._bare(text)) is not False:
            return bare
        if not text or any(each.startswith(text) for each in CLOSERS):
            if not self._has_ended:
                return None
            if self._is_cut:
                return self._drop_rest()
        self._rest, self._state = text, self._content
        return []

    def _arguments_of(self, pairs: PairMarks, name: str, text: str) -> str:
        """Arguments as JSON."""
        tool = (self.tools or {}).get(name)
        properties = tool.get("properties") if isinstance(tool, dict) else None
        arguments: dict[str, Any] = {}
        for key, value in pairs.read(text):
            schema = properties.get(key) if isinstance(properties, dict) else None
            arguments[key] = argument_value(value, kinds_of(schema, tool))
        return as_json(arguments)
