"""Speed against bandwidth on three hosts made of namespaces, beside what `simulate` foretells of each.

    python benchmarks/bandwidth.py --mbit 1000,125,20

Needs root (see tests/namespaces.py). A draft and two stages of the shipped pair: at each bandwidth `measure` makes a
profile, `simulate` says with it how fast a recorded text would be, and real jobs write that text.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.jobs import COMMAND, environment
from tests.namespaces import Hosts, hosts, missing

PROMPT = "def read_lines(path):\n    with open(path) as file:\n        return [line.strip() for line in file]\n\n\n"
POLICIES = ("iterative", "pipeinfer")


def real(made: Hosts, policy: str, n_predict: int, repetitions: int) -> dict[str, float]:
    """The median's TTFT and speed; of text that goes on after an end token."""
    asked = ["run", "-p", PROMPT * 4, "-n", str(n_predict), "--temp", "0", "-t", "1", "--ignore-eos", "--json"]
    found = []
    for _ in range(repetitions):
        done = made.run([*asked, "--no-escape", "--policy", policy], timeout_s=300)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["timings"])
    found.sort(key=lambda timings: timings["predicted_per_second"])
    median: dict[str, float] = found[len(found) // 2]
    return median


def foretold(profile: Path, choices: Path, policy: str, n_predict: int) -> dict[str, Any]:
    words = ["simulate", "--profile", str(profile), "--policy", policy, "--choices", str(choices), "-n", str(n_predict)]
    done = subprocess.run([*COMMAND, *words, "-o", "json"], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    return dict(row)


@click.command()
@click.option("--mbit", default="1000,125", show_default=True)
@click.option("-n", "--predict", default=96, show_default=True)
@click.option("-r", "--repetitions", default=3, show_default=True)
def main(mbit: str, predict: int, repetitions: int) -> None:
    if why := missing():
        raise click.ClickException(f"no hosts can be made here: {why}")
    with tempfile.TemporaryDirectory() as directory, hosts(3, Path(directory)) as made:
        folder = Path(directory)
        record = ["record", "-p", PROMPT * 4, "-n", str(predict), "-t", "1", "-o", str(folder / "choices")]
        subprocess.run([*COMMAND, *record], check=True, capture_output=True, env=environment())
        click.echo("Mbit/s  policy     tokens/s  simulated  ratio   TTFT ms  simulated  ratio")
        for rate in map(float, mbit.split(",")):
            made.limit(rate)
            profile = folder / f"{rate:g}.toml"
            done = made.run(["measure", "-t", "1", "-o", str(profile)], timeout_s=300)
            assert done.returncode == 0, done.stderr
            for policy in POLICIES:
                found, told = (
                    real(made, policy, predict, repetitions),
                    foretold(profile, folder / "choices", policy, predict),
                )
                speeds = found["predicted_per_second"], told["predicted_per_second"]
                ttfts = 1e3 * found["ttft_s"], 1e3 * told["ttft_s"]
                click.echo(
                    f"{rate:6g}  {policy:9} {speeds[0]:9.1f} {speeds[1]:10.1f} {speeds[0] / speeds[1]:6.2f} "
                    f"{ttfts[0]:9.1f} {ttfts[1]:10.1f} {ttfts[0] / ttfts[1]:6.2f}"
                )


if __name__ == "__main__":
    main()
