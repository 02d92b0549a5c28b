"""Convert a grammar, in GBNF or a JSON schema, for llguidance, and limit its resources. Knows no vocabulary."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipeinfer.models.text.gbnf import GbnfReader
from pipeinfer.models.text.json_schema import lark_of_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ANY_TOKENS = '%llguidance {"no_forcing": true}\n'
"""Forced text may be made of any tokens, as in llama.cpp. What begins so is in Lark already: no client's grammar is."""

MAX_SYMBOLS = 50_000
"""Symbols of all rules of a grammar."""

MAX_ITEMS = 700
"""Parses of the text so far, behind one token. Time grows with their square."""

ITEMS_A_STEP = 50_000, 3
"""The limit of Earley items in one step: a constant, and an amount for each token of the vocabulary."""


def lark_of(text: str, token_id: Callable[[str], int]) -> str:
    """`token_id`: the id of a token that the grammar names as `<name>`. Raises UserError for an invalid grammar."""
    if text.startswith(ANY_TOKENS):
        return text
    if text.startswith("{"):
        return ANY_TOKENS + lark_of_schema(text)
    reader = GbnfReader(text)
    return ANY_TOKENS + reader.lark({name: token_id(name) for name in reader.token_names})


def matcher(tokenizer: "LLTokenizer", lark: str) -> "LLMatcher":
    """A matcher at the beginning of a text, within the limits; it may be in error."""
    from llguidance import LLMatcher, LLParserLimits

    least, per_token = ITEMS_A_STEP
    limits = LLParserLimits(
        max_items_in_row=MAX_ITEMS, max_grammar_size=MAX_SYMBOLS, verbose_errors=False,
        step_max_items=least + per_token * tokenizer.vocab_size,
    )  # fmt: skip
    return LLMatcher(tokenizer, lark, log_level=0, limits=limits)


def open_tokens(pieces: list[bytes], end: int, n_vocab: int | None = None) -> "LLTokenizer":
    """A vocabulary of these tokens, padded with empty ones to `n_vocab`. `end`: the token that ends a text."""
    from llguidance import LLTokenizer

    tokens: Any = _Tokens(pieces, end)
    return LLTokenizer(tokens, n_vocab=n_vocab)


class _Tokens:
    """The interface that llguidance expects of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, pieces: list[bytes], end: int) -> None:
        self.tokens, self.eos_token_id = pieces, end

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a forced text, of which there are none."""
        return []
