"""What a stage holds of runs: those it has begun, their dead rows, the tokens before them, and those whose tokens
threads choose while the last stage evaluates its next run (SiPipe, section 5.1). Knows no MPI."""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from pipeinfer.cluster.wire import Transaction
from pipeinfer.core.interfaces import DeviceRows, StageFuture
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.types import Allowed, FloatArray

NO_TOKENS = array("i")


class WantedRow(NamedTuple):
    """A row of a run after which answers are wanted. `position`: of what follows. `history`: before it."""

    row: int
    params: SamplingParams
    position: int
    history: Sequence[int]
    n_wanted: int  # see `Row`
    allowed: Allowed | None

    @property
    def is_long(self) -> bool:
        """Whether its answer takes longer than to find the largest logit."""
        params = self.params
        return self.n_wanted < 0 or not params.is_greedy or self.allowed is not None or params.n_logprobs >= 0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """StageFuture of a model that evaluates synchronously."""

    rows: FloatArray
    is_done = True

    def result(self) -> FloatArray:
        return self.rows


@dataclass(slots=True, eq=False)
class PendingRun:
    """A transaction whose result may be pending. `rows`: the result of the rows `alive`; None if there are none."""

    transaction: Transaction
    start_s: float
    alive: list[int] = field(default_factory=list)
    rows: StageFuture[FloatArray] | StageFuture[DeviceRows] | None = None
    wanted_rows: list[WantedRow] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.rows is None or self.rows.is_done


class Pruned(Protocol):
    """Runs and rows that need not be evaluated. The head may name them late, or never."""

    def is_cancelled(self, run_id: int) -> bool:
        """Called before a run and between its layers."""
        ...

    def rows(self, run_id: int) -> Sequence[int]:
        """The indices of the run's dead rows; called before the run."""
        ...


class LocalPrunings:
    """Pruned by calls in this process. `listen` is called between layers, before `is_cancelled` answers."""

    def __init__(self, listen: Callable[[], object] = lambda: None) -> None:
        self.listen = listen
        self.cancelled: set[int] = set()
        self.pruned: dict[int, set[int]] = {}

    def cancel(self, run_ids: Iterable[int]) -> None:
        self.cancelled.update(run_ids)

    def prune(self, rows: Mapping[int, Iterable[int]]) -> None:
        for run_id, dead in rows.items():
            self.pruned.setdefault(run_id, set()).update(dead)

    def is_cancelled(self, run_id: int) -> bool:
        self.listen()
        return run_id in self.cancelled

    def rows(self, run_id: int) -> Sequence[int]:
        return sorted(self.pruned.get(run_id, ()))

    def forget_before(self, run_id: int) -> None:
        """Drop older runs: runs come in the order of their ids."""
        self.cancelled = {run for run in self.cancelled if run >= run_id}
        self.pruned = {run: rows for run, rows in self.pruned.items() if run >= run_id}


class TokenHistory:
    """The tokens of each sequence by position, for samplers that look back. Operations apply as to a KV cache."""

    def __init__(self) -> None:
        self._tokens: dict[int, array[int]] = {}

    def apply(self, ops: Sequence[KvOp]) -> None:
        for op in ops:
            tokens = self._tokens.get(op.src, NO_TOKENS)
            if op.kind is OpKind.COPY:
                self._tokens[op.dst] = tokens[: op.last]
            elif op.kind is OpKind.REMOVE:
                del tokens[op.first :]

    def put(self, seq: int, tokens: Sequence[int]) -> None:
        """The tokens of a sequence that had none."""
        self._tokens[seq] = array("i", tokens)

    def add(self, seqs: Sequence[int], token: int) -> None:
        """Append the token of an evaluated row to all of its sequences."""
        for seq in seqs:
            if (tokens := self._tokens.get(seq)) is None:
                tokens = self._tokens[seq] = array("i")
            tokens.append(token)

    def last(self, seq: int, end: int, n: int) -> Sequence[int]:
        """The newest `n` of the sequence's first `end` tokens."""
        return self._tokens.get(seq, NO_TOKENS)[max(0, end - n) : end]


N_BUFFERS = 2  # runs that are sampled at a time, at most. A stage that is further ahead waits for the oldest of them


AnswerRow = Callable[[int, FloatArray], None]


class Samplers:
    """`next_is_here`: whether the stage could begin another run now. Else it samples itself: threads gain nothing."""

    def __init__(self, n_threads: int, next_is_here: Callable[[], bool]) -> None:
        self.n_threads, self.next_is_here = n_threads, next_is_here
        self._pool = ThreadPoolExecutor(n_threads, "sampler")
        self._open: deque[tuple[list[Future[None]], Callable[[], Any]]] = deque()

    @property
    def take_next(self) -> bool:
        """Whether the threads sample the next run: verdicts keep the order of the runs."""
        return bool(self._open) or self.next_is_here()

    def submit(self, logits: FloatArray, rows: Sequence[int], answer: AnswerRow, finish: Callable[[], Any]) -> None:
        """Threads call `answer(row, its logits)` for these rows of logits (n_rows, n_vocab); `ready` then returns what
        `finish` returns. The logits may be changed once this returns."""
        busy = [work for work, _ in self._open if not _are_done(work)]
        if len(busy) >= N_BUFFERS:
            wait(busy[0])
        copy = logits[list(rows)]

        def work(first: int) -> None:
            for index in range(first, len(rows), self.n_threads):
                answer(rows[index], copy[index])

        shares = [self._pool.submit(work, first) for first in range(min(self.n_threads, len(rows)))]
        self._open.append((shares, finish))

    def ready(self) -> Any | None:
        """The oldest run's result, once it is sampled; raises what `answer` raised."""
        if not self._open or not _are_done(self._open[0][0]):
            return None
        work, finish = self._open.popleft()
        for share in work:
            share.result()
        return finish()

    def close(self) -> None:
        """Return when all runs are sampled."""
        self._pool.shutdown()


def _are_done(work: Sequence[Future[None]]) -> bool:
    return all(share.done() for share in work)
