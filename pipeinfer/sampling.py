"""Choose a token from logits: the same choice for the same (logits, seed, position), wherever and whenever asked.

Knows no tree and no model. Random numbers come from a counter-based generator keyed by (seed, position), so a token
does not depend on how many were drawn before it, nor on the rank that draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """llama.cpp's meanings and defaults. `temp` <= 0 is greedy; `top_k` <= 0, `top_p` >= 1, `min_p` <= 0 switch off."""

    seed: int = 0
    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05


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


def choose(logits: npt.NDArray[np.float32], params: SamplingParams, position: int) -> int:
    """The token for `position` given its logits (n_vocab,): greedy, or a Gumbel-max sample of the kept candidates."""
    if params.temp <= 0.0:
        return int(np.argmax(logits))
    ids = candidates(logits, params)
    noise = gumbel_noise(params.seed, position, len(logits))
    return int(ids[np.argmax(logits[ids].astype(np.float64) / params.temp + noise[ids])])
