"""Tokens that threads choose beside the last stage are those that it would have chosen, whatever it does meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from pipeinfer.cluster.stages.runs import N_BUFFERS, LocalPrunings, Samplers
from pipeinfer.cluster.stages.stage import StageWorker, room_for
from pipeinfer.cluster.verdicts import ScoredToken
from pipeinfer.cluster.wire import encode
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, Opening, Row, Run, Verdict
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.types import NO_TOKEN, FloatArray
from tests.support.delayed import run_delayed
from tests.support.jobs import run_json

N_VOCAB = 20_000
TEXT = ["-p", "def read_lines(path):\n", "-n", "64", "--ignore-eos", "--seed", "11", "--temp", "0.9"]


class OneBuffer:
    """A model whose logits are always in the same place, as libllama's are."""

    n_embd, n_cells, n_vocab, is_last = 4, 1000, N_VOCAB, True

    def __init__(self) -> None:
        self.logits = np.zeros((64, N_VOCAB), np.float32)
        self.end = 0

    def apply(self, ops: Sequence[KvOp]) -> None: ...

    def next_position(self, seq: int) -> int:
        return self.end

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        self.end += len(batch.positions)
        self.logits[:] = np.nan  # what comes in is written over what was there
        wanted = np.flatnonzero(batch.wanted)
        for index, row in enumerate(wanted):
            rng = np.random.default_rng(int(batch.positions[row]))
            self.logits[index] = rng.normal(0, 2, N_VOCAB)
        return self.logits[: len(wanted)]


def worker_of(model: Any) -> StageWorker:
    return StageWorker(model, time.monotonic, is_first=True)


def runs(params: SamplingParams, n_runs: int = 12, n_rows: int = 5) -> list[Run]:
    """Each of as many rows, one of which nobody asks about."""
    found = []
    for number in range(n_runs):
        first = number * n_rows
        rows = [Row(1, 3, first + index, (0,), n_wanted=int(index != 2)) for index in range(n_rows)]
        found.append(Run(number + 1, rows, opens={1: Opening(params, 1)} if not number else {}))
    return found


def verdict_of(worker: StageWorker, run: Run, samplers: Samplers | None = None) -> Any:
    return worker.process(room_for(encode(run), 4), LocalPrunings(), samplers)


def scores_of(verdict: Verdict) -> list[Any]:
    return [vars(token) for token in verdict.tokens if isinstance(token, ScoredToken)]


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=5),
        SamplingParams(seed=5, top_k=0, repeat_penalty=1.3),
        SamplingParams(seed=5, temp=0.0),
        SamplingParams(seed=5, temp=0.0, repeat_penalty=1.3, n_logprobs=3),
    ],
)
def test_the_same_verdicts_in_the_same_order(params: SamplingParams, n_threads: int) -> None:
    alone = worker_of(OneBuffer())
    expected = [verdict_of(alone, run) for run in runs(params)]
    worker, found = worker_of(OneBuffer()), list[Verdict]()
    samplers = Samplers(n_threads, lambda: True)
    for run in runs(params):
        assert verdict_of(worker, run, samplers) is None
        while (verdict := samplers.ready()) is not None:
            found.append(verdict)
    samplers.close()
    while (verdict := samplers.ready()) is not None:
        found.append(verdict)
    assert [(verdict.run_id, verdict.tokens) for verdict in found] == [
        (verdict.run_id, verdict.tokens) for verdict in expected
    ]
    assert [scores_of(verdict) for verdict in found] == [scores_of(verdict) for verdict in expected]
    assert len(scores_of(found[0])) == (4 if params.n_logprobs >= 0 else 0)
    assert found[0].tokens[2] == NO_TOKEN and len(set(found[0].tokens)) > 2
    assert worker.stats.n_for_samplers == (0 if params.temp == 0.0 and params.n_logprobs < 0 else 12)


def test_who_has_nothing_to_do_answers_at_once() -> None:
    worker = worker_of(OneBuffer())
    samplers = Samplers(1, lambda: False)
    assert [verdict_of(worker, run, samplers).run_id for run in runs(SamplingParams(seed=5), 3)] == [1, 2, 3]
    assert worker.stats.n_for_samplers == 0


def test_a_stage_that_is_too_far_ahead_waits() -> None:
    samplers, answered = Samplers(1, lambda: True), []
    logits = np.zeros((1, 8), np.float32)

    def answer(index: int, row: FloatArray) -> None:
        time.sleep(0.02)
        answered.append(float(row[0]))

    for number in range(N_BUFFERS + 3):
        logits[0, 0] = number
        samplers.submit(logits, [0], answer, lambda: None)
        assert len(answered) > number - N_BUFFERS
    samplers.close()
    assert answered == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_what_an_answer_raises_is_heard() -> None:
    samplers = Samplers(1, lambda: True)

    def answer(index: int, row: FloatArray) -> None:
        raise ValueError("no token")

    samplers.submit(np.zeros((1, 8), np.float32), [0], answer, lambda: None)
    samplers.close()
    with pytest.raises(ValueError, match="no token"):
        samplers.ready()


def test_real_ranks_choose_the_same_text() -> None:
    plain = run_json(2, [*TEXT, "--policy", "iterative", "--sampler-threads", "0"])
    assert plain["ranks"][1]["runs_left_to_samplers"] == 0
    result = run_delayed(3, [*TEXT, "--width", "8", "-ps", "0", "--sampler-threads", "2"], seed=4)
    assert result["tokens"] == plain["tokens"]
    assert result["ranks"][2]["runs_left_to_samplers"] > 0
