"""`pipeinfer simulate` without a policy: what it says of each one, side by side, and the limit."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from pipeinfer.policies import POLICIES
from pipeinfer.virtual.costs import HeadCost, LinkCost, ModelCost, Profile, Work
from pipeinfer.virtual.study import COLUMNS
from tests.support.jobs import finish

CELL = ["--profile", "pipeinfer-c", "--nodes", "4", "-n", "48", "-r", "2"]


def test_the_table_has_what_simulate_says_and_the_limit(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    done = finish(1, ["simulate", *CELL, "--results", str(results)])
    assert done.returncode == 0, done.stderr
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    assert lines[0] == list(COLUMNS)
    rows = {line[0]: dict(zip(COLUMNS, line, strict=True)) for line in lines[2:]}
    assert list(rows) == [*POLICIES, "limit"]
    found: dict[str, list[float]] = {}
    for row in csv.DictReader(results.open()):
        found.setdefault(row["policy"], []).append(float(row["predicted_per_second"]))
    plain, limit = sum(found["iterative"]) / 2, float(rows["limit"]["tokens/s"])
    for policy, speeds in found.items():
        speed = sum(speeds) / 2
        assert float(rows[policy]["tokens/s"].split()[0]) == pytest.approx(speed, abs=0.006)
        assert float(rows[policy]["over iterative"]) == pytest.approx(speed / plain, abs=0.006)
        assert float(rows[policy]["of the limit"]) == pytest.approx(speed / limit, abs=0.02)
    assert rows["iterative"]["rows a token"] == "1.0" and rows["iterative"]["hit rate"] == "-"


def test_other_forms_have_the_same_policies_as_rows() -> None:
    done = finish(1, ["simulate", *CELL, "-o", "json"])
    assert [row["policy"] for row in json.loads(done.stdout)] == list(POLICIES)
    done = finish(1, ["simulate", *CELL, "--json"])
    assert [json.loads(line)["policy"] for line in done.stdout.splitlines()] == list(POLICIES) * 2


def test_the_limit_is_the_slowest_stages() -> None:
    stages = tuple(ModelCost("stage", layers, Work((1.0,), (0.01,), (1e-5,))) for layers in (3, 4, 2))
    profile = Profile("x", 4, stages, (), LinkCost(0.0, 1e9), HeadCost())
    assert profile.limit_per_s(0) == pytest.approx(1 / 0.04)
    assert profile.limit_per_s(100) == pytest.approx(1 / (4 * (0.01 + 1e-3)))
