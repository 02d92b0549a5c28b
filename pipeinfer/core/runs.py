"""What travels through the pipeline, as plain dataclasses. Knows no tree, no model and no MPI."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from pipeinfer.core.blocks import Span
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.types import POSITION_END, AdapterScales, FloatArray

MAX_OPS = 2048  # operations of a run at most


class OpKind(IntEnum):
    COPY = 1
    REMOVE = 2
    COMPACT = 3
    CLOSE = 4
    SHARED = 5
    STORE = 6
    READ = 7
    JOIN = 8
    LOAD = 9
    USE = 10


OF_BLOCKS = frozenset([OpKind.STORE, OpKind.READ, OpKind.JOIN, OpKind.LOAD, OpKind.USE])
"""Operations on blocks of cells that stages keep. A run with a JOIN has no other operation."""


class BlockKey(NamedTuple):
    """Names a block of a text, see `stored_blocks`: two numbers of 64 bits, with sign."""

    high: int
    low: int


@dataclass(frozen=True, slots=True)
class KvOp:
    """One change of the KV cache, applied by every stage before the rows of the run that carries it.

    COPY    the cells of `src` at positions [first, last) also belong to `dst`
    REMOVE  the cells of `src` at positions [first, last) no longer belong to `src`
    COMPACT parked cells become free; every sequence's cells are packed in the order of their positions
    CLOSE   request `src` has ended: its state at the stages is freed
    SHARED  before a COMPACT: the cells of `dst` at positions [0, last) are those of `src`, and stay shared; at most one
            for each `dst`, after that of its `src`
    STORE   keep the cells of `src` at the positions `rows` at the stage, as the block of `key`; with states all
            that `src` has, if it ends there
    READ    begin to read the block of `key` back, the next one of reading `src`
    JOIN    wait until the blocks of reading `src` are read; `last` becomes the number that every stage could read
    LOAD    the first blocks of reading `src`, positions [0, last), become the cells of the empty sequence `dst`, and
            the rest is dropped; with `last` 0 there is no sequence
    USE     the block of `key` was used, and is removed after those that were used before"""

    kind: OpKind
    src: int
    dst: int = 0
    first: int = 0
    last: int = POSITION_END

    @classmethod
    def store(cls, seq: int, start: int, end: int, key: BlockKey) -> "KvOp":
        """A STORE, whose positions share a field, so that operations stay short."""
        return cls(OpKind.STORE, seq, key.high, key.low, start << 32 | end)

    @property
    def rows(self) -> tuple[int, int]:
        """The positions [start, end) of a STORE."""
        return self.last >> 32, self.last & 0xFFFFFFFF

    @property
    def key(self) -> BlockKey:
        """Of a STORE, READ or USE."""
        return BlockKey(self.dst, self.first)


@dataclass(slots=True)
class Row:
    """One token to evaluate. It sees the cells of its first sequence; its cell belongs to all its sequences."""

    request: int
    token: int
    position: int
    seqs: tuple[int, ...]
    n_wanted: int = 1
    """Answers wanted: 0 for context, 1 of the target, of a draft the number of guesses. Below 0: the log-probability of
    the prompt's next token, which is -1 - n_wanted."""


class Opening(NamedTuple):
    """What the stages are told of a request with its first run."""

    sampling: SamplingParams
    n_prompt: int  # tokens of the prompt: the position of the output's first token
    adapters: AdapterScales | None = None  # see Request


@dataclass(slots=True)
class Run:
    """One micro-batch through all stages, the unit of cancellation. Rows are in topological order, and of requests with
    the same adapters."""

    id: int
    rows: list[Row]
    ops: list[KvOp] = field(default_factory=list)
    opens: dict[int, Opening] = field(default_factory=dict)  # requests whose first run this is
    span: Span | None = None  # the rows are whole blocks of it, see `blocks`

    @property
    def begins_blocks(self) -> bool:
        """Whether the run starts with the span's first block."""
        return self.span is not None and self.rows[0].position == self.span.start

    @property
    def n_before(self) -> int:
        """Tokens before a request's first row, the mean over the rows; a request's rows are consecutive."""
        request, first, total = None, 0, 0
        for row in self.rows:
            if row.request != request:
                request, first = row.request, row.position
            total += first
        return total // max(1, len(self.rows))


@dataclass(frozen=True, slots=True)
class Verdict:
    """For each row of a run the token that the target chooses after it, NO_TOKEN, or FAILED; for a row that is scored
    the prompt's next token, with its log-probability."""

    run_id: int
    tokens: tuple[int, ...]
    cancelled: bool = False  # at least the last stage did not evaluate the run; `tokens` is empty
    slowest_s: float = 0.0  # seconds in the slowest stage; 0: unknown
    features: FloatArray | None = field(default=None, compare=False)
    """(n_rows, n), what a draft reads of each row; those of dead rows are void. None: no draft reads any."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A token that may follow a node, with its probability under the draft."""

    token: int
    probability: float


@dataclass(frozen=True, slots=True)
class GuessVerdict:
    """For each row of a run a draft's guesses after it, likeliest first; empty where none were wanted."""

    run_id: int
    guesses: tuple[list[Guess], ...]
    cancelled: bool = False
    slowest_s: float = 0.0
