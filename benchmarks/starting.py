"""How long a job takes to start: from slices that lie in a cache, without them, and with layers from rank 0.

    python benchmarks/starting.py --ranks 4

Builds a random model of some 1.5 GB in a temporary directory and runs real jobs on this machine, each to its first
token; beside them the time of copying the file. All that is read has been read before: no disk is measured.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.gguf_factory import Shape, write_model
from tests.jobs import COMMAND, environment, launcher
from tests.test_arrivals import ONLY_RANK_0


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
        size = model.stat().st_size

        def show(what: str, act: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
            best = min((before(), seconds(act))[1] for _ in range(passes))
            click.echo(f"{what:44} {best:6.2f} s, {size / best / 1e9:5.2f} GB/s")
            return best

        def empty() -> None:
            shutil.rmtree(cache, ignore_errors=True)

        copied = show(
            "copying the file",
            lambda: shutil.copyfile(model, folder / "copy"),
            lambda: (folder / "copy").unlink(missing_ok=True),
        )
        (folder / "copy").unlink()
        path = str(model)
        show("a job of one rank, whole file", lambda: job(1, folder, "-m", path))
        cut = show(
            "slices cut into the cache", lambda: job(ranks, folder, "-m", path, "--slice-cache", str(cache)), empty
        )
        cached = show("slices from the cache", lambda: job(ranks, folder, "-m", path, "--slice-cache", str(cache)))
        memory = show("slices cut into memory", lambda: job(ranks, folder, "-m", path))
        show(
            "layers from rank 0, into the cache",
            lambda: job(ranks, folder, "-m", "m.gguf", "--slice-cache", str(cache)),
            empty,
        )
        show("layers from rank 0, into memory", lambda: job(ranks, folder, "-m", "m.gguf"))
        cutting, memory = (cut - cached) / copied, (memory - cached) / copied
        click.echo(f"over copying: {cutting:.2f} for cutting into the cache, {memory:.2f} into memory")


if __name__ == "__main__":
    main()
