"""What `plan --json` says of twelve settings on one, three and five hosts: who has what, in what memory and numerics.

`python -m tests.job.planning.test_golden_plans` writes the file anew; a change of it is a change of plans.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from pipeinfer.cli.plan import plan_command
from pipeinfer.errors import UserError
from pipeinfer.models.demo import DRAFT, TARGET

GOLDEN = Path(__file__).with_name("golden_plans.json")
HOSTS = """a cores=8 memory=4G gb_per_s=40 gflop_per_s=400
b cores=4 memory=2G gb_per_s=20 gflop_per_s=200
c cores=16 memory=8G gb_per_s=80 gflop_per_s=900
d cores=2 memory=125M gb_per_s=10 gflop_per_s=100
e cores=8 memory=4G gb_per_s=40 gflop_per_s=400
"""
REPACKED = ((2, 32, "x"), (8, 32, "y"), (12, 3, "z"))
SETTINGS = {
    "default": (),
    "no draft": ("-md", "none"),
    "fast": ("--numerics", "fast", "-md", "none", "-c", 2048),
    "as in the file": ("--no-repack", "--policy", "pipedec"),
    "cache": ("--numerics", "fast", "-ctk", "q8_0", "-ctv", "q8_0", "-ctkd", "q4_0"),
    "wire": ("--numerics", "fast", "--wire-type", "bf16", "--policy", "pipeinfer"),
    "threads": ("-t", 2, "--sequences", 8, "-b", 64, "-c", 700, "--prompt-tokens", 300),
    "torch": ("--backend", "torch:bf16", "-md", "none"),
    "layers on GPUs": ("-ngl", 2, "--policy", "iterative"),
    "draft on a GPU": ("-ngld", "all", "--policy", "speculative"),
    "draft rank": ("--draft-rank", 1, "--policy", "flowspec"),
    "two drafts": ("-md", DRAFT, "-md", TARGET, "--policy", "pipespec"),
}


def plans() -> dict[str, Any]:
    """By setting and number of ranks; an error's text where there is no plan, or beside one that does not fit."""
    with tempfile.TemporaryDirectory() as folder:
        (hosts := Path(folder) / "hosts").write_text(HOSTS)
        return {
            f"{name}, np {n_ranks}": _plan(["--hosts", hosts, "-np", n_ranks, *_models(words), *words])
            for name, words in SETTINGS.items()
            for n_ranks in (1, 3, 5)
        }


def _models(words: tuple[object, ...]) -> list[object]:
    return ["-m", TARGET, *([] if "-md" in words else ["-md", DRAFT])]


def _plan(words: list[object]) -> Any:
    result = CliRunner().invoke(plan_command, [*map(str, words), "--json"], standalone_mode=False)
    if result.exception and not isinstance(result.exception, UserError):
        raise result.exception
    if not result.stdout:
        return str(result.exception)
    found = json.loads(result.stdout)
    found["predictions"] = {each["policy"]: f"{each['tokens_per_s']:.4g}" for each in found["predictions"]}
    found["ways"] = [way["what"] for way in found["ways"]]
    for name in ("link", "acceptance", "plan", "plan_hash"):
        del found[name]
    found |= {"model": Path(found["model"]).name, "drafts": [Path(draft).name for draft in found["drafts"]]}
    found["ranks"] = ["; ".join(f"{name} {value}" for name, value in row.items()) for row in found["ranks"]]
    return json.loads(json.dumps(found).replace(str(TARGET.parent), ""))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with mock.patch("pipeinfer.models.llama.repacking.repacked_types", lambda: REPACKED):
        return plans()


@pytest.mark.parametrize("name", json.loads(GOLDEN.read_text()) if GOLDEN.exists() else [])
def test_plans_are_what_they_were(name: str, found: dict[str, Any]) -> None:
    expected = json.loads(GOLDEN.read_text())[name]
    if isinstance(expected, str):
        assert found[name] == expected
        return
    assert {key: found[name][key] for key in expected} == expected


def test_every_setting_has_its_plan(found: dict[str, Any]) -> None:
    assert list(found) == list(json.loads(GOLDEN.read_text())) and len(found) == 36


if __name__ == "__main__":
    with mock.patch("pipeinfer.models.llama.repacking.repacked_types", lambda: REPACKED):
        GOLDEN.write_text(json.dumps(plans(), indent=1) + "\n")
