"""A budget of reasoning: after so many tokens its end is forced, by the rules of llama.cpp's sampler. Which token is
forced depends on the output alone, so guesses change nothing. Knows a vocabulary; no stage and no request."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from threading import Lock
from typing import NamedTuple

import numpy as np

from pipeinfer.core.blocks import common
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.types import Allowed, Constraint, FloatArray
from pipeinfer.errors import UserError
from pipeinfer.models.text.answer_forms import THOUGHTS
from pipeinfer.models.text.grammar import Grammars
from pipeinfer.models.text.tokenizer import Tokenizer

Tokens = tuple[int, ...]

MAX_MESSAGE_BYTES = 16 << 10  # its tokens are in messages between ranks

QWEN_CODER = ("<think>", "<tool_call>", "<function=", "<parameter=")
"""A template with all of these has several ends of reasoning in llama.cpp, QWEN_CODER_ENDS, the forced one first."""

QWEN_CODER_ENDS = ("\n</think>", "</think>", "<tool_call>")


class ReasoningState(NamedTuple):
    """Where an output is. `n_left`: tokens of reasoning until its end is forced; below 1: when a character is whole;
    None: no reasoning is counted. `n_forced`: tokens of the end that were forced; None: it is not forced. `newest`: the
    newest tokens, in which a mark may have begun."""

    n_left: int | None = None
    n_forced: int | None = None
    newest: Tokens = ()


OUTSIDE, FORCED = ReasoningState(), ReasoningState(n_forced=0)


class ReasoningBudget(NamedTuple):
    """`start`, `ends`: the tokens of marks around reasoning. `forced`: a message and the first of `ends`. `first`: the
    state before the output."""

    n_tokens: int
    start: Tokens
    ends: tuple[Tokens, ...]
    forced: Tokens
    first: ReasoningState

    def step(self, state: ReasoningState, token: int, piece_of: Callable[[int], bytes]) -> ReasoningState:
        """The state after one more token."""
        if state.n_forced is not None:
            n_forced = state.n_forced + 1
            return ReasoningState(n_forced=n_forced) if n_forced < len(self.forced) else OUTSIDE
        newest = (*state.newest, token)[-max(map(len, (self.start, *self.ends))) :]
        if state.n_left is None:
            if not _ends_with(newest, self.start):
                return ReasoningState(newest=newest)
            return ReasoningState(self.n_tokens) if self.n_tokens > 0 else FORCED
        if any(_ends_with(newest, end) for end in self.ends):
            return OUTSIDE
        n_left = state.n_left - 1
        if n_left > 0:
            return ReasoningState(n_left, newest=newest)
        if ends_whole(piece_of(token)):
            return FORCED
        return ReasoningState(n_left, newest=newest if n_left < 0 else ())  # llama.cpp begins anew when it is spent


def _ends_with(tokens: Tokens, mark: Tokens) -> bool:
    return tokens[-len(mark) :] == mark


def ends_whole(piece: bytes) -> bool:
    """Whether the bytes end with a whole character, as llama.cpp sees it."""
    for n, byte in enumerate(reversed(piece[-4:]), 1):
        if byte & 0xC0 != 0x80:
            return n >= (4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1)
    return not piece


def thought_marks(source: str, thought: str = "") -> tuple[str, str]:
    """The marks around reasoning of the template `source`; empty: none. `thought`: the mark that ends the prompt's."""
    marks = [(begin, end) for begin, end in THOUGHTS.items() if end == (thought or end)]
    return next((each for each in marks if each[0] in source), marks[0] if thought else ("", ""))


def check_message(message: str) -> None:
    """Raises UserError for a message of a budget that is too long."""
    if (n_bytes := len(message.encode("utf-8", "replace"))) > MAX_MESSAGE_BYTES:
        too_long = f"the message of the reasoning budget has {n_bytes} bytes"
        raise UserError(f"{too_long}; {MAX_MESSAGE_BYTES} are possible, give a shorter one")


def budget_text(
    n_tokens: int, message: str, source: str, tokenizer: Tokenizer, prompt: Sequence[int], thought: str
) -> str:
    """`SamplingParams.reasoning` of a chat; empty if its template `source` has no marks of reasoning. `message`: forced
    before the end. `thought`: the mark that ends the reasoning which the prompt begins; empty: it begins none. Raises
    UserError for a message that is too long."""
    begin, end = thought_marks(source, thought)
    if not end:
        return ""
    check_message(message)
    tokens_of = partial(tokenizer.encode, add_special=False, parse_special=True)
    names = QWEN_CODER_ENDS if all(sign in source for sign in QWEN_CODER) else (end,)
    start, ends = tuple(tokens_of(begin)), tuple(tuple(tokens_of(name)) for name in names)
    forced = (*(tokens_of(message) if message else ()), *ends[0])
    first = OUTSIDE
    if thought:
        n, prompt = len(start), tuple(prompt)
        at = next((at for at in range(len(prompt), n - 1, -1) if prompt[at - n : at] == start), len(prompt))
        reasoning, n_left = prompt[at:], n_tokens - (len(prompt) - at)
        n_forced = len(reasoning) if len(reasoning) < len(forced) and forced[: len(reasoning)] == reasoning else 0
        first = ReasoningState(n_left) if n_left > 0 else ReasoningState(n_forced=n_forced)
    return json.dumps([n_tokens, start, ends, forced, first.n_left, first.n_forced])


@lru_cache(maxsize=64)
def read_budget(text: str) -> ReasoningBudget:
    """The budget of `budget_text`."""
    n_tokens, start, ends, forced, n_left, n_forced = json.loads(text)
    first = ReasoningState(n_left, n_forced)
    return ReasoningBudget(n_tokens, tuple(start), tuple(map(tuple, ends)), tuple(forced), first)


class OneToken:
    """An Allowed: one token alone."""

    def __init__(self, token: int) -> None:
        self.token = token

    def has(self, token: int) -> bool:
        return token == self.token

    def restrict(self, logits: FloatArray) -> None:
        logit = max(logits[self.token], np.finfo(np.float32).min)  # a bias may be -inf
        logits[:] = -np.inf
        logits[self.token] = logit


class LimitedReasoning:
    """A Constraint: reasoning within its budget, and all else as another constraint says."""

    def __init__(self, budget: ReasoningBudget, piece_of: Callable[[int], bytes], other: Constraint | None) -> None:
        self.budget, self.piece_of, self.other = budget, piece_of, other
        self._lock = Lock()
        self._path: Tokens = ()  # an output, and the states before it and after each of its tokens
        self._states = [budget.first]

    def after(self, output: Sequence[int]) -> Allowed | None:
        state = self._state(tuple(output))
        if state.n_forced is not None:
            return OneToken(self.budget.forced[state.n_forced])
        return self.other.after(output) if self.other else None

    def _state(self, output: Tokens) -> ReasoningState:
        with self._lock:
            n = common(self._path, output)
            del self._states[n + 1 :]
            for token in output[n:]:
                self._states.append(self.budget.step(self._states[-1], token, self.piece_of))
            self._path = output
            return self._states[-1]


class Constraints:
    """Constraints of requests with one vocabulary, by their sampling parameters."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars

    def __call__(self, sampling: SamplingParams) -> Constraint:
        """`sampling`: with a constraint."""
        grammar = self.grammars(sampling.grammar) if sampling.grammar else None
        if not sampling.reasoning:
            assert grammar, "sampling without a constraint"
            return grammar
        return LimitedReasoning(read_budget(sampling.reasoning), self.grammars.tokenizer.decode_piece, grammar)
