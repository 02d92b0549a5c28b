"""Stop strings: texts that end a generated text where they occur. Knows no tokens."""

from collections.abc import Sequence

from pipeinfer.errors import UserError

MAX_STOPS, MAX_CHARACTERS = 32, 256
"""Limits of a request's stop strings: every piece of a text is compared with all of them."""


def check_stops(name: str, stops: Sequence[str]) -> None:
    """`name`: of the option or field. Raises UserError for too many, too long and empty ones."""
    if len(stops) > MAX_STOPS:
        raise UserError(f"{name} has {len(stops)} texts, and at most {MAX_STOPS} are possible; give fewer")
    for stop in stops:
        if not stop:
            raise UserError(f"{name} has an empty text, which would end every text where it begins; give some text")
        if len(stop) > MAX_CHARACTERS:
            raise UserError(
                f"{name} has a text of {len(stop)} characters, and at most {MAX_CHARACTERS} are possible; "
                f"give the first {MAX_CHARACTERS}"
            )


class StopStrings:
    """Filters a text piece by piece; holds back what may be the beginning of a stop string.

    `hit`: a stop string has occurred, `found`. It and all after it are dropped.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string ends every text"
        self.stops = tuple(stops)
        self.hit, self.found = False, ""
        self._held = ""

    def push(self, text: str) -> str:
        if self.hit or not self.stops:
            return "" if self.hit else text
        self._held += text
        found = [(at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        self.hit = bool(found)
        if found:
            at, self.found = min(found, key=lambda each: each[0])
            return self._let_go(at)
        return self._let_go(len(self._held) - n_begun(self._held, self.stops))

    def flush(self) -> str:
        """The text held back, at the end of the text."""
        return "" if self.hit else self._let_go(len(self._held))

    def _let_go(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        return text


def n_begun(text: str, marks: Sequence[str]) -> int:
    """The number of characters at a text's end that may begin one of the marks."""
    longest = min(len(text), max(map(len, marks)) - 1)
    ends = (text[-n:] for n in range(longest, 0, -1))
    return next((len(end) for end in ends if any(mark.startswith(end) for mark in marks)), 0)
