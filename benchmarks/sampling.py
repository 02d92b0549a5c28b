"""What choosing a token costs: `python benchmarks/sampling.py`.

Milliseconds a row by options and size of the vocabulary, the median of some, for logits as peaked as a model's and for
flat ones; then what a draft's guesses with the same noise cost. Then the largest logits of a batch looked for row by
row, as `choose` does, and by columns, (n_vocab, n_rows), as SiPipe does (section 5.1); and what penalties cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from pipeinfer.core.drafting import coupled
from pipeinfer.core.sampling import BLOCKS_A_TOKEN, SamplingParams, choose, largest, penalise

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


def largest_by_columns(columns: np.ndarray, n: int) -> object:
    """As `largest` does, of all rows at once."""
    n_blocks = BLOCKS_A_TOKEN * n
    n_groups = len(columns) // n_blocks
    maxima = columns[: n_groups * n_blocks].reshape(n_groups, n_blocks, -1).max(axis=0)
    return np.nonzero(columns >= np.partition(maxima, -n, axis=0)[-n])


def batches(n_vocab: int) -> None:
    top_k = SamplingParams().top_k
    print("\n| rows | by rows | by columns | to transpose them |\n|---|---|---|---|")
    for n_rows in (8, 32, 64):
        rows = np.random.default_rng(n_rows).normal(0, 3, (n_rows, n_vocab)).astype(np.float32)
        columns = np.ascontiguousarray(rows.T)
        times = (
            milliseconds(lambda rows, position: [largest(row, top_k) for row in rows], rows),
            milliseconds(lambda columns, position: largest_by_columns(columns, top_k), columns),
            milliseconds(lambda rows, position: np.ascontiguousarray(rows.T), rows),
        )
        print(f"| {n_rows} |", " | ".join(f"{each / n_rows:.3f}" for each in times), "|")


def penalties(n_vocab: int) -> None:
    rng, row = np.random.default_rng(0), logits_of("flat", n_vocab)
    print("\n| tokens penalised | |\n|---|---|")
    for n_back in (64, 1024, 4096):
        params, history = SamplingParams(repeat_penalty=1.1, repeat_last_n=n_back), rng.integers(0, n_vocab, n_back)
        asked = history.tolist()
        taken = milliseconds(lambda row, position: penalise(row, params, asked), row)  # noqa: B023 (called at once)
        print(f"| {n_back} | {taken:.3f} |")


def main() -> None:
    print("| logits | options |", " | ".join(f"{n_vocab} tokens" for n_vocab in N_VOCABS), "|")
    print("|---|---|" + "---|" * len(N_VOCABS))
    work = {name: choice(params) for name, params in OPTIONS.items()} | {"a draft's 4 guesses": guesses}
    for shape in ("peaked", "flat"):
        rows = [logits_of(shape, n_vocab) for n_vocab in N_VOCABS]
        for name, one in work.items():
            print(f"| {shape} | {name} |", " | ".join(f"{milliseconds(one, row):.2f}" for row in rows), "|")
    batches(N_VOCABS[1])
    penalties(N_VOCABS[1])


if __name__ == "__main__":
    main()
