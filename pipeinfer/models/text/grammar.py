"""Grammars: checked, in a process with limited time and memory, and the tokens that one allows after a text, by
llguidance. Knows a vocabulary; no stage and no request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from pipeinfer.child import LimitedProcess, ProcessLimits
from pipeinfer.core.blocks import common
from pipeinfer.core.types import ConstraintFailed, FloatArray
from pipeinfer.errors import UserError
from pipeinfer.models.text.grammar_text import lark_of, matcher, open_tokens
from pipeinfer.models.text.tokenizer import ATTR_CONTROL, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

MAX_BYTES = 128 << 10  # the largest text of a grammar or schema
PROCESS = LimitedProcess("pipeinfer.models.text.grammar_text", ProcessLimits(cpu_s=1, n_bytes=2 << 30, niceness=10))

TOO_MUCH = (
    "the grammar or JSON schema takes too much time or memory: it is too large, or can read the same text in too many "
    "ways; give a smaller one, without parts that may be empty or repeated within repeated parts"
)
EXCERPT = re.compile(r"\n *\d+ \| ")  # in llguidance's errors: lines of its grammar, which no client has written
PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
"""The beginning of llguidance's errors: a place in that grammar."""

IS_LIMIT = re.compile("panic|too (large|big|many items)|items; max|limit", re.IGNORECASE)

N_THREADS = 4  # threads that make matchers: a large grammar does not delay others
N_CACHED = 8  # cached matchers at the beginning of a text: the texts of one request share one
CONTROL = b"\xff"  # the prefix of tokens that are not text, for llguidance


# -- checks


def check_grammar(tokenizer: Tokenizer, text: str) -> None:
    """Raises UserError for a grammar that is invalid, or cannot be used with this vocabulary; HostFault."""
    if (n_bytes := len(text.encode("utf-8", "replace"))) > MAX_BYTES:
        limit = f"{MAX_BYTES} are possible, give a shorter one"
        raise UserError(f"a grammar or JSON schema of {n_bytes} bytes is too long; {limit}")
    if not tokenizer.ends:
        reason = "has no token that ends a text, which must follow a grammar's last one"
        raise UserError(f"{tokenizer.path} {reason}; leave the grammar out")
    checked = _checked(text, tokenizer.n_vocab)
    if isinstance(checked, str):
        raise UserError(checked)
    for name in checked:
        token_id(tokenizer, name)


def token_id(tokenizer: Tokenizer, name: str) -> int:
    """The id of a token that a grammar names. Raises UserError if the vocabulary does not have it."""
    tokens = tokenizer.encode(name, add_special=False, parse_special=True)
    if len(tokens) != 1:
        reason = f"the grammar names the token {name[:60]}, which the vocabulary does not have"
        raise UserError(f"{reason}; POST /tokenize tells a text's tokens")
    return tokens[0]


@lru_cache(maxsize=64)
def _checked(text: str, n_vocab: int) -> tuple[str, ...] | str:
    """Tokens that a grammar names, or why it cannot be used. Raises HostFault."""
    try:
        text.encode()
    except UnicodeEncodeError:
        reason = "a grammar has half of a character (a lone surrogate), which no text has"
        return f"{reason}; leave it out"
    result = PROCESS.ask({"text": text, "n_vocab": n_vocab})
    if "wrong" not in result:
        return TOO_MUCH
    if result["wrong"]:
        return str(result["wrong"]) if "tokens" not in result else _message(text, result["wrong"])
    return tuple(result["tokens"])


def _message(text: str, error: str) -> str:
    """The message for llguidance's error."""
    if IS_LIMIT.search(error):
        return TOO_MUCH
    kind = "JSON schema" if text.startswith("{") else "tools' JSON schema" if "%json" in text else "grammar"
    if "NoExtensionBias" in error:  # llguidance's whole error
        if kind == "grammar":
            return "a rule of the grammar refers to itself alone, as in root ::= root; give it a text"
        return f"the {kind} refers to itself with nothing between ($ref); give a value between the two"
    if "is not present in a registry" in error:
        return f"the {kind} refers to another document ($ref), which is not fetched; put what it has into $defs"
    reason = " ".join(PLACE.sub("", EXCERPT.split(error)[0].strip()).split())
    return f"the {kind} cannot be used: {reason[:300]}; leave that out, or write it in another way"


# -- matchers


class Grammar:
    """A Constraint: an output of the grammar, then the end of the text. `start`: the matcher at the beginning of a
    text. Another thread makes it, because large grammars take time."""

    def __init__(self, tokenizer: Tokenizer, start: Future[LLMatcher]) -> None:
        self.tokenizer, self._start, self._lock = tokenizer, start, Lock()
        self.ends = np.array(tokenizer.ends, np.intp)
        self._matcher: LLMatcher | None = None
        self._path: tuple[int, ...] = ()  # the output that the matcher has consumed

    def after(self, output: Sequence[int]) -> NextTokens:
        return NextTokens(self, tuple(output))

    def mask(self, at: LLMatcher) -> npt.NDArray[np.bool_]:
        """(n_vocab,) bool: whether each token may follow."""
        bits = np.frombuffer(at.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self.tokenizer.n_vocab, bitorder="little").astype(bool)
        mask[self.ends] = at.is_accepting()
        return mask

    def query(self, output: tuple[int, ...], query: Callable[[LLMatcher], T]) -> T | None:
        """The matcher's answer after an output; None if the grammar refuses the output, or it has ended. Raises
        ConstraintFailed if that also fails with a fresh matcher: earlier queries change no answer."""
        with self._lock:
            for _ in range(2):
                try:
                    at = self._matcher = self._matcher or self._start.result().deep_copy()
                except (UserError, RecursionError):
                    raise ConstraintFailed from None
                is_there = self._move(at, output)
                # llguidance 1.9.1 gives the last mask again after a rollback and as many bytes as then
                probe = at.deep_copy()
                answer = query(probe) if is_there else None
                if not (at.is_error() or probe.is_error()):
                    return answer
                self._matcher, self._path = None, ()
        raise ConstraintFailed

    def _move(self, at: LLMatcher, output: tuple[int, ...]) -> bool:
        """Move to the end of an output, or as far as the grammar allows; return whether that is the end."""
        n = common(self._path, output)
        at.rollback(len(self._path) - n)
        n_text = next((index for index, token in enumerate(output[n:], n) if token in self.ends), len(output))
        n += at.try_consume_tokens(list(output[n:n_text])) if n_text > n else 0
        self._path = output[:n]
        return n == len(output)


class NextTokens:
    """An Allowed: the tokens that may follow one output."""

    def __init__(self, grammar: Grammar, output: tuple[int, ...]) -> None:
        self.grammar, self.output = grammar, output

    def has(self, token: int) -> bool:
        grammar = self.grammar
        if token in grammar.ends:
            return bool(grammar.query(self.output, lambda at: at.is_accepting()))
        is_known = token < grammar.tokenizer.n_vocab
        return is_known and grammar.query(self.output, lambda at: at.validate_tokens([token])) == 1

    def restrict(self, logits: FloatArray) -> None:
        n = min(len(logits), self.grammar.tokenizer.n_vocab)
        ends, mask = self.grammar.ends[self.grammar.ends < n], self.grammar.query(self.output, self.grammar.mask)
        allowed = np.zeros(len(logits), bool)
        if mask is not None:
            allowed[:n] = mask[:n] & ~np.isneginf(logits[:n])
        if not allowed.any():
            allowed[ends] = True
            logits[ends] = np.maximum(logits[ends], np.finfo(np.float32).min)  # a bias may be -inf
        logits[~allowed] = -np.inf


class Grammars:
    """Grammars of one vocabulary, which is opened for the first of them, or by `open_ahead`."""

    def __init__(self, open_vocabulary: Callable[[], Tokenizer]) -> None:
        self._open_vocabulary = open_vocabulary
        self._threads = ThreadPoolExecutor(N_THREADS, "grammar")

        def make(text: str) -> LLMatcher:
            return matcher(self._tokens, lark_of(text, partial(token_id, self.tokenizer)))

        self._start = lru_cache(maxsize=N_CACHED)(lambda text: self._threads.submit(make, text))

    def open_ahead(self) -> None:
        """Open the vocabulary now, in a thread: half a second for 150 000 tokens, once."""
        self._threads.submit(lambda: self._tokens)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self._open_vocabulary()

    @cached_property
    def _tokens(self) -> LLTokenizer:
        tokenizer, pieces = self.tokenizer, list[bytes]()
        for token in range(tokenizer.n_vocab):
            mark = CONTROL if tokenizer.attributes_of(token) & ATTR_CONTROL else b""
            pieces.append(mark + tokenizer.decode_piece(token, special=True))
        return open_tokens(pieces, tokenizer.ends[0])

    def __call__(self, text: str) -> Grammar:
        """`text`: accepted by `check_grammar`."""
        return Grammar(self.tokenizer, self._start(text))
