"""Real ranks that pause at random, so that verdicts, cancellations and runs meet in unusual orders: the same text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.models.demo import DRAFT, TARGET
from tests.support.cases import in_long
from tests.support.delayed import run_delayed
from tests.support.jobs import ROOT, repacks, run_json

TREES = ["--width", "8", "-ps", "0"]
TEXT = ["-p", "def read_lines(path):\n", "-n", "48", "--ignore-eos", "--seed", "7"]
DRAFTS = ["-md", str(DRAFT), "-md", str(TARGET)]  # a larger draft that is always right, when it is in time
LONG_TEXT = "def add(first, second):\n    total = first + second\n    return total\n\n\n" * 45


def plain_on_one_thread(job: dict[str, Any], n_predict: int) -> list[int]:
    """As `plain_tokens_after`; a single thread waits for no other where the cores have more to do."""
    program = "import json, sys; from tests.support.plain_llama import greedy; print(greedy(**json.loads(sys.argv[1])))"
    options = {"n_predict": n_predict, "n_threads": 1, "repacked": repacks(job)}
    arguments = json.dumps({"path": str(TARGET), "prompt": job["prompt_tokens"], **options})
    command = [sys.executable, "-c", program, arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    tokens: list[int] = json.loads(done.stdout)
    return tokens


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    """TEXT's tokens by temperature: greedy from plain llama-cpp-python, sampled from one process without a draft."""
    alone = run_json(1, [*TEXT, "--temp", "0.8", "--policy", "iterative", "-t", "1"])
    greedy = plain_on_one_thread(alone, 48)
    assert greedy != alone["tokens"]
    return {"0": greedy, "0.8": alone["tokens"]}


@pytest.mark.parametrize(
    ("n_ranks", "temp", "flags"),
    [
        (3, "0", []),
        (4, "0.8", ["--microbatch", "3", "--inflight", "12"]),
        in_long(3, "0.8", ["--no-cancel"]),
        in_long(4, "0", ["--no-continuous", "--microbatch", "5"]),
        (3, "0", ["--no-async"]),
        in_long(4, "0.8", ["--no-post-ahead"]),
        (3, "0.8", ["--no-partitions", "-b", "3"]),
        (4, "0.8", ["--sequences", "3"]),
        in_long(4, "0", ["-t", "1", *DRAFTS]),
        (3, "0.8", ["-t", "1", *DRAFTS, "--sequences", "5"]),
    ],
)
def test_pauses_do_not_change_the_text(n_ranks: int, temp: str, flags: list[str], plain: dict[str, list[int]]) -> None:
    result = run_delayed(n_ranks, [*TEXT, *TREES, "--temp", temp, *flags], seed=n_ranks)
    assert result["tokens"] == plain[temp]
    assert result["finish"] == "length"
    n_cancelled = result["speculation"]["runs_cancelled"]
    # a draft that is always right may leave nothing to cancel
    assert n_cancelled == 0 if "--no-cancel" in flags else n_cancelled > 0 or "-md" in flags


def test_pauses_at_a_long_prompt(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(LONG_TEXT)
    common = ["-f", str(prompt), "-c", "2048", "-n", "32", "--ignore-eos", *TREES, "--temp", "0"]
    result = run_delayed(3, common, seed=1)
    assert len(result["prompt_tokens"]) > 950
    assert result["tokens"] == plain_on_one_thread(result, 32)
