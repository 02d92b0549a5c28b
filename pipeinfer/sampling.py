"""Choose a token from logits: the same choice for the same (logits, seed, position), wherever and whenever asked.

Knows no tree and no model. Random numbers come from a counter-based generator keyed by (seed, position), so a token
does not depend on how many were drawn before it, nor on the rank that draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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


def gumbel_noise(seed: int, position: int, n_vocab: int) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise (n_vocab,), a pure function of its arguments (Philox, Salmon et al. 2011)."""
    raw = np.random.Philox(key=seed, counter=[0, 0, 0, position]).random_raw(n_vocab)
    # 53 bits into the open interval (0, 1): neither logarithm below can meet 0
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))


def candidates(logits: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.intp]:
    """Token ids left by top-k, then top-p, then min-p (llama.cpp's order), most likely first, ties by token id."""
    ids = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        # all that tie with the k-th stay in the running, so that the choice among them is by id, not by chance
        threshold = np.partition(logits, -params.top_k)[-params.top_k]
        ids = np.flatnonzero(logits >= threshold)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    if params.top_k > 0:
        ids = ids[: params.top_k]
    if params.top_p < 1.0:
        weight = np.exp(logits[ids].astype(np.float64) - float(logits[ids[0]]))
        reached = np.cumsum(weight / weight.sum()) >= params.top_p
        ids = ids[: int(np.argmax(reached)) + 1] if reached.any() else ids
    if params.min_p > 0.0:
        ids = ids[logits[ids] >= logits[ids[0]] + np.log(params.min_p)]
    return ids


def penalise(
    logits: npt.NDArray[np.float32], params: SamplingParams, history: Sequence[int]
) -> npt.NDArray[np.float32]:
    """Logits (n_vocab,) after the penalties for the tokens of `history`, which has `params.looks_back` at most."""
    if not history or not params.looks_back:
        return logits
    ids, counts = np.unique(np.asarray(history), return_counts=True)
    logits = logits.copy()
    seen = logits[ids]
    seen = np.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
    logits[ids] = seen - counts * params.frequency_penalty - params.presence_penalty
    return logits


def choose(logits: npt.NDArray[np.float32], params: SamplingParams, position: int, history: Sequence[int] = ()) -> int:
    """The token for `position` given its logits (n_vocab,): greedy, or a Gumbel-max sample of the kept candidates.

    `history` is what `penalise` wants.
    """
    logits = penalise(logits, params, history)
    if params.temp <= 0.0:
        return int(np.argmax(logits))
    ids, scores = perturbed(logits, params, position)
    return int(ids[np.argmax(scores)])


def perturbed(
    logits: npt.NDArray[np.float32], params: SamplingParams, position: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """The candidates and their scores, the highest of which is the sample (Gumbel-max), for `params.temp` above 0."""
    ids = candidates(logits, params)
    noise = gumbel_noise(params.seed, position, len(logits))
    return ids, logits[ids].astype(np.float64) / params.temp + noise[ids]
