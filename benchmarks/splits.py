"""The automatic split beside splits by hand: `python benchmarks/splits.py [--threads 1,2]`.

Ranks of so many threads each, of a grown target, have several requests at a time; the split that `run` chooses by
timing its ranks, and others around it, in turns. Prints the median speed of each, and what the chosen one reaches of
the best. With --measuring it prints how much longer a job takes the first time, when the ranks are timed, than later.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
from harness import batch, grown, in_turns, job, medians


@click.command(help=__doc__)
@click.option("--threads", default="1,2", show_default=True, help="Of each rank.")
@click.option("--layers", default=160, show_default=True)
@click.option("--requests", default=8, show_default=True)
@click.option("--tokens", default=24, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--measuring", is_flag=True)
def main(threads: str, layers: int, requests: int, tokens: int, rounds: int, measuring: bool) -> None:
    n_ranks = len(threads.split(","))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if measuring:
            tell_measuring(folder, threads, layers, rounds)
            return
        target = grown(folder / "target.gguf", layers)
        words = ["-m", str(target), "-md", "none", "-t", threads]
        chosen = json.loads(job(n_ranks, ["plan", "--json", *words]))["layer_split"]
        trials = {
            split: partial(speed, folder, n_ranks, [*words, "--layer-split", split], requests, tokens)
            for split in around(chosen)
        }
        speeds = medians(in_turns(trials, rounds))
    for split, per_s in sorted(speeds.items(), key=lambda each: -each[1]):
        print(f"{split}: {per_s:.1f} tokens/s{', as chosen' if split == listed(chosen) else ''}")
    print(f"the chosen split reaches {speeds[listed(chosen)] / max(speeds.values()):.3f} of the best")


def around(chosen: list[int]) -> Iterator[str]:
    """It, and others with more or fewer layers on the first rank."""
    total = sum(chosen)
    for percent in (0, -12, -8, -4, 4, 8, 12):
        first = chosen[0] + total * percent // 100
        rest = total - first
        others = [round(rest * each / sum(chosen[1:])) for each in chosen[1:]]
        others[-1] += rest - sum(others)
        yield listed([first, *others])


def listed(split: list[int]) -> str:
    return ",".join(map(str, split))


def speed(folder: Path, n_ranks: int, words: list[str], requests: int, tokens: int) -> float:
    prompts = [f"def f{number}(x):" for number in range(requests)]
    summary, _ = batch(folder, n_ranks, prompts, tokens, ["--parallel", str(requests), *words])
    return float(summary["predicted_per_second"])


def tell_measuring(folder: Path, threads: str, layers: int, rounds: int) -> None:
    """Whole jobs of one token, each the first of a model that nothing is kept of, and again."""
    n_ranks, target = len(threads.split(",")), folder / "new.gguf"

    def start(is_first: bool) -> float:
        if is_first:
            grown(target, layers, 1e-3, seed=time.time_ns() % 100_000)
        start_s = time.monotonic()
        job(n_ranks, ["run", "-m", str(target), "-md", "none", "-t", threads, "-p", "def f(", "-n", "1"])
        return time.monotonic() - start_s

    took_s = medians(in_turns({"the first time": partial(start, True), "later": partial(start, False)}, rounds))
    once_s, again_s = took_s.values()
    print(
        f"a job of one token: {once_s:.2f} s the first time, {again_s:.2f} s later: timing {n_ranks} ranks took "
        f"{once_s - again_s:.2f} s"
    )


if __name__ == "__main__":
    main()
