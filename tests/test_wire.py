"""A run survives its way through a buffer, whatever is in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.cluster.stage import room_for
from pipeinfer.cluster.wire import Kind, RowFlag, Transaction, decode_verdict, encode, encode_shutdown, encode_verdict
from pipeinfer.runs import POSITION_END, KvOp, OpKind, Row, Run, Verdict
from pipeinfer.sampling import SamplingParams

ids = st.integers(0, 2**31 - 1)
ops = st.builds(KvOp, st.sampled_from(OpKind), ids, ids, ids, ids | st.just(POSITION_END))
rows = st.builds(Row, ids, ids, ids, st.lists(ids, min_size=1, max_size=5).map(tuple), st.booleans())
params = st.builds(
    SamplingParams,
    st.integers(0, 2**32 - 1), st.floats(0, 5), st.integers(-1, 10**6), st.floats(0, 1), st.floats(0, 1),
    st.integers(0, 4096), st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2),
)  # fmt: skip
runs = st.builds(
    Run, ids, st.lists(rows, max_size=8), st.lists(ops, max_size=8), st.dictionaries(ids, params, max_size=3), ids
)


@given(runs, st.integers(1, 7))
def test_run_survives(run: Run, n_embd: int) -> None:
    transaction = room_for(encode(run), n_embd)
    assert (transaction.kind, transaction.run_id, transaction.cancelled) == (Kind.RUN, run.id, False)
    assert transaction.ops == run.ops and transaction.opens == run.opens and transaction.n_prompt == run.n_prompt
    assert transaction.seqs == [row.seqs for row in run.rows]
    for row, (request, token, position, _, flags) in zip(run.rows, transaction.rows.tolist(), strict=True):
        assert (row.request, row.token, row.position, row.wanted) == (
            request,
            token,
            position,
            bool(flags & RowFlag.WANTED),
        )
    transaction.activations[:] = np.arange(len(run.rows) * n_embd, dtype=np.float32).reshape(-1, n_embd)
    received = Transaction(np.concatenate([transaction.message, np.full(9, 7, np.uint8)]), n_embd)
    assert np.array_equal(received.activations, transaction.activations)
    received.cancel()
    assert Transaction(received.message, n_embd).cancelled
    assert len(received.message) == len(encode(run)), "a cancelled run travels without activations"


@given(ids, st.lists(st.integers(-1, 2**31 - 1), max_size=9), st.booleans(), st.integers(0, 2**31 - 1))
def test_verdict_survives(run_id: int, tokens: list[int], cancelled: bool, us: int) -> None:
    verdict = Verdict(run_id, tuple(tokens), cancelled, 1e-6 * us)
    assert decode_verdict(np.concatenate([encode_verdict(verdict), np.zeros(8, np.uint8)])) == verdict


def test_the_slowest_stage_is_known_at_the_end() -> None:
    transaction = Transaction(encode(Run(1, [])), 4)
    for seconds in (0.002, 0.005, 0.001):
        transaction = Transaction(transaction.message.copy(), 4)
        transaction.took(seconds)
    assert transaction.slowest_s == pytest.approx(0.005)
    transaction.took(1e9)
    assert decode_verdict(encode_verdict(Verdict(1, (), False, 1e9))).slowest_s == transaction.slowest_s


def test_shutdown() -> None:
    assert Transaction(encode_shutdown(), 4).kind is Kind.SHUTDOWN
