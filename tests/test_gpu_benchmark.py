"""The script that measures GPUs, tried on a CPU: every part of it runs to its end and finds what it is to find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import ROOT, environment

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pipeinfer[torch]'")


def test_the_script_for_gpus_runs_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "figures.jsonl"
    words = [
        "--device",
        "cpu",
        "--sizes",
        "tiny",
        "--ranks",
        "1",
        "--backends",
        "torch",
        "--tokens",
        "6",
        "--requests",
        "3",
    ]
    command = [
        sys.executable,
        str(ROOT / "benchmarks/gpu.py"),
        *words,
        "--folder",
        str(tmp_path),
        "--output",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in output.read_text().splitlines()]
    checked = [each for each in found if "right" in each]
    assert len(checked) >= 16 and all(each["right"] for each in checked)
    speeds = {each["what"]: each for each in found if "backend" in each}
    assert set(speeds) == {"one row", "one text", "many texts", "auto with a draft"}
    assert all(each["tokens_per_s"] > 0 for what, each in speeds.items() if what != "one row")
    assert 0 < speeds["one text"]["of_limit"] < 1
    assert (tmp_path / "tiny-torch.png").stat().st_size > 1000
