"""Choose a token from logits: the same choice for the same (logits, seed, position), wherever and whenever asked.

Knows no tree and no model. A choice costs about a look at every logit: nothing is sorted and no noise is drawn but for
the tokens that can be chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeinfer.noise import gumbel, gumbel_bound, random_words

Ids = npt.NDArray[np.intp]
Logits = npt.NDArray[np.float32]

BLOCKS_A_TOKEN = 32
"""`largest` looks at so many blocks for each token wanted: few others are then as large as what it finds."""

BLOCK = 4096  # weights added up at once
CHUNK = 16_384  # candidates scored at once: what is computed of them stays in the processor's cache

N_EXACT = 512  # candidates whose noise is computed without asking first whether it can matter

BELOW_BEST = 8.0
"""Of many candidates those whose scores lie further below the best are left out: each is less than e^-8 as likely."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """llama.cpp's meanings and defaults. `temp` <= 0 is greedy; `top_k` <= 0, `top_p` >= 1, `min_p` <= 0 switch off.

    The penalties look at the last `repeat_last_n` tokens, the prompt's included.
    """

    seed: int = 0
    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @property
    def looks_back(self) -> int:
        """How many of the newest tokens a choice depends on."""
        off = self.repeat_penalty == 1.0 and self.frequency_penalty == 0.0 and self.presence_penalty == 0.0
        return 0 if off else self.repeat_last_n


def choose(logits: Logits, params: SamplingParams, position: int, history: Sequence[int] = ()) -> int:
    """The token for `position` given its logits (n_vocab,): greedy, or a Gumbel-max sample of the kept candidates.

    `history` is what `penalise` wants; the logits are penalised in place.
    """
    penalise(logits, params, history)
    if params.temp <= 0.0:
        return int(np.argmax(logits))
    ids, scores = perturbed(logits, params, position)
    return int(ids[np.argmax(scores)])


def penalise(logits: Logits, params: SamplingParams, history: Sequence[int]) -> None:
    """Change logits (n_vocab,) for the tokens of `history`, which has `params.looks_back` at most."""
    if not history or not params.looks_back:
        return
    ids, counts = np.unique(np.asarray(history), return_counts=True)
    seen = logits[ids]
    seen = np.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
    logits[ids] = seen - counts * params.frequency_penalty - params.presence_penalty


def perturbed(logits: Logits, params: SamplingParams, position: int) -> tuple[Ids, npt.NDArray[np.float64]]:
    """Candidates and their scores, the highest of which is the sample (Gumbel-max), for `params.temp` above 0.

    All candidates if they are few, else those that come near the best.
    """
    ids = candidates(logits, params)
    values = logits if len(ids) == len(logits) else logits[ids]
    if len(ids) > N_EXACT:
        return contenders(ids, values, params, position)
    return ids, scores(values, random_words(params.seed, position, ids), params.temp)


def scores(values: Logits, words: npt.NDArray[np.uint64], temp: float) -> npt.NDArray[np.float64]:
    """Logits over the temperature, with the noise of their random words."""
    return values.astype(np.float64) / temp + gumbel(words)


def contenders(ids: Ids, values: Logits, params: SamplingParams, position: int) -> tuple[Ids, npt.NDArray[np.float64]]:
    """The candidates that are not `BELOW_BEST` below the best, and some others, with their scores."""
    reached, found = -np.inf, []
    for start in range(0, len(ids), CHUNK):
        part = slice(start, start + CHUNK)
        words = random_words(params.seed, position, ids[part])
        bounds = values[part] * np.float32(1.0 / params.temp) + gumbel_bound(words)
        hopeful = slice(best := int(np.argmax(bounds)), best + 1)
        reached = max(reached, float(scores(values[part][hopeful], words[hopeful], params.temp)[0]))
        near = np.flatnonzero(bounds >= np.float32(reached - BELOW_BEST))
        found.append((ids[part][near], scores(values[part][near], words[near], params.temp)))
    return np.concatenate([some for some, _ in found]), np.concatenate([score for _, score in found])


# -- candidates


def candidates(logits: Logits, params: SamplingParams) -> Ids:
    """Token ids left by top-k, then top-p, then min-p (llama.cpp's order), ascending; ties go to the smaller id."""
    if 0 < params.top_k < len(logits):
        ids = largest(logits, params.top_k)
        return ids[likely(logits[ids], params)]
    return likely(logits, params)


def largest(logits: Logits, n: int) -> Ids:
    """The ids of the `n` largest of more logits (n_vocab,), ascending; ties go to the smaller id."""
    n_blocks = BLOCKS_A_TOKEN * n
    n_rows = len(logits) // n_blocks
    if n_rows < 2:
        return _first(logits, n, np.partition(logits, -n)[-n])
    # the n-th largest of the maxima of blocks is reached by n tokens at least, and hardly more
    maxima = logits[: n_rows * n_blocks].reshape(n_rows, n_blocks).max(axis=0)
    ids = np.flatnonzero(logits >= np.partition(maxima, -n)[-n])
    values = logits[ids]
    return ids[_first(values, n, np.partition(values, -n)[-n])]


def _first(values: Logits, n: int, least: np.float32) -> Ids:
    """Indices of the `n` largest, ascending, the last of which is `least`; ties go to the smaller index."""
    found = np.flatnonzero(values >= least)
    if len(found) == n:
        return found
    ties = np.flatnonzero(values[found] == least)
    return np.delete(found, ties[n - len(found) :])


def likely(values: Logits, params: SamplingParams) -> Ids:
    """Indices of the logits that top-p and then min-p leave, ascending."""
    top = values.max()
    if params.min_p <= 0.0:
        return nucleus(values, top, params.top_p) if params.top_p < 1.0 else np.arange(len(values))
    # what top-p leaves does not depend on what is less likely, so min-p may go first
    kept = np.flatnonzero(values >= top + np.float32(np.log(params.min_p)))
    if params.top_p >= 1.0:
        return kept
    weights = _weights(values - top)
    return kept[nucleus(values[kept], top, params.top_p, float(weights.sum(dtype=np.float64)))]


def _weights(values: Logits) -> Logits:
    """What the tokens' probabilities are proportional to, in place of their logits."""
    return np.exp(values, out=values)


def nucleus(values: Logits, top: np.float32, top_p: float, total: float | None = None) -> Ids:
    """Indices, ascending, of the fewest largest logits whose weights together reach `top_p` of `total`, or of all.

    A weight is e to what the logit lies below `top`. `total`: what all weigh, if there were more than these.
    """
    ordered = np.sort(values)
    weights = _weights(ordered[::-1] - top)
    n = min(_n_until(weights, top_p, total), len(values))
    return _first(values, n, ordered[-n])


def _n_until(weights: Logits, top_p: float, total: float | None) -> int:
    """How many of the weights, from the first on, it takes to reach the share of the total; one more if all do not."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64)
    reached = np.cumsum(sums)
    target = top_p * (reached[-1] if total is None else total)
    block = int(np.searchsorted(reached[:-1], target))
    inside = reached[block] - sums[block] + np.cumsum(weights[block * BLOCK :][:BLOCK], dtype=np.float64)
    return block * BLOCK + int(np.searchsorted(inside, target)) + 1
