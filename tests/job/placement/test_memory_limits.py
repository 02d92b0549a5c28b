"""A plan that says that it fits runs, and one that says that it does not would not have run: in limited memory."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest

from tests.support.cases import in_long
from tests.support.gguf_factory import Shape, write_model
from tests.support.memory_group import UNCHECKED, memory_group, missing

WHY = missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)

SMALL_BYTES, STEP_BYTES = 150 << 20, 40 << 20
OFF_BY, OFF_BY_BYTES = 0.05, 50e6  # what a plan may be above what a rank takes
PROMPT = "a rank of the model has a layer\n" * 25
WIDE = ("-m", "{wide}", "-md", "none")
CASES = [
    (1, (*WIDE, "-c", "32000")),
    in_long(2, (*WIDE, "-c", "24000")),
    (2, (*WIDE, "-c", "32000", "--numerics", "fast", "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")),
    in_long(2, ("-c", "60000")),  # the shipped pair
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its keys and values take far more than its weights."""
    shape = Shape(n_layer=8, n_embd=512, n_head=8, n_head_kv=8, n_ff=1024)
    return write_model(tmp_path_factory.mktemp("models") / "wide.gguf", shape)


def whole_pages(n_bytes: float) -> int:
    return int(n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE


def needed(stderr: str) -> int:
    """The bytes of all ranks together, by the line of a job that does not fit."""
    (said,) = re.findall(r"needs ([\d.]+) MB \(", stderr)
    return int(float(said) * 1e6)


@pytest.mark.parametrize(("n_ranks", "options"), CASES)
def test_what_fits_runs_and_what_does_not_would_not_have(
    n_ranks: int, options: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    run = ["run", *(word.format(wide=model) for word in options), "-f", str(tmp_path / "prompt.txt"), "-n", "4"]
    with memory_group() as group:
        limit, done = SMALL_BYTES, None
        while done is None or done.returncode == 2:
            group.limit(limit)
            done = group.finish(n_ranks, run)
            if done.returncode == 2:
                asked = needed(done.stderr)
                limit = whole_pages(max(limit + STEP_BYTES, asked))
        assert done.returncode == 0 and group.n_killed() == 0, done.stderr
        group.limit(whole_pages(asked * (1 - OFF_BY) - OFF_BY_BYTES * n_ranks))
        refused = group.finish(n_ranks, run)
        assert refused.returncode == 2 and "memory left" in refused.stderr and group.n_killed() == 0
        unchecked = group.finish(n_ranks, run, UNCHECKED)
        assert unchecked.returncode and group.n_killed(), unchecked.stderr
