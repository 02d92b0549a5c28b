"""One stage's work on a run: apply its operations, evaluate its rows, fill in the result. Knows no MPI."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import numpy as np

from pipeinfer.cluster.stages.cell_store import CellStore
from pipeinfer.cluster.stages.log_prob_file import compared
from pipeinfer.cluster.stages.runs import Evaluated, PendingRun, Pruned, Samplers, TokenHistory, WantedRow
from pipeinfer.cluster.verdicts import score_token
from pipeinfer.cluster.wire import Buffer, SentRow, Transaction, WireType, feature_bytes
from pipeinfer.core.drafting import guess_next
from pipeinfer.core.interfaces import AsyncStage, Batch, DeviceRows, DeviceStage, FeatureStage, StageFuture, StageModel
from pipeinfer.core.runs import OF_BLOCKS, Guess, GuessVerdict, KvOp, Opening, OpKind, Verdict
from pipeinfer.core.sampling import SamplingParams, choose
from pipeinfer.core.types import FAILED, NO_TOKEN, Allowed, Constraint, ConstraintFailed, FloatArray
from pipeinfer.observe.trace import NO_TRACE, Tracer


@dataclass(slots=True)
class StageStats:
    """Counts since the last report of its rank."""

    n_skipped: int = 0  # cancelled runs that it never began
    n_stopped: int = 0  # cancelled runs that it left between layers
    n_layers_saved: int = 0  # layers that cancellation spared it
    n_for_samplers: int = 0  # runs whose tokens samplers choose
    n_rows_pruned: int = 0  # dead rows left out of runs that it evaluated


NO_LOGITS = np.empty((0, 0), np.float32)


@dataclass(eq=False)
class StageWorker:
    """One stage. `n_layers`: of the model, for the statistics. `constrain`: makes a Constraint of a request's
    parameters; None, as for drafts: constraints are ignored. `leaves_as`: the type of activations that stay on the
    model's device; None: they go to the host. `store`: of its cells on disk."""

    UNIT: ClassVar = "run"  # a transaction's name in timelines
    NO_ANSWER: ClassVar[Any] = NO_TOKEN
    VERDICT: ClassVar[Any] = Verdict

    model: StageModel
    clock: Callable[[], float]
    is_first: bool
    tracer: Tracer = field(default_factory=lambda: NO_TRACE)
    n_layers: int = 0
    constrain: Callable[[SamplingParams], Constraint] | None = None
    leaves_as: WireType | None = None
    store: CellStore | None = None

    def __post_init__(self) -> None:
        model = self.model
        self._async_stage = model if isinstance(model, AsyncStage) else None  # isinstance of a Protocol is slow
        self._feature_stage = model if isinstance(model, FeatureStage) and model.n_features else None
        self._n_stop_checks = 0  # of the last run
        self._free_s = -math.inf  # when the last run was done
        self.stats = StageStats()
        self._opened: dict[int, Opening] = {}
        self._constraints: dict[int, Constraint] = {}
        # also of requests that do not look back: a later one may begin with their cells
        self._history = TokenHistory() if model.is_last else None

    @property
    def n_features(self) -> int:
        """The number of its layers that drafts read."""
        return self._feature_stage.n_features if self._feature_stage else 0

    def process(
        self, transaction: Transaction, pruned: Pruned, samplers: Samplers | None = None
    ) -> Verdict | GuessVerdict | None:
        """`begin` and `finish`."""
        return self.finish(self.begin(transaction, pruned), samplers)

    def begin(self, transaction: Transaction, pruned: Pruned) -> PendingRun:
        """Begin to evaluate the transaction. If the model is an AsyncStage, the next one may begin before this one is
        finished, and both finish in order; else it is done when this returns."""
        pending = PendingRun(transaction, self.clock())
        self._keep_books(transaction)
        if not transaction.cancelled and pruned.is_cancelled(transaction.run_id):
            transaction.cancel()
        if transaction.cancelled:
            self.stats.n_skipped += 1
            self.stats.n_layers_saved += self.n_layers
        else:
            self._n_stop_checks = 0
            self._evaluate(pending, pruned)
            if transaction.cancelled:
                self.stats.n_stopped += 1
                self.stats.n_layers_saved += max(0, self.n_layers - self._n_stop_checks)
        return pending

    def finish(self, pending: PendingRun, samplers: Samplers | None = None) -> Verdict | GuessVerdict | None:
        """Wait for the result. The last stage returns the verdict, or None if its samplers will have it; the verdict of
        a cancelled run has no rows. Other stages return None and put the residual stream into `activations`."""
        transaction, wanted_rows, logits = pending.transaction, pending.wanted_rows, NO_LOGITS
        if not transaction.cancelled:
            logits = self._result(pending)
        answers: list[Any] = [] if transaction.cancelled else [self.NO_ANSWER] * transaction.n_rows
        if transaction.n_joined is not None:
            answers = [transaction.n_joined]

        def answer(index: int, row_logits: FloatArray) -> None:
            answers[wanted_rows[index].row] = self._answer(row_logits, wanted_rows[index])

        samplers = samplers if samplers and samplers.take_next else None
        for_samplers = []
        for index, wanted_row in enumerate(wanted_rows):
            if samplers and wanted_row.is_long:
                for_samplers.append(index)
            else:
                answer(index, logits[index])
        # of two overlapping runs, the later one took the time after the end of the first
        end_s, start_s = self.clock(), max(pending.start_s, self._free_s)
        self._free_s = end_s
        transaction.took(end_s - start_s)
        self.tracer.evaluated(start_s, self.UNIT, transaction.run_id, transaction.n_rows, transaction.cancelled)
        if not self.model.is_last:
            return None
        run_id, cancelled, slowest_s = transaction.run_id, transaction.cancelled, transaction.slowest_s
        features = [transaction.features] if transaction.n_features and not cancelled else []

        def verdict() -> Verdict | GuessVerdict:
            return self.VERDICT(run_id, tuple(answers), cancelled, slowest_s, *features)

        if samplers is None:
            return verdict()
        self.stats.n_for_samplers += bool(for_samplers)
        samplers.submit(logits, for_samplers, answer, verdict)
        return None

    def _keep_books(self, transaction: Transaction) -> None:
        """Note which requests begin and end, and apply the operations on sequences."""
        ops = transaction.ops
        for op in ops:
            if op.kind is OpKind.CLOSE:
                for by_request in (self._opened, self._constraints):
                    by_request.pop(op.src, None)
        opens = transaction.opens
        self._opened.update(opens)
        self._apply(transaction, [op for op in ops if op.kind is not OpKind.CLOSE])
        if self.model.is_last and self.constrain:
            constrained = {id: new.sampling for id, new in opens.items() if new.sampling.is_constrained}
            self._constraints.update({id: self.constrain(sampling) for id, sampling in constrained.items()})

    def _apply(self, transaction: Transaction, ops: Sequence[KvOp]) -> None:
        """Apply operations, in their order, to the cells and to the blocks on disk."""
        for is_of_blocks, group in groupby(ops, lambda op: op.kind in OF_BLOCKS):
            part = list(group)
            if not is_of_blocks:
                self.model.apply(part)
                if self._history:
                    self._history.apply(part)
            elif part[0].kind is OpKind.JOIN:
                transaction.join(self.store.join(part[0].src) if self.store else 0)
            elif self.store:
                for op in part:
                    self.store.apply(op, self._history)

    def _evaluate(self, pending: PendingRun, pruned: Pruned) -> None:
        transaction = pending.transaction
        seqs = transaction.seqs
        if dead := pruned.rows(transaction.run_id):
            transaction.rows["dropped"][list(dead)] = True
        alive = pending.alive = self._alive(transaction, seqs)
        if n_dropped := transaction.n_rows - len(alive):
            transaction.rows["dropped"][sorted(set(range(transaction.n_rows)) - set(alive))] = True
            self.stats.n_rows_pruned += n_dropped
        if alive:
            pending.rows = self._begin_rows(transaction, alive, seqs, pruned)
            if pending.rows is None:
                transaction.cancel()
                return
        if self.model.is_last:
            pending.wanted_rows = self._wanted_rows(transaction, seqs)

    def _result(self, pending: PendingRun) -> FloatArray:
        """The logits of each wanted row on the last stage; else none, and the activations are in the transaction."""
        transaction, alive = pending.transaction, pending.alive
        result = pending.rows.result() if pending.rows else np.empty((0, self.model.n_embd), np.float32)
        if self._feature_stage:
            features = np.zeros((self.n_features, transaction.n_rows, self.model.n_embd), np.float32)
            if alive:
                features[:, alive] = self._feature_stage.features
            transaction.add_features(features)
        if self.model.is_last:
            assert isinstance(result, np.ndarray), "logits are on a device"
            return result
        if len(alive) < transaction.n_rows:
            result = _spread(result, alive, transaction.n_rows)
        if isinstance(result, np.ndarray):
            transaction.activations = result
        else:
            transaction.set_out_of_band(result)
        return NO_LOGITS

    def _alive(self, transaction: Transaction, seqs: Sequence[tuple[int, ...]]) -> list[int]:
        """Rows to evaluate here: not dropped before, and with their prefix evaluated on this stage. A row without its
        prefix, which was cancelled or pruned, descends from dead guesses."""
        ends: dict[int, int] = {}
        alive = []
        positions, dropped = transaction.rows["position"].tolist(), transaction.rows["dropped"].tolist()
        for index, position in enumerate(positions):
            seq = seqs[index][0]
            end = ends[seq] if seq in ends else self.model.next_position(seq)
            if end == position and not dropped[index]:
                alive.append(index)
                for owner in seqs[index]:
                    ends[owner] = position + 1
        return alive

    def _begin_rows(
        self, transaction: Transaction, alive: list[int], seqs: Sequence[tuple[int, ...]], pruned: Pruned
    ) -> StageFuture[FloatArray] | StageFuture[DeviceRows] | None:
        rows, out_of_band = transaction.rows, transaction.out_of_band
        hidden = None if self.is_first or out_of_band else transaction.activations
        if len(alive) < transaction.n_rows:
            rows, seqs = rows[alive], [seqs[index] for index in alive]
            hidden = None if hidden is None else hidden[alive]
            out_of_band = out_of_band.pick(alive) if out_of_band else None
        wants_logits = rows["n_wanted"] != 0
        first = self._opened.get(int(rows["request"][0]))
        how = transaction.span, first.adapters if first else None, out_of_band
        batch = Batch(rows["token"], rows["position"], list(seqs), hidden, wants_logits, *how)
        stop = partial(self._is_cancelled, pruned, transaction.run_id)
        if self.leaves_as:
            assert isinstance(self.model, DeviceStage), "there is no device to leave activations on"
            return self.model.begin_on_device(batch, stop, self.leaves_as is not WireType.F32)
        if self._async_stage:
            return self._async_stage.begin(batch, stop)
        result = self.model.evaluate(batch, stop)
        return None if result is None else Evaluated(result)

    def _is_cancelled(self, pruned: Pruned, run_id: int) -> bool:
        """Called between layers."""
        self._n_stop_checks += 1
        return pruned.is_cancelled(run_id)

    def _wanted_rows(self, transaction: Transaction, seqs: Sequence[tuple[int, ...]]) -> list[WantedRow]:
        assert self._history, "only the last stage answers"
        wanted_rows = []
        for index, (row, owners) in enumerate(zip(transaction.sent_rows, seqs, strict=True)):
            if row.dropped:
                continue
            self._history.add(owners, row.token)
            if row.n_wanted:
                params, position, chooses = self._opened[row.request].sampling, row.position + 1, row.n_wanted > 0
                history = self._history.last(row.seq, position, params.looks_back) if chooses else ()
                allowed = self._allowed(row) if chooses and row.request in self._constraints else None
                wanted_rows.append(WantedRow(index, params, position, history, row.n_wanted, allowed))
        return wanted_rows

    def _allowed(self, row: SentRow) -> Allowed | None:
        """The tokens that may follow a row; None: any."""
        assert self._history
        position = row.position + 1
        n_output = position - self._opened[row.request].n_prompt
        return self._constraints[row.request].after(self._history.last(row.seq, position, n_output))

    def _answer(self, logits: FloatArray, wanted_row: WantedRow) -> Any:
        """One row's part of the verdict: the target's token at the position after it, or the prompt's."""
        params = wanted_row.params
        if wanted_row.n_wanted < 0:
            answer = score_token(logits, -1 - wanted_row.n_wanted, params.n_prompt_logprobs)
            if params.base_chunk:
                answer.comparison = compared(params.base_chunk, wanted_row.position, logits, answer)
            return answer
        changed = logits.copy() if params.n_logprobs >= 0 else logits  # in place
        try:
            token = choose(changed, params, wanted_row.position, wanted_row.history, wanted_row.allowed)
        except ConstraintFailed:
            return FAILED
        return score_token(logits, token, params.n_logprobs) if params.n_logprobs >= 0 else token


def _spread(values: FloatArray | DeviceRows, rows: Sequence[int], n_rows: int) -> FloatArray | DeviceRows:
    """`n_rows` rows: `values` at the indices `rows`, else zeros."""
    if not isinstance(values, np.ndarray):
        return values.spread(rows, n_rows)
    spread = np.zeros((n_rows, values.shape[1]), np.float32)
    spread[rows] = values
    return spread


@dataclass(eq=False, kw_only=True)
class DraftWorker(StageWorker):
    """A stage of a draft on other ranks: its verdicts have the guesses wanted for a row. `couple`: see `guess_next`."""

    UNIT: ClassVar = "question"
    NO_ANSWER: ClassVar[Any] = ()
    VERDICT: ClassVar[Any] = GuessVerdict

    couple: bool

    def _answer(self, logits: FloatArray, wanted_row: WantedRow) -> list[Guess]:
        n_wanted = wanted_row.n_wanted
        return guess_next(logits, wanted_row.params, wanted_row.position, wanted_row.history, n_wanted, self.couple)


def room_for(message: Buffer, n_embd: int, wire_type: WireType = WireType.F32, n_features: int = 0) -> Transaction:
    """A transaction with the message's content, and memory for the activations that a first stage adds, and features of
    `n_features` layers."""
    bare = Transaction(message, n_embd, wire_type)
    n_bytes = bare.n_bytes_full + feature_bytes(bare.n_rows, n_embd, n_features)
    buffer = np.empty(n_bytes, np.uint8)
    buffer[: len(message)] = message
    return Transaction(buffer, n_embd, wire_type)
