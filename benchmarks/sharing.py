"""Do jobs share the cores well, and start quickly? `python benchmarks/sharing.py [--parts threads,jobs,start]`.

threads  tokens/s of the shipped pair with the default threads over the best `-t`, for each number of ranks, in turns
jobs     two jobs at once that know nothing of each other: what each gets over the best `-t`, and over a lone job
start    seconds of `run -n 1`, and on a deeper target the seconds besides the generation

Only on a machine that does nothing else; a line says how many cores others took. The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent.parent))

from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.grow import grow
from pipeinfer.models.llama.threads import read_free
from tests.jobs import finish, start

COMMON = ["run", "--json", "-p", "def fibonacci(n):", "--temp", "0", "--ignore-eos"]
OF_THE_BEST, OF_A_LONE_JOB = 0.85, 0.4
START_S, START_DEEP_S = 0.9, 1.2
N_LAYER_DEEP = 118  # 92 MB
N_CORES = len(os.sched_getaffinity(0))


@click.command(help=__doc__)
@click.option("--parts", default="threads,jobs,start", show_default=True)
@click.option("--ranks", default="1,2,3,4", show_default=True, help="Of part threads.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--tokens", default=400, show_default=True)
def main(parts: str, ranks: str, rounds: int, tokens: int) -> None:
    passed: list[bool] = []
    if "threads" in parts:
        passed += [compare_threads(int(n), rounds, tokens) for n in ranks.split(",")]
    if "jobs" in parts:
        passed += [compare_jobs(n, rounds, tokens) for n in (1, 3)]
    if "start" in parts:
        passed += time_starts(rounds)
    sys.exit(not all(passed))


def compare_threads(n_ranks: int, rounds: int, tokens: int) -> bool:
    choices: dict[str, list[str]] = {"default": [], **{f"-t {n}": ["-t", str(n)] for n in range(1, N_CORES + 1)}}
    speeds, others = in_turns(
        {name: partial(speed_of, n_ranks, tokens, extra) for name, extra in choices.items()}, rounds
    )
    share = speeds["default"] / max(speeds.values())
    return say(f"np {n_ranks}: {shown(speeds)} tokens/s", share, OF_THE_BEST, " of the best", others)


def compare_jobs(n_ranks: int, rounds: int, tokens: int) -> bool:
    found, others = in_turns(
        {
            "default": lambda: slower_of_two(n_ranks, tokens, []),
            "-t 1": lambda: slower_of_two(n_ranks, tokens, ["-t", "1"]),
            "alone": lambda: speed_of(n_ranks, tokens, []),
        },
        rounds,
    )
    about = f"two jobs of np {n_ranks}, the slower one: {shown(found)} tokens/s"
    enough = say(about, found["default"] / found["-t 1"], OF_THE_BEST, " of -t 1", others)
    return say("   ", found["default"] / found["alone"], OF_A_LONE_JOB, " of a lone job", others) and enough


def time_starts(rounds: int) -> list[bool]:
    with tempfile.TemporaryDirectory() as folder:
        deep = Path(folder) / "deep.gguf"
        grow(read_model_info(TARGET), deep, N_LAYER_DEEP, 0.0)
        plain, deeper = ["-n", "1"], ["-n", "32", "-m", str(deep), "-md", str(TARGET.with_name("draft.gguf"))]
        found, others = in_turns({"plain": lambda: -seconds(plain), "deep": lambda: -besides(deeper)}, rounds + 1)
    return [
        say("start of np 3, -n 1, in s", -found["plain"], START_S, "", others, most=True),
        say(f"besides the generation, {N_LAYER_DEEP} layers", -found["deep"], START_DEEP_S, "", others, most=True),
    ]


def in_turns(trials: dict[str, Callable[[], float]], rounds: int) -> tuple[dict[str, float], float]:
    """The median of each trial, and the cores that others took while nothing of ours ran."""
    free_s, start_s = read_free() or 0.0, time.monotonic()
    time.sleep(0.5)
    others = N_CORES - ((read_free() or 0.0) - free_s) / (time.monotonic() - start_s)
    found: dict[str, list[float]] = {name: [] for name in trials}
    for _ in range(rounds):
        for name, trial in trials.items():
            found[name].append(trial())
    return {name: statistics.median(values) for name, values in found.items()}, others


def speed_of(n_ranks: int, tokens: int, extra: Sequence[str]) -> float:
    return _speed(start(n_ranks, [*COMMON, "-n", str(tokens), *extra]))


def slower_of_two(n_ranks: int, tokens: int, extra: Sequence[str]) -> float:
    jobs = [start(n_ranks, [*COMMON, "-n", str(tokens), *extra]) for _ in range(2)]
    return min(map(_speed, jobs))


def _speed(job: subprocess.Popen[str]) -> float:
    out, error = job.communicate(timeout=300)
    if job.returncode:
        raise click.ClickException(error)
    result: dict[str, Any] = json.loads(out)
    return float(result["timings"]["predicted_per_second"])


def seconds(arguments: Sequence[str]) -> float:
    return timed(arguments)[0]


def besides(arguments: Sequence[str]) -> float:
    took_s, result = timed(arguments)
    return took_s - float(result["timings"]["total_s"])


def timed(arguments: Sequence[str]) -> tuple[float, dict[str, Any]]:
    start_s = time.monotonic()
    done = finish(3, [*COMMON, *arguments])
    if done.returncode:
        raise click.ClickException(done.stderr)
    return time.monotonic() - start_s, json.loads(done.stdout)


def shown(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in values.items())


def say(about: str, value: float, bar: float, what: str, others: float, most: bool = False) -> bool:
    enough = value <= bar if most else value >= bar
    verdict = "enough" if enough else "NOT ENOUGH"
    print(f"{about}: {value:.2f}{what} (wanted {bar:.2f}): {verdict}; others {others:.1f} cores", flush=True)
    return enough


if __name__ == "__main__":
    main()
