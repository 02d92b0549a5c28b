"""Names of control tokens in messages, which are text: they are hidden while a template renders. Knows no template."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.models.text.answer_forms import MARKS
from pipeinfer.models.text.tokenizer import Span, Tokenizer

MIXED = (
    "a message has the name of a control token, and the chat template changes messages, so that the name is this token "
    "as in llama.cpp; --special-in-messages makes that the rule"
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered text. `literals`: where names of control tokens are text of a message, in order. `is_mixed`: messages
    have such names, and the template changes them, so that they are tokens like the template's own."""

    text: str
    literals: tuple[Span, ...] = ()
    is_mixed: bool = False

    def since(self, at: int) -> "Rendered":
        """What follows the first `at` characters."""
        return Rendered(self.text[at:], tuple((first - at, last - at) for first, last in self.literals if first >= at))

    def followed_by(self, other: "Rendered") -> "Rendered":
        n = len(self.text)
        return Rendered(
            self.text + other.text, (*self.literals, *((first + n, last + n) for first, last in other.literals)),
            self.is_mixed,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mask:
    """Replaces names of control tokens by signs that no client can know, and puts them back. `names`: matches those
    names. `skips_answers`: messages of the assistant stay as they are."""

    names: re.Pattern[str]
    skips_answers: bool = False
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def hide(self, value: Any) -> Any:
        """The same with the texts in it changed, those of an assistant's message but for the marks of its own."""
        if isinstance(value, str):
            return self.names.sub(self._sign, value)
        if isinstance(value, (list, tuple)):
            return [self.hide(each) for each in value]
        if not isinstance(value, Mapping):
            return value
        if value.get("role") == "assistant":
            return value if self.skips_answers else {key: self._hide_answer(each) for key, each in value.items()}
        return {self.hide(key): self.hide(each) for key, each in value.items()}

    def _hide_answer(self, value: Any) -> Any:
        if not isinstance(value, str):
            return self.hide(value)
        return self.names.sub(lambda match: match[0] if match[0] in MARKS else self._sign(match), value)

    def _sign(self, match: re.Match[str]) -> str:
        return f"\ufdd0{self.nonce}{match[0].encode().hex()}\ufdd1"

    def reveal(self, text: str) -> Rendered:
        """A text with the names in it again, and where they stand."""
        found, literals, n, at = list[str](), list[Span](), 0, 0
        for match in re.finditer(f"\ufdd0{self.nonce}([0-9a-f]+)\ufdd1", text):
            name = bytes.fromhex(match[1]).decode()
            found += [text[at : match.start()], name]
            n += match.start() - at
            literals.append((n, n + len(name)))
            n, at = n + len(name), match.end()
        return Rendered("".join(found) + text[at:], tuple(literals))


def masks_of(messages: Any, variables: Any, tokenizer: Tokenizer, parses: bool = False) -> list[Mask]:
    """Those to try, in order; none where no name of a control token stands in the messages, or where they `parses`."""
    names = tokenizer.control_names
    if parses or names is None or not (_has(messages, names) or _has(variables, names)):
        return []
    return [Mask(names), Mask(names, skips_answers=True)]


def answer_text(text: str, tokenizer: Tokenizer, parses: bool = False) -> Rendered:
    """What an assistant's message begins with, which the model continues."""
    if parses or tokenizer.control_names is None:
        return Rendered(text)
    mask = Mask(tokenizer.control_names)
    return mask.reveal(mask.hide({"role": "assistant", "content": text})["content"])


def _has(value: Any, names: re.Pattern[str]) -> bool:
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str) and names.search(part):
            return True
        if isinstance(part, Mapping):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple)):
            left += part
    return False
