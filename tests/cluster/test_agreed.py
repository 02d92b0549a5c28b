"""What one rank finds out, or finds wrong, all ranks of a job know: they go on together, or leave together."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.jobs import environment, launcher


@pytest.mark.parametrize(
    ("failing", "by_rank_0", "by_all"),
    [
        ("", ["of rank 0"] * 3, ["of rank 0", "of rank 1", "of rank 2"]),
        ("0", ["raised: no luck on rank 0"] * 3, ["raised: no luck on rank 0"] * 3),
        ("1,2", ["of rank 0"] * 3, ["raised: no luck on rank 1"] * 3),
    ],
)
def test_all_ranks_have_the_value_or_the_error(failing: str, by_rank_0: list[str], by_all: list[str]) -> None:
    words, none = [*launcher(3), sys.executable, "-m", "tests.support.agreed", failing], subprocess.DEVNULL
    done = subprocess.run(words, stdin=none, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.stdout.splitlines() == [str(each) for each in zip(by_rank_0, by_all, strict=True)]
    said = [f"pipeinfer: {by_all[0].removeprefix('raised: ')}"] if failing else []
    errors = [line for line in done.stderr.splitlines() if not line.startswith("pipeinfer: waiting for ")]
    assert (done.returncode, errors) == (2 if failing else 0, said)
