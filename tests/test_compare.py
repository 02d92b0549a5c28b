"""`pipeinfer compare`: what `simulate` says of each policy, side by side, and the limit."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from pipeinfer.cluster.costs import HeadCost, LinkCost, ModelCost, Profile, Work
from pipeinfer.policies.registry import POLICIES
from pipeinfer.virtual.compare import COLUMNS, limit_of
from tests.jobs import finish

CELL = ["--profile", "pipeinfer-c", "--nodes", "4", "-n", "48", "-r", "2"]


def test_the_table_has_what_simulate_says_and_the_limit(tmp_path: Path) -> None:
    picture, results = tmp_path / "policies.svg", tmp_path / "results.csv"
    done = finish(1, ["compare", *CELL, "-o", str(picture)])
    assert done.returncode == 0, done.stderr
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    assert lines[0] == list(COLUMNS)
    rows = {line[0]: dict(zip(COLUMNS, line, strict=True)) for line in lines[2:]}
    assert list(rows) == [*POLICIES, "limit"]
    simulated = finish(1, ["simulate", *CELL, "--policy", ",".join(POLICIES), "--results", str(results)])
    assert simulated.returncode == 0, simulated.stderr
    speeds: dict[str, list[float]] = {}
    for row in csv.DictReader(results.open()):
        speeds.setdefault(row["policy"], []).append(float(row["predicted_per_second"]))
    plain, limit = sum(speeds["iterative"]) / 2, float(rows["limit"]["tokens/s"])
    for policy, found in speeds.items():
        speed = sum(found) / 2
        assert float(rows[policy]["tokens/s"]) == pytest.approx(speed, abs=0.006)
        assert float(rows[policy]["over iterative"]) == pytest.approx(speed / plain, abs=0.006)
        assert float(rows[policy]["of the limit"]) == pytest.approx(speed / limit, abs=0.02)
    assert rows["iterative"]["rows a token"] == "1.0" and rows["iterative"]["hit rate"] == "-"
    assert picture.read_bytes().startswith(b"<?xml")


def test_the_limit_is_the_slowest_stages() -> None:
    stages = tuple(ModelCost("stage", layers, Work((1.0,), (0.01,), (1e-5,))) for layers in (3, 4, 2))
    profile = Profile("x", 4, stages, (), LinkCost(0.0, 1e9), HeadCost())
    assert limit_of(profile, 0) == pytest.approx(1 / 0.04)
    assert limit_of(profile, 100) == pytest.approx(1 / (4 * (0.01 + 1e-3)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "policies.bmp"], ".png"),
        (["--policy", "iterative", "--width", "3"], "--width is an option of"),
        (["--pair", "magic"], "magic"),
    ],
)
def test_bad_options_give_one_line(arguments: list[str], words: str) -> None:
    done = finish(1, ["compare", *CELL, *arguments])
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and words in done.stderr, done.stderr
