"""Which tokens a grammar lets follow a text: llama.cpp's own engine, a state for each text that is asked about.

Knows a vocabulary; no stage and no request.
"""

from __future__ import annotations

import ctypes
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from types import ModuleType
from typing import Any

import numpy as np

from pipeinfer.core.interfaces import FloatArray
from pipeinfer.core.sampling import largest
from pipeinfer.errors import UserError
from pipeinfer.models.llama.ggml import last_errors
from pipeinfer.models.tokenizer import Tokenizer

MAX_BYTES = 256 << 10
"""Of a grammar's text."""

MAX_DEPTH = 200
"""Of brackets in each other: llama.cpp's parser calls itself for each, and ends the process when its stack is full."""

MAX_STATES = 128
"""Texts whose states are kept of a request, those that were asked about last: guesses have several at a time."""

N_TRIED = 256
"""Of the likeliest tokens, looked at first: most often those that are wanted are among them."""

CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
ROOT = b"root"
LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[()]', re.DOTALL)


class _State:
    """libllama's, behind some text. Freed with this object: threads may still ask when a request has ended."""

    def __init__(self, lib: ModuleType, sampler: Any) -> None:
        self._lib, self.sampler = lib, sampler

    def __del__(self) -> None:
        self._lib.llama_sampler_free(self.sampler)

    def after(self, token: int) -> _State:
        """Where it may follow: libllama ends the process for another."""
        found = _State(self._lib, self._lib.llama_sampler_clone(self.sampler))
        self._lib.llama_sampler_accept(found.sampler, token)
        return found

    def refuses(self, ids: Any) -> Any:
        """(n,) whether each of these tokens may not follow."""
        found = np.zeros(len(ids), CANDIDATE)
        found["id"] = ids
        array = self._lib.llama_token_data_array(
            data=ctypes.cast(found.ctypes.data, ctypes.POINTER(self._lib.llama_token_data)), size=len(ids),
            selected=-1, sorted=False,
        )  # fmt: skip
        self._lib.llama_sampler_apply(self.sampler, ctypes.byref(array))
        return np.isneginf(found["logit"])


class Grammar:
    """A Constraint: the outputs that it lets pass, and then the end of the text."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        """Raises UserError for what is no grammar."""
        self.tokenizer, self._lock = tokenizer, Lock()
        self.ends = np.array(tokenizer.ends, np.intp)
        self._root = _parse(tokenizer, text)
        self._states: OrderedDict[tuple[int, ...], _State | None] = OrderedDict()

    def after(self, output: Sequence[int]) -> Following:
        return Following(self, tuple(output))

    def has(self, output: tuple[int, ...], token: int) -> bool:
        with self._lock:
            return self._has(self._state(output), token)

    def restrict(self, output: tuple[int, ...], logits: FloatArray, n_wanted: int) -> None:
        with self._lock:
            state = self._state(output)
            allowed = np.empty(0, np.intp) if state is None else self._allowed(state, logits, n_wanted)
        if not len(allowed):
            allowed = self.ends[self.ends < len(logits)]
            logits[allowed] = np.maximum(logits[allowed], np.finfo(np.float32).min)  # a bias may have been -inf
        kept = logits[allowed]
        logits[:] = -np.inf
        logits[allowed] = kept

    def _has(self, state: _State | None, token: int) -> bool:
        if state is None or token >= self.tokenizer.n_vocab:
            return False
        return not bool(state.refuses([token])[0])

    def _allowed(self, state: _State, logits: FloatArray, n_wanted: int) -> Any:
        """Ids of the `n_wanted` likeliest tokens that may follow at least, or of all, where these are fewer."""
        n_vocab, n = min(len(logits), self.tokenizer.n_vocab), max(N_TRIED, 4 * n_wanted)
        while n_wanted and n < n_vocab:
            ids = largest(logits[:n_vocab], n)
            found = ids[~state.refuses(ids)]
            found = found[~np.isneginf(logits[found])]
            if len(found) >= n_wanted:
                return found
            n *= 16
        ids = np.flatnonzero(~np.isneginf(logits[:n_vocab]))
        return ids[~state.refuses(ids)]

    def _state(self, output: tuple[int, ...]) -> _State | None:
        """None behind a text that the grammar refuses, or that has ended."""
        n = len(output)
        while n and output[:n] not in self._states:
            n -= 1
        state = self._root if n == 0 else self._states[output[:n]]
        if n:
            self._states.move_to_end(output[:n])
        for end in range(n + 1, len(output) + 1):
            token = output[end - 1]
            state = state.after(token) if state and token not in self.ends and self._has(state, token) else None
            self._states[output[:end]] = state
            if len(self._states) > MAX_STATES:
                self._states.popitem(last=False)
        return state


class Following:
    """Allowed: what may follow one output."""

    def __init__(self, grammar: Grammar, output: tuple[int, ...]) -> None:
        self.grammar, self.output = grammar, output

    def has(self, token: int) -> bool:
        return self.grammar.has(self.output, token)

    def restrict(self, logits: FloatArray, n_wanted: int) -> None:
        self.grammar.restrict(self.output, logits, n_wanted)


class Grammars:
    """Grammars of one vocabulary, which is opened for the first of them."""

    def __init__(self, open_vocabulary: Callable[[], Tokenizer]) -> None:
        self._open_vocabulary = open_vocabulary
        self._tokenizer: Tokenizer | None = None

    def __call__(self, text: str) -> Grammar:
        self._tokenizer = self._tokenizer or self._open_vocabulary()
        return Grammar(self._tokenizer, text)


def _parse(tokenizer: Tokenizer, text: str) -> _State:
    if (n_bytes := len(text.encode())) > MAX_BYTES:
        raise UserError(f"a grammar of {n_bytes >> 10} KiB (as GBNF) is too long; {MAX_BYTES >> 10} KiB are possible")
    if "\0" in text:
        raise UserError("a grammar cannot have the character 0; in a range it is written \\x00")
    depth = deepest = 0
    for found in LITERAL.finditer(text):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise UserError(
            f"a grammar has {deepest} brackets in each other; {MAX_DEPTH} are possible: name parts as rules"
        )
    last_errors()
    sampler = tokenizer.library.llama_sampler_init_grammar(tokenizer.vocabulary, text.encode(), ROOT)
    if not sampler:
        raise UserError(f"this is no grammar in llama.cpp's form (GBNF): {last_errors()}")
    return _State(tokenizer.library, sampler)
