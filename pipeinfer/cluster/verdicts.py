"""What the last stage sends to the head, in bytes, as the table in `wire` says. Knows no MPI and no model."""

import math
import pickle
from collections.abc import Sequence
from itertools import islice, starmap
from typing import NamedTuple

import numpy as np

from pipeinfer.cluster.wire import (
    INT,
    LONG,
    SHORT,
    Buffer,
    WireType,
    activation_bytes,
    joined,
    microseconds,
    packed,
    read_activations,
    rounded,
    view,
)
from pipeinfer.core.runs import Guess, GuessVerdict, Verdict
from pipeinfer.core.samplers import largest, total_weight
from pipeinfer.core.types import FloatArray

MAX_TOP = 20  # most likely tokens that a request may want
LEAST_LOGPROB = -9999.0  # the least log-probability, also of probability 0: JSON has no infinity
N_SCORED_BYTES = 48 + 32 * MAX_TOP  # of a token with log-probabilities, at most
VERDICT_COUNTS = [("n_features", SHORT), ("slowest_us", INT), ("n_rows", INT), ("n_more", INT)]
VERDICT = np.dtype([("run_id", LONG), ("cancelled", SHORT), *VERDICT_COUNTS])
"""`n_features`: of a row. `n_more`: a draft's guesses, or the bytes of the target's log-probabilities."""

GUESS = np.dtype([("token", LONG), ("probability", "<f8")])


class Likely(NamedTuple):
    """A token, and the natural logarithm of its probability."""

    token: int
    logprob: float


class Comparison(NamedTuple):
    """A model's prediction of one token of a text, compared with a base's."""

    divergence: float  # Kullback and Leibler's, of the model's probabilities from the base's, in nats
    base_logprob: float  # of the text's token
    same_top: bool  # both have the same likeliest token


class ScoredToken(int):
    """A chosen token with its log-probability and the most likely tokens, in order. It is an int, so that it passes
    from the last stage through the tree like any other token. `comparison`: with a base, if there is one."""

    logprob: float
    top: tuple[Likely, ...]
    comparison: Comparison | None

    def __new__(
        cls, token: int, logprob: float, top: Sequence[Likely], comparison: Comparison | None = None
    ) -> "ScoredToken":
        self = super().__new__(cls, token)
        self.logprob, self.top, self.comparison = logprob, tuple(top), comparison
        return self


def score_token(logits: FloatArray, token: int, n_top: int) -> ScoredToken:
    """The token with the log-softmax of logits (n_vocab,) at it and at the `n_top` most likely, ties by id. The logits
    are the model's own, before temperature, penalties, biases and grammars."""
    greatest = logits.max()
    log_total = float(greatest) + math.log(total_weight(logits, greatest))

    def logprob(id: int) -> float:
        return max(LEAST_LOGPROB, float(logits[id]) - log_total)

    ids = largest(logits, n_top) if 0 < n_top < len(logits) else np.arange(len(logits) if n_top else 0)
    ordered = ids[np.argsort(-logits[ids], kind="stable")].tolist()
    return ScoredToken(token, logprob(token), [Likely(id, logprob(id)) for id in ordered])


def verdict_bytes(n_rows: int, n_guesses: int = 0, n_scored: int = 0, n_features: int = 0) -> int:
    """`n_scored`: rows with MAX_TOP log-probabilities. `n_features`: numbers of a row."""
    n_bytes = VERDICT.itemsize + INT.itemsize * n_rows + GUESS.itemsize * n_guesses
    n_bytes += activation_bytes(n_rows, n_features, WireType.BF16)
    return n_bytes + (N_SCORED_BYTES * (n_scored + 1) if n_scored else 0)


def encode_verdict(verdict: Verdict | GuessVerdict) -> Buffer:
    features, n_features = b"", 0
    if isinstance(verdict, Verdict):
        numbers: Sequence[int] = verdict.tokens
        guesses = []
        if verdict.features is not None:
            features, n_features = rounded(verdict.features).tobytes(), verdict.features.shape[1]
    else:
        numbers = list(map(len, verdict.guesses))
        guesses = [(guess.token, guess.probability) for of_row in verdict.guesses for guess in of_row]
    tokens = {row: token for row, token in enumerate(numbers) if isinstance(token, ScoredToken)}
    by_row = {row: (token.logprob, token.top, token.comparison) for row, token in tokens.items()}
    scores = pickle.dumps(by_row, protocol=3) if by_row else b""
    n_more = len(guesses) or len(scores)
    header = verdict.run_id, verdict.cancelled, n_features, microseconds(verdict.slowest_s), len(numbers), n_more
    return joined(packed(VERDICT, header), packed(INT, numbers), packed(GUESS, guesses), features, scores)


def decode_verdict(message: Buffer) -> Verdict:
    """Inverse of `encode_verdict` for a target's; the buffer may be longer than the message."""
    run_id, cancelled, n_features, us, n_rows, n_score_bytes = np.ndarray((), VERDICT, message).tolist()
    tokens: list[int] = view(message, INT, VERDICT.itemsize, n_rows).tolist()
    features, end = None, verdict_bytes(n_rows, n_features=n_features)
    if n_features:
        features = read_activations(message[verdict_bytes(n_rows) : end], n_features, WireType.BF16)
    if n_score_bytes:
        for row, values in pickle.loads(message[end:].data).items():
            tokens[row] = ScoredToken(tokens[row], *values)
    return Verdict(run_id, tuple(tokens), bool(cancelled), 1e-6 * us, features)


def decode_guess_verdict(message: Buffer) -> GuessVerdict:
    """The same for a draft's."""
    run_id, cancelled, _, us, n_rows, n_guesses = np.ndarray((), VERDICT, message).tolist()
    counts = view(message, INT, VERDICT.itemsize, n_rows).tolist()
    guesses = starmap(Guess, view(message, GUESS, verdict_bytes(n_rows), n_guesses).tolist())
    return GuessVerdict(run_id, tuple(list(islice(guesses, n)) for n in counts), bool(cancelled), 1e-6 * us)
