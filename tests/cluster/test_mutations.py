"""Models with flipped bytes and cut-off ends: each is refused in words, or works; none ends the process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cases import in_long
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import ROOT

TINY = Shape(n_layer=2, n_embd=64, n_head=2, n_head_kv=1, n_ff=64, n_vocab=320)
SHAPES = {"llama": TINY, "qwen3moe": replace(TINY, arch="qwen3moe", n_expert=4)}


@pytest.mark.parametrize("n_copies", [80, in_long(500)])
@pytest.mark.parametrize("name", SHAPES)
def test_a_damaged_model_never_ends_the_process(tmp_path: Path, name: str, n_copies: int) -> None:
    path = write_model(tmp_path / "model.gguf", SHAPES[name])
    command = [sys.executable, "-m", "tests.support.mutations", str(path), "0", str(n_copies)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=ROOT, timeout=300)
    outcomes = done.stdout.splitlines()
    assert done.returncode == 0, f"copy {len(outcomes)}: {done.stderr[-2000:]}"
    n_loads = sum(line.split()[1] == "loads" for line in outcomes)
    assert len(outcomes) == n_copies and n_copies / 10 < n_loads < n_copies * 9 / 10
