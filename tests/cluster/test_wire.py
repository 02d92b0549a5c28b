"""A run survives its way through a buffer, whatever is in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.cluster.stages.stage import room_for
from pipeinfer.cluster.verdicts import (
    MAX_TOP,
    Likely,
    ScoredToken,
    decode_guess_verdict,
    decode_verdict,
    encode_verdict,
    verdict_bytes,
)
from pipeinfer.cluster.wire import (
    ALL_ROWS,
    N_PRUNINGS_BYTES,
    Kind,
    Transaction,
    WireType,
    bytes_before_activations,
    decode_prunings,
    encode,
    encode_last_prunings,
    encode_order,
    encode_prunings,
    text_bytes,
)
from pipeinfer.core.blocks import Span
from pipeinfer.core.runs import Guess, GuessVerdict, KvOp, Opening, OpKind, Row, Run, Verdict
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.types import POSITION_END

ids = st.integers(0, 2**31 - 1)
ops = st.builds(KvOp, st.sampled_from(OpKind), ids, ids, ids, ids | st.just(POSITION_END))
rows = st.builds(Row, ids, ids, ids, st.lists(ids, min_size=1, max_size=5).map(tuple), st.integers(0, 255))
choices = (st.integers(0, 2**32 - 1), st.floats(0, 5), st.integers(-1, 10**6), st.floats(0, 1), st.floats(0, 1))
penalties = (st.integers(0, 4096), st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2))
names = ("dry_breakers", "sampler_order", "ends", "logit_bias", "grammar", "reasoning")
texts = {name: st.integers(0, 999).map("é".__mul__) for name in names}
params = st.builds(SamplingParams, *choices, *penalties, **texts)
adapters = st.none() | st.lists(st.tuples(ids, st.floats(allow_nan=False)), max_size=2).map(tuple)
runs = st.builds(
    Run,
    ids,
    st.lists(rows, max_size=8),
    st.lists(ops, max_size=8),
    st.dictionaries(ids, st.builds(Opening, params, ids, adapters), max_size=3),
    st.none() | st.builds(Span, ids, st.integers(1, 2**31 - 1)),
)


@given(runs, st.integers(1, 7))
def test_run_survives(run: Run, n_embd: int) -> None:
    transaction = room_for(encode(run), n_embd)
    assert (transaction.kind, transaction.run_id, transaction.cancelled) == (Kind.RUN, run.id, False)
    assert transaction.ops == run.ops and transaction.opens == run.opens and transaction.span == run.span
    assert transaction.seqs == [row.seqs for row in run.rows]
    for row, sent in zip(run.rows, transaction.sent_rows, strict=True):
        assert (row.request, row.token, row.position) == (sent.request, sent.token, sent.position)
        assert row.n_wanted == sent.n_wanted and not sent.dropped
    n_extra = sum(len(row.seqs) - 1 for row in run.rows)
    bare_bytes = bytes_before_activations(len(run.ops), len(run.rows), n_extra, len(run.opens))
    assert len(encode(run)) <= bare_bytes + sum(text_bytes(new.sampling) for new in run.opens.values())
    assert run.opens or len(encode(run)) == bare_bytes
    transaction.activations = np.arange(len(run.rows) * n_embd, dtype=np.float32).reshape(-1, n_embd)
    received = Transaction(np.concatenate([transaction.message, np.full(9, 7, np.uint8)]), n_embd)
    assert np.array_equal(received.activations, transaction.activations)
    received.cancel()
    assert Transaction(received.message, n_embd).cancelled
    assert len(received.message) == len(encode(run)), "a cancelled run travels without activations"


@pytest.mark.parametrize("wire_type", list(WireType))
@pytest.mark.parametrize("logprobs", [False, True])
def test_features_of_all_stages_come_with_the_verdict(wire_type: WireType, logprobs: bool) -> None:
    """Each stage adds its layers' before its activations; a cancelled run leaves them."""
    rng, rows, n_embd = np.random.default_rng(0), [Row(0, 1, at, (3,)) for at in range(5)], 6
    layers = rng.integers(0, 200, (3, 5, n_embd)).astype(np.float32)  # what bf16 holds
    transaction, n_bare = room_for(encode(Run(7, rows)), n_embd, wire_type, 2), len(encode(Run(7, rows)))
    assert transaction.features is None
    transaction.add_features(layers[:2])
    transaction.activations = layers[0]
    again = room_for(transaction.message.copy(), n_embd, wire_type, 1)
    assert np.array_equal(again.activations, layers[0])
    again.add_features(layers[2:])
    features = again.features
    assert features is not None and np.array_equal(features, layers.swapaxes(0, 1).reshape(5, -1))
    tokens = tuple(ScoredToken(at, -0.5, [Likely(at, -0.5)]) if logprobs else at for at in range(5))
    message = encode_verdict(Verdict(7, tokens, features=features))
    found = decode_verdict(np.concatenate([message, np.zeros(9, np.uint8)]))
    assert found.tokens == tokens and found.features is not None and np.array_equal(found.features, features)
    assert logprobs or len(message) == verdict_bytes(5, n_features=3 * n_embd)
    again.cancel()
    assert len(again.message) == n_bare


def test_a_run_of_operations_alone_has_no_features() -> None:
    transaction = room_for(encode(Run(7, [])), 6, n_features=2)
    transaction.add_features(np.empty((2, 0, 6), np.float32))
    assert transaction.features is not None and transaction.features.shape == (0, 12)
    assert decode_verdict(encode_verdict(Verdict(7, (), features=transaction.features))) == Verdict(7, ())


def test_what_a_stage_changes_is_in_the_message() -> None:
    transaction = Transaction(encode(Run(7, [Row(0, 1, 2, (3, 4)), Row(0, 5, 6, (3,))])), 4)
    transaction.rows["dropped"][[1]] = True
    again = Transaction(transaction.buffer, 4)
    assert [(row.n_wanted, row.dropped) for row in again.sent_rows] == [(1, 0), (1, 1)]


@given(ids, st.lists(st.integers(-1, 2**31 - 1), max_size=9), st.booleans(), st.integers(0, 2**31 - 1))
def test_verdict_survives(run_id: int, tokens: list[int], cancelled: bool, us: int) -> None:
    verdict = Verdict(run_id, tuple(tokens), cancelled, 1e-6 * us)
    assert decode_verdict(np.concatenate([encode_verdict(verdict), np.zeros(8, np.uint8)])) == verdict


scores = st.builds(
    ScoredToken, ids, st.floats(-9999, 0), st.lists(st.builds(Likely, ids, st.floats(-9999, 0)), max_size=MAX_TOP)
)


@given(st.lists(st.integers(-1, 2**31 - 1) | scores, max_size=9))
def test_log_probabilities_survive_and_cost_nobody_else_a_byte(tokens: list[int]) -> None:
    message = encode_verdict(Verdict(3, tuple(tokens), False, 1e-6))
    n_scored = sum(isinstance(token, ScoredToken) for token in tokens)
    assert len(message) <= verdict_bytes(len(tokens), n_scored=n_scored)
    assert n_scored or len(message) == verdict_bytes(len(tokens))
    found = decode_verdict(np.concatenate([message, np.zeros(8, np.uint8)])).tokens
    assert list(found) == tokens and [vars(token) for token in found if isinstance(token, ScoredToken)] == [
        vars(token) for token in tokens if isinstance(token, ScoredToken)
    ]


guesses = st.lists(st.builds(Guess, ids, st.floats(0, 1)), max_size=4)


@given(ids, st.lists(guesses, max_size=9), st.booleans())
def test_guesses_survive(run_id: int, rows: list[list[Guess]], cancelled: bool) -> None:
    verdict = GuessVerdict(run_id, tuple(rows), cancelled, 1e-6)
    message = encode_verdict(verdict)
    assert len(message) == verdict_bytes(len(rows), sum(map(len, rows)))
    assert decode_guess_verdict(np.concatenate([message, np.zeros(8, np.uint8)])) == verdict


@given(st.dictionaries(st.integers(0, 2**63 - 1), st.none() | st.lists(ids, min_size=1, max_size=99), max_size=40))
def test_prunings_survive_in_messages_of_bounded_size(rows: dict[int, list[int] | None]) -> None:
    found: dict[int, list[int] | None] = {}
    for message in encode_prunings(rows):
        assert len(message) <= N_PRUNINGS_BYTES
        heard = decode_prunings(np.concatenate([message, np.full(8, 9, np.uint8)]))
        assert heard
        for run_id, row in heard:
            found[run_id] = None if row == ALL_ROWS else [*(found.get(run_id) or []), row]
    assert found == rows
    assert not decode_prunings(encode_last_prunings())


def test_the_slowest_stage_is_known_at_the_end() -> None:
    transaction = Transaction(encode(Run(1, [])), 4)
    for seconds in (0.002, 0.005, 0.001):
        transaction = Transaction(transaction.message.copy(), 4)
        transaction.took(seconds)
    assert transaction.slowest_s == pytest.approx(0.005)
    transaction.took(1e9)
    assert decode_verdict(encode_verdict(Verdict(1, (), False, 1e9))).slowest_s == transaction.slowest_s


def test_shutdown() -> None:
    for kind in (Kind.SHUTDOWN, Kind.REPORT):
        assert Transaction(encode_order(kind), 4).kind is kind
