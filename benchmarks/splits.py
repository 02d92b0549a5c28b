"""The automatic split beside splits by hand: `python benchmarks/splits.py [--threads 1,2]`.

Ranks of so many threads each, of a grown target, have several requests at a time; the split that `run` chooses by
timing its ranks, and others around it, in turns. Prints the median speed of each, and what the chosen one reaches of
the best. With --measuring it prints how much longer a job takes the first time, when the ranks are timed, than later.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent.parent))

from experiments.grow import grow
from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from tests.jobs import finish


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
        target = folder / "target.gguf"
        grow(read_model_info(TARGET), target, layers, 0.0)
        words = ["-m", str(target), "-md", "none", "-t", threads]
        chosen = json.loads(checked(finish(n_ranks, ["plan", "--json", *words]))).get("layer_split")
        found: dict[str, list[float]] = {split: [] for split in around(chosen)}
        for _ in range(rounds):
            for split, speeds in found.items():
                speeds.append(speed(folder, n_ranks, [*words, "--layer-split", split], requests, tokens))
    medians = {split: statistics.median(speeds) for split, speeds in found.items()}
    for split, per_s in sorted(medians.items(), key=lambda each: -each[1]):
        print(f"{split}: {per_s:.1f} tokens/s{', as chosen' if split == listed(chosen) else ''}")
    print(f"the chosen split reaches {medians[listed(chosen)] / max(medians.values()):.3f} of the best")


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
    asked, output = folder / "asked.jsonl", folder / "answers.jsonl"
    output.unlink(missing_ok=True)
    lines = [{"prompt": f"def f{number}(x):", "max_tokens": tokens, "ignore_eos": True} for number in range(requests)]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = ["batch", str(asked), "-o", str(output), "--temp", "0", "--json", "--parallel", str(requests), *words]
    found: float = json.loads(checked(finish(n_ranks, batch)))["predicted_per_second"]
    return found


def tell_measuring(folder: Path, threads: str, layers: int, rounds: int) -> None:
    """Whole jobs of one token, each the first of a model that nothing is kept of, and again."""
    n_ranks, first, later = len(threads.split(",")), list[float](), list[float]()
    for number in range(rounds):
        target = folder / f"{number}.gguf"
        grow(read_model_info(TARGET), target, layers, 1e-3, seed=time.time_ns() % 100_000)
        for times in (first, later):
            start_s = time.monotonic()
            words = ["run", "-m", str(target), "-md", "none", "-t", threads, "-p", "def f(", "-n", "1"]
            checked(finish(n_ranks, words))
            times.append(time.monotonic() - start_s)
        target.unlink()
    once_s, again_s = statistics.median(first), statistics.median(later)
    print(f"a job of one token: {once_s:.2f} s the first time, {again_s:.2f} s later: timing {n_ranks} ranks took "
          f"{once_s - again_s:.2f} s")  # fmt: skip


def checked(done: Any) -> str:
    if done.returncode:
        raise click.ClickException(done.stderr)
    text: str = done.stdout
    return text


if __name__ == "__main__":
    main()
