"""Real ranks at a modelled cluster's pace, on one machine: `python benchmarks/paced.py [--parts worst,cancel]`.

Grows targets from the shipped one and starts `pipeinfer bench --pace` on a profile whose stages are so slow that the
ranks mostly sleep. Iterative decoding has as many stages as the other policies, and so a rank less. What is compared
takes turns; ratios are medians over the prompts, each of medians over the rounds.

worst      speed over iterative decoding's with a draft that is never right; and the wait for the first token, with that
           draft and with a good one, over iterative decoding's
cancel     speed with cancellation over the speed without it, with any number of runs in flight and with the default one
foretell   speed that `pipeinfer simulate` gives for the same choices over the measured one

The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent.parent))

from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.observe.results import Record, read_results
from pipeinfer.policies.registry import POLICIES
from tests.jobs import finish, run_json

PROFILE = """
[link]
latency_us = 50
gbit_per_s = 10
[head]
run_us = {HEAD_US}
verdict_us = {HEAD_US}
draft_us = {HEAD_US}
[nodes.slow]
gb_per_s = 1
gflop_per_s = 1000
run_us = {RUN_US}
[[cluster]]
node = "slow"
count = {n_nodes}
[models.target]
layers = {n_layers}
embd = 4096
layer_mb = {layer_ms}
layer_mparam = {row_mparam}
output_mb = 0.1
output_mparam = 0.1
[models.draft]
layers = 10
embd = 1024
layer_mb = {draft_layer_ms}
layer_mparam = 10
output_mb = 0.1
output_mparam = 0.1
[pairs.grown]
target = "target"
draft = "draft"
acceptance = 0.7
"""
RUN_US, HEAD_US = 600, 250  # real work beside the models, which pacing leaves alone; the simulation has to be told
LAYERS_A_STAGE = 10  # the profile's
N_LAYER = 16  # of the grown targets; what they compute is hidden in the profile's times
PROMPTS = {
    "reader": "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n",
    "loop": "def count(items):\n    found = {}\n    for item in items:\n        found[item] = ",
    "tale": "# Once upon a time there was a warrior whom the shepherds called Goliath.\n",
}
UNLIMITED = 1000  # runs in flight
WORST, FIRST, UNLIMITED_GAIN, DEFAULT_GAIN, NEAR = 0.95, 1.1, 1.5, 0.98, 0.1
"""Bars, in the order of the module's docstring."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Where files go and what all measurements share. `stage_ms`: a stage's time for one row."""

    folder: Path
    n_stages: int
    stage_ms: float
    draft_ms: float
    n_tokens: int
    rounds: int

    def bench(self, policy: str, target: Path, draft: Path | None, *flags: str) -> list[Record]:
        """The rows of one job that measures every prompt. Raises RuntimeError when it fails."""
        results = self.folder / "results.csv"
        results.unlink(missing_ok=True)
        arguments = ["bench", "--policy", policy, *self._models(target, draft), *self._common, "--results", results]
        prompts = [part for name in PROMPTS for part in ("-p", self.prompt(name))]
        call(self._n_ranks(policy), [*map(str, arguments), *map(str, prompts), *flags])
        return read_results(results)

    def run(self, policy: str, target: Path, draft: Path, prompt: str, *flags: str) -> dict[str, Any]:
        """The result object of one generation."""
        models = map(str, self._models(target, draft))
        common = [*self._common, "--policy", policy, "-p", PROMPTS[prompt], "--temp", "0", "--ignore-eos"]
        return run_json(self._n_ranks(policy), [*models, *map(str, common), *flags])

    def foretell(self, policy: str, choices: Path, draft: Path) -> float:
        """Tokens a second that the simulation gives for recorded choices."""
        nodes = str(self._n_ranks(policy))
        printed = call(1, ["simulate", "--profile", str(self.profile), "--nodes", nodes, "--policy", policy, "--json",
                           "-n", str(self.n_tokens), "--choices", str(choices), "-md", str(draft)])  # fmt: skip
        return float(json.loads(printed)["timings"]["predicted_per_second"])

    def record(self, target: Path, draft: Path, prompt: str) -> Path:
        """What the models choose after a prompt, in a file."""
        path = self.folder / f"{prompt}.json"
        call(1, ["record", "-m", str(target), "-md", str(draft), "-p", PROMPTS[prompt], "-n", str(self.n_tokens),
                 "-t", "1", "-o", str(path)])  # fmt: skip
        return path

    def grow(self, name: str, source: Path, n_layer: int, *flags: str) -> Path:
        """A model grown from `source`, made once."""
        path = self.folder / f"{name}.gguf"
        if not path.exists():
            print(call(1, ["models", "grow", "-m", str(source), "-o", str(path), "--layers", str(n_layer), *flags]))
        return path

    @property
    def profile(self) -> Path:
        path = self.folder / f"slow-{self.n_stages}.toml"
        layer_ms = self.stage_ms / LAYERS_A_STAGE
        path.write_text(
            PROFILE.format(
                RUN_US=RUN_US, HEAD_US=HEAD_US, n_nodes=self.n_stages + 1, n_layers=LAYERS_A_STAGE * self.n_stages,
                layer_ms=layer_ms, row_mparam=175 * layer_ms, draft_layer_ms=self.draft_ms / 10,
            )
        )  # fmt: skip
        return path

    def prompt(self, name: str) -> Path:
        path = self.folder / f"{name}.txt"
        path.write_text(PROMPTS[name])
        return path

    @property
    def _common(self) -> list[str | Path]:
        return ["--pace", self.profile, "-n", str(self.n_tokens), "-t", "1"]

    def _n_ranks(self, policy: str) -> int:
        return self.n_stages + (policy != "iterative")

    @staticmethod
    def _models(target: Path, draft: Path | None) -> list[str | Path]:
        return ["-m", target, "-md", draft] if draft else ["-m", target]


@click.command(help=__doc__)
@click.option("--parts", default="worst,cancel,foretell", show_default=True)
@click.option("--stages", default=8, show_default=True)
@click.option(
    "--stage-ms", default=40.0, show_default=True, help="A stage's time for one row: long beside the models' own time."
)
@click.option("--draft-ms", default=12.0, show_default=True, help="The draft's time for one row.")
@click.option("--tokens", default=64, show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--levels", default="0.5,0.7,0.9", show_default=True, help="Acceptance rates, of part cancel.")
@click.option("--policies", default=",".join(POLICIES), show_default=True, help="Of part foretell.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the models here and use them again.")
def main(
    parts: str, stages: int, stage_ms: float, draft_ms: float, tokens: int, rounds: int, levels: str, policies: str,
    folder: Path | None,
) -> None:  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        kept = folder or Path(scratch)
        kept.mkdir(parents=True, exist_ok=True)
        setup = Setup(kept, stages, stage_ms, draft_ms, tokens, rounds)
        checks = {
            "worst": lambda: worst(setup),
            "cancel": lambda: (same for level in levels.split(",") for same in cancel(setup, float(level))),
            "foretell": lambda: foretell(setup, policies.split(",")),
        }
        passed = [good for part in parts.split(",") for good in checks[part]()]
    sys.exit(not all(passed))


def worst(setup: Setup) -> Iterator[bool]:
    """A draft that is never right, and a good one, against none."""
    target = setup.grow("same", TARGET, N_LAYER)
    wrong = setup.grow("wrong", DRAFT, 4, "--noise", "1000", "-md", str(TARGET))
    plain, with_wrong, with_good = list[Record](), list[Record](), list[Record]()
    for _ in range(setup.rounds):
        plain += setup.bench("iterative", target, None, "-r", "1")
        with_wrong += setup.bench("pipeinfer", target, wrong, "-r", "1")
        with_good += setup.bench("pipeinfer", target, DRAFT, "-r", "1")
    where = f"{setup.n_stages} stages"
    for name, rows in (("never right", with_wrong), ("good", with_good)):
        rate = statistics.fmean(row["acceptance_rate"] for row in rows)
        speed = ratios(rows, plain, "predicted_per_second")
        first = ratios(rows, plain, "ttft_s")
        print(f"{where}, draft {name} (accepted {rate:.2f}): speed over iterative {speed}, first token {first}")
        yield bar("speed over iterative", speed, WORST)
        yield bar("wait for the first token over iterative", first, None, FIRST)


def cancel(setup: Setup, acceptance: float) -> Iterator[bool]:
    """With and without cancellation, the original model drafting for a target that differs from it."""
    target = setup.grow(f"target-{acceptance:g}", TARGET, N_LAYER, "--acceptance", str(acceptance))
    for inflight, wanted in ((UNLIMITED, UNLIMITED_GAIN), (0, DEFAULT_GAIN)):
        flags = ("--inflight", str(inflight))
        rows = setup.bench("pipeinfer", target, TARGET, *flags, "--ablate", "cancel", "-r", str(setup.rounds))
        whole, without = ([row for row in rows if bool(row["variant"]) == off] for off in (False, True))
        gain = ratios(whole, without, "predicted_per_second")
        print(f"{setup.n_stages} stages, acceptance {acceptance:g}, in flight {inflight or 'as by default'}: "
              f"speed {speed_of(whole)}, without cancellation {speed_of(without)}: {gain}")  # fmt: skip
        print(f"  {saved_layers(setup, target, flags)}", flush=True)
        yield bar("speed over that without cancellation", gain, wanted)


def saved_layers(setup: Setup, target: Path, flags: Sequence[str]) -> str:
    """What cancellation saves in one text."""
    result = setup.run("pipeinfer", target, TARGET, next(iter(PROMPTS)), *flags)
    speculation = result["speculation"]
    saved = sum(rank.get("layers_saved", 0) for rank in result["ranks"])
    total = speculation["runs"] * setup.n_stages * LAYERS_A_STAGE
    return (
        f"{speculation['runs']} runs, {speculation['runs_cancelled']} cancelled, "
        f"{speculation['runs_cancelled_in_time']} of these in time; {saved} of {total} layers saved "
        f"({saved / total:.0%}); hit rate {speculation['hit_rate']:.2f}"
    )


def foretell(setup: Setup, policies: Sequence[str]) -> Iterator[bool]:
    """The simulation against what is measured."""
    target = setup.grow("same", TARGET, N_LAYER)
    choices = {name: setup.record(target, DRAFT, name) for name in PROMPTS}
    found: dict[str, list[Record]] = {policy: [] for policy in policies}
    for _ in range(setup.rounds):
        for policy, rows in found.items():
            rows += setup.bench(policy, target, None if policy == "iterative" else DRAFT, "-r", "1")
    for policy, rows in found.items():
        foretold: list[Record] = [
            {"prompt": name, "predicted_per_second": setup.foretell(policy, path, DRAFT)}
            for name, path in choices.items()
        ]
        ratio = ratios(foretold, rows, "predicted_per_second")
        print(f"{setup.n_stages} stages, {policy}: measured {speed_of(rows)}, simulated {speed_of(foretold)}: {ratio}")
        yield bar("simulated over measured", ratio, 1 - NEAR, 1 + NEAR)


# -- figures


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median over the prompts, and the extremes."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.least:.3f} to {self.most:.3f})"


def ratios(rows: Sequence[Record], base: Sequence[Record], column: str) -> Ratio:
    found = [of_prompt(rows, name, column) / of_prompt(base, name, column) for name in PROMPTS]
    return Ratio(statistics.median(found), min(found), max(found))


def of_prompt(rows: Sequence[Record], name: str, column: str) -> float:
    return statistics.median(row[column] for row in rows if row["prompt"] == name)


def speed_of(rows: Sequence[Record]) -> str:
    return f"{statistics.median(of_prompt(rows, name, 'predicted_per_second') for name in PROMPTS):.2f}/s"


def bar(what: str, ratio: Ratio, least: float | None = None, most: float | None = None) -> bool:
    """Whether the median is within its bounds; says so if it is not."""
    good = (least is None or ratio.middle >= least) and (most is None or ratio.middle <= most)
    if not good:
        bounds = " and ".join(f"at {word} {value:g}" for word, value in (("least", least), ("most", most)) if value)
        print(f"  MISSED: {what} is {ratio.middle:.3f}, wanted {bounds}", flush=True)
    return good


def call(n_ranks: int, arguments: Sequence[str]) -> str:
    """What a command prints. Raises RuntimeError when it fails."""
    done = finish(n_ranks, arguments, timeout_s=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
