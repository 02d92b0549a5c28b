"""How long a job takes to start: from slices that lie in a cache, without them, and with layers from rank 0.

    python benchmarks/starting.py --ranks 4

Builds a random model of some 1.5 GB in a temporary directory and runs real jobs on this machine, each to its first
token; beside them the time of copying the file. All that is read has been read before: no disk is measured.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
from harness import in_turns

from tests.job.loading.test_arrivals import ONLY_RANK_0
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import COMMAND, environment, launcher


def seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def job(ranks: int, folder: Path, *words: str) -> None:
    """To the first token, which is written greedily."""
    asked = ["run", "-md", "none", "-p", "x", "-n", "1", "--temp", "0", "-c", "256", "-t", "1", *words]
    command = [*launcher(ranks), "sh", "-c", ONLY_RANK_0, str(folder), *COMMAND, *asked]
    subprocess.run(command, check=True, capture_output=True, env=environment())


@click.command()
@click.option("--ranks", default=4, show_default=True)
@click.option("--layers", default=24, show_default=True)
@click.option("--ff", default=8192, show_default=True, help="Width of a layer's feed-forward part; 2048 is a layer's.")
@click.option("--passes", default=3, show_default=True, help="Of which the best counts.")
def main(ranks: int, layers: int, ff: int, passes: int) -> None:
    shape = Shape(n_layer=layers, n_embd=2048, n_head=32, n_head_kv=8, n_ff=ff, n_vocab=4096)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for name in ("here", "elsewhere"):
            (folder / name).mkdir()
        model, cache = write_model(folder / "here" / "m.gguf", shape), folder / "cache"
        path, cached = str(model), ["--slice-cache", str(cache)]

        def copy() -> float:
            (folder / "copy").unlink(missing_ok=True)
            return seconds(lambda: shutil.copyfile(model, folder / "copy"))

        def start(n_ranks: int, *words: str) -> Callable[[], float]:
            return lambda: seconds(lambda: job(n_ranks, folder, *words))

        def start_empty(*words: str) -> float:
            shutil.rmtree(cache, ignore_errors=True)
            return start(ranks, *words, *cached)()

        found = in_turns(
            {
                "copying the file": copy,
                "a job of one rank, whole file": start(1, "-m", path),
                "slices cut into the cache": lambda: start_empty("-m", path),
                "slices from the cache": start(ranks, "-m", path, *cached),
                "slices cut into memory": start(ranks, "-m", path),
                "layers from rank 0, into the cache": lambda: start_empty("-m", "m.gguf"),
                "layers from rank 0, into memory": start(ranks, "-m", "m.gguf"),
            },
            passes,
        )
        size = model.stat().st_size
    best = {what: min(times) for what, times in found.items()}
    for what, took_s in best.items():
        click.echo(f"{what:36} {took_s:6.2f} s, {size / took_s / 1e9:5.2f} GB/s")
    copied, _, cut, from_cache, memory, *_ = best.values()
    click.echo(
        f"over copying: {(cut - from_cache) / copied:.2f} for cutting into the cache, "
        f"{(memory - from_cache) / copied:.2f} into memory"
    )


if __name__ == "__main__":
    main()
