"""Speed of the policies on this machine: `python benchmarks/speed.py [--weak 0.02]`.

Makes a random-weight target and, of its first layers, a draft whose guesses it often accepts; runs the policies in
turns and prints the wall-clock time of whole generations and their ratios to `iterative`.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from harness import in_turns

from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import run_json


@click.command(help=__doc__)
@click.option(
    "--weak", default=0.04, help="Strength of the layers that the draft lacks; the larger, the less it is right."
)
@click.option("--ranks", default=3)
@click.option("--tokens", default=160)
@click.option("--rounds", default=3)
@click.option("--policies", default="iterative,speculative,pipeinfer")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the models here and use them again.")
@click.option("--extra", default="", help="Further options of the run, as in '--microbatch 2'.")
def main(weak: float, ranks: int, tokens: int, rounds: int, policies: str, folder: Path | None, extra: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = models(folder or Path(scratch), weak)
        common = ["-m", str(target), "-md", str(draft), "-n", str(tokens), "--temp", "0", "--ignore-eos", "-t", "1"]
        common += ["-p", "the model of a rank is in", *extra.split()]
        trials = {name: partial(run_json, ranks, [*common, "--policy", name]) for name in policies.split(",")}
        report(in_turns(trials, rounds))


def models(folder: Path, weak: float) -> tuple[Path, Path]:
    """A target of 96 layers (75 MB, which two cores can read at once) and a draft of its first 7: cost 1/13."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = Shape(n_layer=96, n_embd=256, n_head=4, n_head_kv=2, n_ff=704, n_vocab=1024, peaky=12.0)
    shape = replace(shape, n_strong=7, weak=weak)
    target, draft = folder / f"target-{weak}.gguf", folder / "draft.gguf"
    if not target.exists():
        write_model(target, shape)
    if not draft.exists():
        write_model(draft, replace(shape, n_layer=7))
    return target, draft


def report(results: dict[str, list[dict[str, Any]]]) -> None:
    base = [result["timings"]["total_s"] for result in next(iter(results.values()))]
    for policy, found in results.items():
        times = [result["timings"]["total_s"] for result in found]
        ratios = [first / own for first, own in zip(base, times, strict=True)]
        speculation = found[-1]["speculation"]
        hit_rate = speculation["hit_rate"]
        print(
            f"{policy:12} {statistics.median(times):6.2f} s  speed-up {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f})  hit rate {'-' if hit_rate is None else f'{hit_rate:.2f}'}, "
            f"{speculation['accepted_length']:.2f} tokens a verdict, draft {speculation['draft_s']:.2f} s, "
            f"runs {speculation['runs']}, cancelled {speculation['runs_cancelled']}"
        )
        assert len({tuple(result["tokens"]) for result in found}) == 1


if __name__ == "__main__":
    main()
