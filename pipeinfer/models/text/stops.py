"""Texts that end an answer, found piece by piece. Knows no tokens."""

from collections.abc import Sequence

from pipeinfer.errors import UserError
from pipeinfer.models.text.answer_forms import may_start, start_of

MAX_STOPS, MAX_CHARACTERS = 32, 256  # of a request's stop strings: every piece of a text is compared with all


def check_stops(name: str, stops: Sequence[str]) -> None:
    """`name`: the option or field. Raises UserError for too many, too long and empty ones."""
    if len(stops) > MAX_STOPS:
        raise UserError(f"{name} has {len(stops)} texts, and at most {MAX_STOPS} are possible; give fewer")
    for stop in stops:
        if not stop:
            raise UserError(f"{name} has an empty text, which would end every text where it begins; give some text")
        if len(stop) > MAX_CHARACTERS:
            long = f"a text of {len(stop)} characters, and at most {MAX_CHARACTERS} are possible"
            raise UserError(f"{name} has {long}; give the first {MAX_CHARACTERS}")


class StopStrings:
    """Filters a text piece by piece; holds back an end that may begin a stop string. `hit`: a stop string, `stop`, has
    occurred. It and all after it are dropped. `thought`: as of `AnswerReader`; no stop string occurs in reasoning, nor
    in the white space and the marks behind it. None: reasoning is text."""

    def __init__(self, stops: Sequence[str], thought: str | None = None) -> None:
        assert all(stops), "an empty stop string ends every text"
        self.stops = tuple(stops)
        self.hit, self.stop = False, ""
        self._held = ""
        self._thought, self._is_blank = thought, bool(thought)  # None: behind all reasoning

    def push(self, text: str) -> str:
        if self.hit or not self.stops:
            return "" if self.hit else text
        self._held += text
        before = self._before_content()
        if self._thought is not None:
            return before
        hits = [(at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        self.hit = bool(hits)
        if hits:
            at, self.stop = min(hits, key=lambda each: each[0])
            return before + self._release(at)
        return before + self._release(len(self._held) - n_partial(self._held, self.stops))

    def flush(self) -> str:
        """The text held back, at the end of the text."""
        is_content, self._thought = not self._thought, None
        text = self.push("") if is_content else ""
        return text + ("" if self.hit else self._release(len(self._held)))

    def _before_content(self) -> str:
        """Release reasoning, and white space and marks behind it."""
        before = ""
        while self._thought is not None:
            if self._thought:
                at = self._held.find(self._thought)
                if at < 0:
                    return before + self._release(len(self._held) - n_partial(self._held, (self._thought,)))
                before += self._release(at + len(self._thought))
                self._thought, self._is_blank = "", True
            text = self._held.lstrip()
            if self._is_blank:
                before += self._release(len(self._held) - len(text))
            mark, thought = start_of(text)
            if mark:
                before += self._release(self._held.index(mark) + len(mark))
                self._thought, self._is_blank = thought, True
            elif may_start(text):
                return before
            else:
                self._thought = None
        return before

    def _release(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        return text


def n_partial(text: str, marks: Sequence[str]) -> int:
    """The number of characters at a text's end that may begin one of the marks."""
    longest = min(len(text), max(map(len, marks)) - 1)
    ends = (text[-n:] for n in range(longest, 0, -1))
    return next((len(end) for end in ends if any(mark.startswith(end) for mark in marks)), 0)
