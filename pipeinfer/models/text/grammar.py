"""The tokens that a grammar allows after a text, by llguidance. Knows a vocabulary; no stage and no request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from pipeinfer.core.scheduling.prefixes import common
from pipeinfer.core.types import ConstraintFailed, FloatArray
from pipeinfer.errors import UserError
from pipeinfer.models.text.grammar_check import token_id
from pipeinfer.models.text.grammar_text import lark_of, matcher, open_tokens
from pipeinfer.models.text.tokenizer import ATTR_CONTROL, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

N_THREADS = 4
"""Threads that make matchers: a large grammar does not delay others."""

N_KEPT = 8
"""Cached matchers at the beginning of a text: the texts of one request share one."""

CONTROL = b"\xff"
"""The prefix of tokens that are not text, for llguidance."""


class Grammar:
    """A Constraint: an output of the grammar, then the end of the text.

    `making`: the matcher at the beginning of a text. Another thread makes it, because large grammars take time.
    """

    def __init__(self, tokenizer: Tokenizer, making: Future[LLMatcher]) -> None:
        self.tokenizer, self._making, self._lock = tokenizer, making, Lock()
        self.ends = np.array(tokenizer.ends, np.intp)
        self._at: LLMatcher | None = None
        self._path: tuple[int, ...] = ()  # the text that it is behind

    def after(self, output: Sequence[int]) -> Following:
        return Following(self, tuple(output))

    def has(self, output: tuple[int, ...], token: int) -> bool:
        """Raises ConstraintFailed."""
        if token in self.ends:
            return bool(self._ask(output, lambda at: at.is_accepting()))
        return token < self.tokenizer.n_vocab and self._ask(output, lambda at: at.validate_tokens([token])) == 1

    def restrict(self, output: tuple[int, ...], logits: FloatArray) -> None:
        """Raises ConstraintFailed."""
        n = min(len(logits), self.tokenizer.n_vocab)
        ends, mask = self.ends[self.ends < n], self._ask(output, self._mask)
        allowed = np.zeros(len(logits), bool)
        if mask is not None:
            allowed[:n] = mask[:n] & ~np.isneginf(logits[:n])
        if not allowed.any():
            allowed[ends] = True
            logits[ends] = np.maximum(logits[ends], np.finfo(np.float32).min)  # a bias may be -inf
        logits[~allowed] = -np.inf

    def _mask(self, at: LLMatcher) -> npt.NDArray[np.bool_]:
        """(n_vocab,) bool: whether each token may follow."""
        bits = np.frombuffer(at.compute_bitmask(), np.uint8)
        found = np.unpackbits(bits, count=self.tokenizer.n_vocab, bitorder="little").astype(bool)
        found[self.ends] = at.is_accepting()
        return found

    def _ask(self, output: tuple[int, ...], question: Callable[[LLMatcher], T]) -> T | None:
        """The matcher's answer after an output; None if the grammar refuses the output, or it has ended.

        Raises ConstraintFailed if that also fails with a fresh matcher: guesses asked before change no answer.
        """
        with self._lock:
            for _ in range(2):
                try:
                    at = self._at = self._at or self._making.result().deep_copy()
                except (UserError, RecursionError):
                    raise ConstraintFailed from None
                answer = question(at) if self._move(at, output) else None
                if not at.is_error():
                    return answer
                self._at, self._path = None, ()
        raise ConstraintFailed

    def _move(self, at: LLMatcher, output: tuple[int, ...]) -> bool:
        """Move to the end of an output, or as far as the grammar allows; whether that is all of it."""
        n = common(self._path, output)
        at.rollback(len(self._path) - n)
        n_text = next((index for index, token in enumerate(output[n:], n) if token in self.ends), len(output))
        n += at.try_consume_tokens(list(output[n:n_text])) if n_text > n else 0
        self._path = output[:n]
        return n == len(output)


class Following:
    """Allowed: the tokens that may follow one output."""

    def __init__(self, grammar: Grammar, output: tuple[int, ...]) -> None:
        self.grammar, self.output = grammar, output

    def has(self, token: int) -> bool:
        return self.grammar.has(self.output, token)

    def restrict(self, logits: FloatArray) -> None:
        self.grammar.restrict(self.output, logits)


class Grammars:
    """Grammars of one vocabulary, which is opened for the first of them, or by `open_ahead`."""

    def __init__(self, open_vocabulary: Callable[[], Tokenizer]) -> None:
        self._open_vocabulary = open_vocabulary
        self._threads = ThreadPoolExecutor(N_THREADS, "grammar")
        self._making = lru_cache(maxsize=N_KEPT)(lambda text: self._threads.submit(self._make, text))

    def open_ahead(self) -> None:
        """Open the vocabulary now, in a thread. Everybody waits for that once: half a second for 150 000 tokens."""
        self._threads.submit(lambda: self._tokens)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._open_vocabulary()

    @cached_property
    def _tokens(self) -> LLTokenizer:
        tokenizer = self._tokenizer
        return open_tokens([piece_of(tokenizer, token) for token in range(tokenizer.n_vocab)], tokenizer.ends[0])

    def __call__(self, text: str) -> Grammar:
        """`text`: accepted by `check_grammar`."""
        return Grammar(self._tokenizer, self._making(text))

    def _make(self, text: str) -> LLMatcher:
        return matcher(self._tokens, lark_of(text, partial(token_id, self._tokenizer)))


def piece_of(tokenizer: Tokenizer, token: int) -> bytes:
    """A token's bytes."""
    if tokenizer.attributes_of(token) & ATTR_CONTROL:
        return CONTROL + tokenizer.decode_piece(token, special=True)
    return tokenizer.decode_piece(token, special=True)
