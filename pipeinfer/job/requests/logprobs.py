"""Log-probabilities of a text's tokens: which are told with the text so far, and how OpenAI's two APIs have them.

Knows no engine and no HTTP.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from pipeinfer.cluster.messages.logprobs import Likely, ScoredToken
from pipeinfer.models.text.tokenizer import Tokenizer

Spell = Callable[[int], bytes]
"""A token's bytes, control tokens spelled too."""


class Entry(NamedTuple):
    """A token of a text. `offset`: characters of the text before it, or before the character that it is a part of."""

    token: int
    logprob: float
    top: Sequence[Likely]
    offset: int


class Entries:
    """Entries wait until the text in which their tokens stand is certain: what a stop string cuts off has none, and
    neither has the token of `ends` that ends the text."""

    def __init__(self, ends: Collection[int]) -> None:
        self._ends = ends
        self._waiting = deque[Entry]()

    def add(self, token: int, offset: int) -> None:
        if isinstance(token, ScoredToken) and token not in self._ends:
            self._waiting.append(Entry(int(token), token.logprob, token.top, offset))

    def take(self, n_characters: int) -> list[Entry]:
        """Those that begin within so many characters, the text that is certain."""
        found = []
        while self._waiting and self._waiting[0].offset < n_characters:
            found.append(self._waiting.popleft())
        return found

    def rest(self) -> list[Entry]:
        """All others: the text has come to its end, uncut."""
        found = list(self._waiting)
        self._waiting.clear()
        return found


def speller(tokenizer: Tokenizer) -> Spell:
    return cache(partial(tokenizer.decode_piece, special=True))


def completion_form(entries: Sequence[Entry], spell: Spell) -> dict[str, Any]:
    """As /v1/completions has it. The chosen token is among the likeliest even if it is none of them; of two that are
    spelled alike the likelier one is there."""
    return {
        "tokens": [_text(spell(entry.token)) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_by_text(entry, spell) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _by_text(entry: Entry, spell: Spell) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        found.setdefault(_text(spell(token)), logprob)
    return found


def chat_form(entries: Sequence[Entry], spell: Spell) -> dict[str, Any]:
    """As /v1/chat/completions has it."""
    content = [
        {**spelled(entry.token, entry.logprob, spell), "top_logprobs": [spelled(*each, spell) for each in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def spelled(token: int, logprob: float, spell: Spell) -> dict[str, Any]:
    """A token, its bytes and its log-probability."""
    data = spell(token)
    return {"token": _text(data), "logprob": logprob, "bytes": list(data)}


def _text(data: bytes) -> str:
    """Of a token that is a part of a character its bytes, as OpenAI writes them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
