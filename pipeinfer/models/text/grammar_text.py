"""A grammar's text, in GBNF or a JSON schema, as llguidance reads it; what it may take. Knows no vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipeinfer.models.text.gbnf import GbnfReader
from pipeinfer.models.text.json_schema import lark_of_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ANY_TOKENS = '%llguidance {"no_forcing": true}\n'
"""A text that can be written in one way only may still be made of any tokens, as in llama.cpp."""

MAX_SYMBOLS = 50_000
"""Of a grammar's rules together."""

MAX_ITEMS = 2000
"""Ways to read the text so far, behind one token. What they take grows with their square."""

ITEMS_A_STEP = 50_000, 3
"""Items of Earley's parser in one step at most: so many, and so many more for each token of the vocabulary."""


def lark_of(text: str, token_id: Callable[[str], int]) -> str:
    """`token_id`: of a token that the grammar names, as `<name>`. Raises UserError for what is no grammar."""
    if text.startswith("{"):
        return ANY_TOKENS + lark_of_schema(text)
    reader = GbnfReader(text)
    return ANY_TOKENS + reader.lark({name: token_id(name) for name in reader.token_names})


def matcher(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """At the beginning of a text, within the limits; it may be in error."""
    from llguidance import LLMatcher, LLParserLimits

    least, per_token = ITEMS_A_STEP
    limits = LLParserLimits(
        max_items_in_row=MAX_ITEMS, max_grammar_size=MAX_SYMBOLS, verbose_errors=False,
        step_max_items=least + per_token * tokenizer.vocab_size,
    )  # fmt: skip
    return LLMatcher(tokenizer, lark, log_level=0, limits=limits)


def open_tokens(pieces: list[bytes], end: int, n_vocab: int | None = None) -> LLTokenizer:
    """A vocabulary of these tokens, and empty ones up to `n_vocab`. `end`: one that ends a text."""
    from llguidance import LLTokenizer

    tokens: Any = _Tokens(pieces, end)
    return LLTokenizer(tokens, n_vocab=n_vocab)


class _Tokens:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, pieces: list[bytes], end: int) -> None:
        self.tokens, self.eos_token_id = pieces, end

    def __call__(self, text: bytes) -> list[int]:
        """Its tokens, for texts that are forced, which none is."""
        return []
