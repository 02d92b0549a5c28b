"""What choosing a token costs: `python benchmarks/sampling.py`.

Milliseconds a row by options and size of the vocabulary, the median of some, for logits as peaked as a model's and for
flat ones; then what a draft's guesses with the same noise cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from pipeinfer.core.drafting import coupled
from pipeinfer.core.sampling import SamplingParams, choose

N_VOCABS = (32_000, 128_256, 262_144)
N_TIMES = 40
OPTIONS = {
    "greedy": SamplingParams(seed=0, temp=0.0),
    "defaults": SamplingParams(seed=0),
    "defaults, repeat penalty 1.1": SamplingParams(seed=0, repeat_penalty=1.1),
    "no top-k": SamplingParams(seed=0, top_k=0),
    "top-p alone": SamplingParams(seed=0, top_k=0, min_p=0.0),
    "min-p alone": SamplingParams(seed=0, top_k=0, top_p=1.0),
    "no filter": SamplingParams(seed=0, top_k=0, top_p=1.0, min_p=0.0),
}


def logits_of(shape: str, n_vocab: int) -> np.ndarray:
    rng = np.random.default_rng(n_vocab)
    values = 2 * rng.standard_t(3, n_vocab) if shape == "peaked" else rng.normal(0, 3, n_vocab)
    return values.astype(np.float32)


def milliseconds(work: Callable[[np.ndarray, int], object], row: np.ndarray) -> float:
    times = []
    for position in range(N_TIMES):
        start_s = time.perf_counter()
        work(row, position)
        times.append(time.perf_counter() - start_s)
    return 1e3 * statistics.median(times)


def choice(params: SamplingParams) -> Callable[[np.ndarray, int], object]:
    history = range(params.looks_back)
    return lambda row, position: choose(row, params, position, history)


def guesses(row: np.ndarray, position: int) -> object:
    return coupled(row, 4, SamplingParams(seed=0), position)


def main() -> None:
    print("| logits | options |", " | ".join(f"{n_vocab} tokens" for n_vocab in N_VOCABS), "|")
    print("|---|---|" + "---|" * len(N_VOCABS))
    work = {name: choice(params) for name, params in OPTIONS.items()} | {"a draft's 4 guesses": guesses}
    for shape in ("peaked", "flat"):
        rows = [logits_of(shape, n_vocab) for n_vocab in N_VOCABS]
        for name, one in work.items():
            print(f"| {shape} | {name} |", " | ".join(f"{milliseconds(one, row):.2f}" for row in rows), "|")


if __name__ == "__main__":
    main()
