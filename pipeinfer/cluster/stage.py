"""What one stage does with a transaction: apply operations, evaluate, fill in the result. Knows no MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeinfer.cluster.history import TokenHistory
from pipeinfer.cluster.wire import Buffer, RowFlag, Transaction
from pipeinfer.drafting import guess_next
from pipeinfer.interfaces import Batch, FloatArray, StageModel
from pipeinfer.refining import encode_guesses
from pipeinfer.runs import NO_TOKEN
from pipeinfer.sampling import SamplingParams, choose
from pipeinfer.trace import NO_TRACE, Tracer


@dataclass(slots=True)
class StageStats:
    """What a stage did, for the statistics at the end."""

    n_runs: int = 0
    n_skipped: int = 0  # cancelled runs that it never began
    n_stopped: int = 0  # cancelled runs that it left between layers
    n_layers_saved: int = 0  # layers that cancellation spared it
    busy_s: float = 0.0


class StageWorker:
    """One stage, first or not, last or not. `is_cancelled(run_id)` is asked before a run and between layers.

    `n_layers` is the model's, for the statistics.
    """

    UNIT = "run"
    """What a timeline calls a transaction."""

    def __init__(
        self,
        model: StageModel,
        is_cancelled: Callable[[int], bool],
        clock: Callable[[], float],
        is_first: bool,
        tracer: Tracer = NO_TRACE,
        n_layers: int = 0,
    ) -> None:
        self.model, self.clock, self.is_first, self.tracer = model, clock, is_first, tracer
        self.n_layers, self._n_asked = n_layers, 0
        self.is_cancelled = is_cancelled
        self.stats = StageStats()
        self._sampling: dict[int, SamplingParams] = {}
        self._history: TokenHistory | None = None  # kept only once a request looks back

    def process(self, transaction: Transaction) -> list[int]:
        """Bring the transaction to the state in which the next stage wants it; on the last stage return the verdict.

        The verdict has a token for each row, NO_TOKEN where none was wanted (a draft's has guesses); it is empty after
        a cancellation, which `transaction.cancelled` tells. Other stages return an empty list and leave the residual in
        `activations`.
        """
        start_s = self.clock()
        self._open(transaction.opens)
        self.model.apply(transaction.ops)
        if self._history:
            self._history.apply(transaction.ops)
        verdict: list[int] = []
        if not transaction.cancelled and self.is_cancelled(transaction.run_id):
            transaction.cancel()
        if transaction.cancelled:
            self.stats.n_skipped += 1
            self.stats.n_layers_saved += self.n_layers
        else:
            self._n_asked = 0
            verdict = self._evaluate(transaction)
            if transaction.cancelled:
                self.stats.n_stopped += 1
                self.stats.n_layers_saved += max(0, self.n_layers - self._n_asked)
        self.stats.n_runs += 1
        busy_s = self.clock() - start_s
        transaction.took(busy_s)
        self.stats.busy_s += busy_s
        self.tracer.evaluated(start_s, self.UNIT, transaction.run_id, transaction.n_rows, transaction.cancelled)
        return verdict

    def _open(self, requests: dict[int, SamplingParams]) -> None:
        self._sampling.update(requests)
        if self.model.is_last and self._history is None and any(params.looks_back for params in requests.values()):
            self._history = TokenHistory()

    def _evaluate(self, transaction: Transaction) -> list[int]:
        seqs = transaction.seqs
        alive = self._alive(transaction, seqs)
        if len(alive) < transaction.n_rows:
            transaction.rows[sorted(set(range(transaction.n_rows)) - set(alive)), 4] |= RowFlag.DROPPED
        result = (
            self._evaluate_rows(transaction, alive, seqs) if alive else np.empty((0, self.model.n_embd), np.float32)
        )
        if result is None:
            transaction.cancel()
            return []
        if self.model.is_last:
            return self._verdict(transaction, result, seqs)
        activations = transaction.activations
        if len(alive) == transaction.n_rows:
            activations[:] = result
        else:
            activations[:] = 0.0
            activations[alive] = result
        return []

    def _alive(self, transaction: Transaction, seqs: Sequence[tuple[int, ...]]) -> list[int]:
        """Rows that can be evaluated here: not dropped before, and their prefix was evaluated on this stage.

        A row lacks its prefix only if a cancelled run was skipped, and then it descends from that run's dead guesses.
        """
        ends: dict[int, int] = {}
        alive = []
        for index, (_, _, position, seq, flags) in enumerate(transaction.rows.tolist()):
            end = ends[seq] if seq in ends else self.model.next_position(seq)
            if end == position and not flags & RowFlag.DROPPED:
                alive.append(index)
                for owner in seqs[index]:
                    ends[owner] = position + 1
        return alive

    def _evaluate_rows(
        self, transaction: Transaction, alive: list[int], seqs: Sequence[tuple[int, ...]]
    ) -> FloatArray | None:
        rows, hidden = transaction.rows, None if self.is_first else transaction.activations
        if len(alive) < transaction.n_rows:
            rows, seqs = rows[alive], [seqs[index] for index in alive]
            hidden = None if hidden is None else hidden[alive]
        wanted = (rows[:, 4] & RowFlag.WANTED).astype(bool)
        batch = Batch(rows[:, 1], rows[:, 2], list(seqs), hidden, wanted, transaction.n_prompt)
        return self.model.evaluate(batch, lambda: self._asked(transaction.run_id))

    def _asked(self, run_id: int) -> bool:
        """Between two layers: is the run cancelled?"""
        self._n_asked += 1
        return self.is_cancelled(run_id)

    def _verdict(self, transaction: Transaction, logits: FloatArray, seqs: Sequence[tuple[int, ...]]) -> list[int]:
        words: list[int] = []
        next_logits = iter(logits)
        for (request, token, position, seq, flags), owners in zip(transaction.rows.tolist(), seqs, strict=True):
            if self._history and not flags & RowFlag.DROPPED:
                self._history.add(owners, token)
            if flags & RowFlag.WANTED and not flags & RowFlag.DROPPED:
                params = self._sampling[request]
                history = self._history.last(seq, position + 1, params.looks_back) if self._history else ()
                words += self._answer(next(next_logits), params, position + 1, history)
            else:
                words += self._no_answer
        return words

    _no_answer: Sequence[int] = (NO_TOKEN,)

    def _answer(
        self, logits: FloatArray, params: SamplingParams, position: int, history: Sequence[int]
    ) -> Sequence[int]:
        """What the verdict says of one row: the target's token at `position`."""
        return (choose(logits, params, position, history),)


class DraftWorker(StageWorker):
    """A larger draft, whole: its verdicts are not one token a row but `width` guesses, as `encode_guesses` has them."""

    UNIT = "question"

    def __init__(
        self,
        model: StageModel,
        clock: Callable[[], float],
        width: int,
        couple: bool,
        tracer: Tracer = NO_TRACE,
        n_layers: int = 0,
    ) -> None:
        super().__init__(model, lambda run_id: False, clock, True, tracer, n_layers)
        self.width, self.couple = width, couple
        self._no_answer = encode_guesses([], width)

    def _answer(
        self, logits: FloatArray, params: SamplingParams, position: int, history: Sequence[int]
    ) -> Sequence[int]:
        return encode_guesses(guess_next(logits, params, position, history, self.width, self.couple), self.width)


def room_for(message: Buffer, n_embd: int) -> Transaction:
    """A transaction with the message's content and room for the activations that a first stage adds."""
    n_bytes = Transaction(message, n_embd).n_bytes_full
    buffer = np.empty(n_bytes, np.uint8)
    buffer[: len(message)] = message
    return Transaction(buffer, n_embd)
