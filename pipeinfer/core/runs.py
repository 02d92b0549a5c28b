"""What travels through the pipeline, as plain dataclasses. Knows no tree, no model and no MPI."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from pipeinfer.core.kv.blocks import Span
from pipeinfer.core.sampling import SamplingParams

NO_TOKEN = -1
"""In a verdict: this row was not asked for a token, or was not evaluated because its guess was dead."""

MAX_OPS = 2048
"""Operations that a run carries at most."""

FAILED = -2
"""In a verdict: the request cannot go on here, as its constraint takes too much."""

POSITION_END = 2**31 - 1
"""As the end of a position range: to the end of the sequence."""


class OpKind(IntEnum):
    COPY = 1
    REMOVE = 2
    COMPACT = 3
    CLOSE = 4
    SHARED = 5


@dataclass(frozen=True, slots=True)
class KvOp:
    """One change of the KV cache, applied by every stage before the rows of the run that carries it.

    COPY    the cells of `src` at positions [first, last) also belong to `dst`
    REMOVE  the cells of `src` at positions [first, last) no longer belong to `src`
    COMPACT parked cells are free again; every sequence's cells are packed in the order of their positions
    CLOSE   request `src` has ended: what is kept of it may go
    SHARED  before a COMPACT: the cells of `dst` at positions [0, last) are those of `src`, and stay so; one a sequence
            at most, after that of its `src`
    """

    kind: OpKind
    src: int
    dst: int = 0
    first: int = 0
    last: int = POSITION_END


@dataclass(slots=True)
class Row:
    """One token to evaluate. It sees the cells of its first sequence; all its sequences receive its cell."""

    request: int
    token: int
    position: int
    seqs: tuple[int, ...]
    n_wanted: int = 1
    """Answers asked for: none after prompt rows before the last, one of the target, of a draft so many guesses."""


class Opening(NamedTuple):
    """What the last stage is told of a request with its first run."""

    sampling: SamplingParams
    n_prompt: int
    """Tokens of the prompt, which is to say the position of the output's first one."""


@dataclass(slots=True)
class Run:
    """One micro-batch through all stages, the unit of cancellation. Rows are in topological order."""

    id: int
    rows: list[Row]
    ops: list[KvOp] = field(default_factory=list)
    opens: dict[int, Opening] = field(default_factory=dict)
    """Requests whose first run this is."""
    span: Span | None = None
    """The rows are whole blocks of it; see `blocks`."""

    @property
    def begins_blocks(self) -> bool:
        """Whether these are the first of a span's blocks."""
        return self.span is not None and self.rows[0].position == self.span.start

    @property
    def context(self) -> int:
        """Tokens before a request's first row, the mean over the rows. A request's rows follow each other."""
        request, first, total = None, 0, 0
        for row in self.rows:
            if row.request != request:
                request, first = row.request, row.position
            total += first
        return total // max(1, len(self.rows))


@dataclass(frozen=True, slots=True)
class Verdict:
    """For each row of a run, the token the target chooses after that row, or NO_TOKEN, or FAILED."""

    run_id: int
    tokens: tuple[int, ...]
    cancelled: bool = False
    """No stage beyond the one that noticed the cancellation evaluated the run; `tokens` is empty."""
    slowest_s: float = 0.0
    """Seconds that the run took the slowest stage; 0 if nobody knows."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A token that a draft thinks may follow a node, with its probability under the draft."""

    token: int
    probability: float


@dataclass(frozen=True, slots=True)
class GuessVerdict:
    """For each row of a run what a draft guesses after it, likeliest first; nothing where no answer was wanted."""

    run_id: int
    guesses: tuple[list[Guess], ...]
    cancelled: bool = False
    slowest_s: float = 0.0
