"""What benchmarks share: trials in turns, their medians, real jobs that must succeed. Knows no question.

Trials take turns, so that what else the machine does disturbs all of them alike.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

sys.path.insert(0, str(Path(__file__).parent.parent))

from experiments.grow import grow
from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from tests.support.jobs import finish

Result = TypeVar("Result")


def in_turns(trials: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """The results of each trial, one a round. Progress goes to stderr."""
    found: dict[str, list[Result]] = {name: [] for name in trials}
    for turn in range(rounds):
        for name, trial in trials.items():
            found[name].append(trial())
            print(f"  round {turn + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
    return found


def medians(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items()}


def grown(path: Path, n_layer: int, noise: float = 0.0, seed: int = 0) -> Path:
    """A target of so many layers, grown from the shipped one."""
    grow(read_model_info(TARGET), path, n_layer, noise, seed)
    return path


def job(n_ranks: int, words: Sequence[str]) -> str:
    """What a `pipeinfer` command prints. Raises click.ClickException when it fails."""
    done = finish(n_ranks, words, timeout_s=900)
    if done.returncode:
        raise click.ClickException(f"pipeinfer {' '.join(words)}: {done.stderr}")
    return done.stdout


def batch(
    folder: Path, n_ranks: int, prompts: Sequence[str], n_predict: int, words: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The summary of a greedy `pipeinfer batch` of these prompts, and the texts in their order."""
    arguments, output = batch_words(folder, [{"prompt": prompt} for prompt in prompts], n_predict)
    summary = json.loads(job(n_ranks, [*arguments, "--json", *words]))
    return summary, [line["text"] for line in answers(output)]


def batch_words(folder: Path, requests: Sequence[Mapping[str, Any]], n_predict: int) -> tuple[list[str], Path]:
    """The words of a greedy `pipeinfer batch` of these requests, and the file of its answers."""
    asked, output = folder / "asked.jsonl", folder / "answers.jsonl"
    output.unlink(missing_ok=True)
    lines = [{**request, "max_tokens": n_predict, "ignore_eos": True} for request in requests]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["batch", str(asked), "-o", str(output), "--temp", "0"], output


def late_ranks(errors: str) -> str:
    """What a job's standard error says of ranks that were slower than --pace; empty if none was."""
    lines = (line.partition("slower than --pace says: ")[2] for line in errors.splitlines())
    return next((line.partition(";")[0] for line in lines if line), "")


def answers(output: Path) -> list[dict[str, Any]]:
    """The lines of a batch's answers, in the order of its requests."""
    return sorted(map(json.loads, output.read_text().splitlines()), key=lambda line: int(line["index"]))
