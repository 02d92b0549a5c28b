"""One engine serves all requests of a session: whatever came before, the same text, and figures of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pipeinfer.models.demo import DRAFT, TARGET
from tests.support.cases import in_long
from tests.support.jobs import environment, launcher, run_json

TEXT = ["-p", "def read_lines(path):\n", "-n", "48", "-c", "200", "--ignore-eos", "--seed", "7", "-t", "1"]


@pytest.mark.parametrize(
    ("n_ranks", "flags"),
    [
        (1, ["--temp", "0.8"]),
        (3, ["--temp", "0", "--width", "8", "-ps", "0"]),
        in_long(3, ["--temp", "0.8", "--repeat-penalty", "1.2"]),
        (4, ["--temp", "0.8", "-md", str(DRAFT), "-md", str(TARGET)]),
    ],
)
def test_requests_after_one_another(n_ranks: int, flags: list[str]) -> None:
    command = [*launcher(n_ranks), sys.executable, "-m", "tests.support.again", "run", "--json", *TEXT, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    again, alone = json.loads(done.stdout), run_json(1, ["--policy", "iterative", *TEXT, *_sampling(flags)])
    assert again["tokens"] == alone["tokens"] and len(again["tokens"]) == 48


def _sampling(flags: list[str]) -> list[str]:
    return [
        word
        for option, value in zip(flags[::2], flags[1::2], strict=True)
        if option in ("--temp", "--repeat-penalty")
        for word in (option, value)
    ]
