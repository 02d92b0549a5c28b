"""Which rank's error ends a job that cannot load, and that every command ends then in order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeinfer.job.session.ranks import first_error
from tests.support import jobs
from tests.support.jobs import finish


def test_the_lowest_ranks_error_is_told() -> None:
    assert first_error({0: {"error": "own"}, 2: {"error": "other"}}) == "own"
    assert first_error({0: {"error": ""}, 2: {"error": "late"}, 1: {"error": "early"}}) == "early"
    assert first_error({0: {"error": ""}, 1: {"loaded_s": 1.0}}) == ""


@pytest.mark.parametrize(
    "command",
    [
        ["run", "-p", "x", "-n", "2"],
        ["bench", "-p", "8", "-n", "2", "-r", "1", "--policy", "pipeinfer"],
        ["bench", "-p", "8", "-n", "2", "-r", "1", "--policy", "iterative,pipeinfer", "--numerics", "fast"],
        ["batch", "asked.jsonl", "-o", "answers.jsonl"],
        ["serve", "--port", "0"],
        ["chat"],
        ["measure", "--output", "profile.toml"],
    ],
    ids=lambda command: command[0],
)
def test_a_rank_that_cannot_load_ends_every_command_in_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no torch, also where there is one."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    paths = f"{tmp_path}{os.pathsep}{jobs.ROOT}"
    environment = jobs.environment() | {"PYTHONPATH": paths}
    monkeypatch.setattr(jobs, "environment", lambda: environment)
    (tmp_path / "asked.jsonl").write_text('{"prompt": "x"}\n')
    words = [str(tmp_path / word) if "." in word else word for word in command]
    done = finish(2, [*words, "--backend", "llama,torch"])
    said = [line for line in done.stderr.splitlines() if "needs PyTorch" in line]
    assert done.returncode == 2 and len(said) == 1 and said[0].startswith("pipeinfer: rank 1 ("), done.stderr
    assert "Traceback" not in done.stderr and not done.stdout
