"""A draft's guesses, from its logits. Knows no policy and no pipeline."""

from collections.abc import Callable, Sequence

import numpy as np

from pipeinfer.core.runs import Guess
from pipeinfer.core.samplers import largest
from pipeinfer.core.sampling import SamplingParams, adjust, likeliest_left, perturbed
from pipeinfer.core.types import Allowed, FloatArray


def likeliest(logits: FloatArray, width: int) -> list[Guess]:
    """The `width` most likely tokens of one row of logits (n_vocab,), most likely first."""
    ids = largest(logits, width) if width < len(logits) else np.arange(len(logits))
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    weights = np.exp(logits - logits[ids[0]])
    total = float(weights.sum())
    return [Guess(int(token), float(weights[token]) / total) for token in ids]


def coupled(logits: FloatArray, width: int, params: SamplingParams, position: int) -> list[Guess]:
    """The `width` tokens that the target would be likeliest to sample if its logits (n_vocab,) were these. The target
    keys its noise by (seed, position), so the draft can use the same noise (Gumbel-max coupling): they agree far more
    often than two independent samples. Probabilities are the softmax of the perturbed scores."""
    ids, scores = perturbed(logits, params, position)
    weights = np.exp(scores - scores.max())
    order = np.argsort(-scores, kind="stable")[:width]
    return [Guess(int(ids[index]), float(weights[index] / weights.sum())) for index in order]


def guess_next(
    logits: FloatArray,
    params: SamplingParams,
    position: int,
    history: Sequence[int],
    width: int,
    couple: bool,
    allowed: Allowed | None = None,
) -> list[Guess]:
    """A draft's guesses for the token at `position`, made as the target chooses: from its logits (n_vocab,), which are
    changed in place, and `history`, the newest tokens before it."""
    adjust(logits, params, position, history)
    guesses = _guesses(logits, params, position, width, couple)
    if allowed is None:
        return guesses
    if guesses and allowed.has(guesses[0].token):
        return guesses[:1] + [guess for guess in guesses[1:] if allowed.has(guess.token)]
    allowed.restrict(logits)
    return [guess for guess in _guesses(logits, params, position, width, couple) if guess.probability > 0]


def _guesses(logits: FloatArray, params: SamplingParams, position: int, width: int, couple: bool) -> list[Guess]:
    if couple and not params.is_greedy:
        return coupled(logits, width, params, position)
    guesses = likeliest(likeliest_left(logits, params, position), width)
    return [guess for guess in guesses if guess.probability > 0] if params.may_cut_best else guesses


def to_the_end(interrupted: Callable[[], bool]) -> Callable[[], bool]:
    """Calls `interrupted` as often, so that it can do its work, and never stops."""
    return lambda: interrupted() and False
