"""Jobs for which --fit has chosen: they run in the memory that there is, take what was said, and go on as they were."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.gguf_factory import Shape, write_model
from tests.support.memory_group import memory_group, missing
from tests.support.paces import pace_words, slow_target
from tests.support.supervised import Supervised

MIB = 1 << 20
N_READ = 40  # bytes of text, after which a rank is lost
SUPERVISOR_BYTES = 30 * MIB  # of the processes above the ranks
WHY = missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Keys and values for all tokens that the model was trained for take far more than its weights."""
    shape = Shape(n_layer=8, n_embd=512, n_head=8, n_head_kv=8, n_ff=1024)
    model = write_model(tmp_path_factory.mktemp("models") / "model.gguf", shape)
    return ["run", "-m", str(model), *"-md none -p the -t 1 --temp 0 --ignore-eos --policy iterative".split()]


def context(stderr: str) -> int:
    (n_ctx,) = set(re.findall(r"chose -c (\d+) \(of 8192\)", stderr))
    return int(n_ctx)


@pytest.mark.parametrize(("n_ranks", "limit"), [(1, 240 * MIB), (2, 390 * MIB)])
def test_what_is_said_is_what_is_taken(n_ranks: int, limit: int, words: list[str]) -> None:
    with memory_group() as group:
        group.limit(limit)
        refused = group.finish(n_ranks, [*words, "-c", "0", "-n", "8", "--no-fit"])
        assert refused.returncode == 2 and "of memory left" in refused.stderr and "--fit" not in refused.stderr
        done = group.finish(n_ranks, [*words, "-c", "0", "-n", "8", "--json", "--fit-target", "10"])
        assert done.returncode == 0 and group.n_killed() == 0, done.stderr
    assert 4096 <= context(done.stderr) < 8192
    for rank in json.loads(done.stdout)["ranks"]:
        planned, held = rank["memory_bytes"], rank["peak_rss_bytes"]
        assert abs(planned - held) < max(0.05 * held, 10 * MIB), (rank["role"], planned, held)


def test_a_supervised_job_goes_on_with_what_was_chosen(words: list[str], tmp_path: Path) -> None:
    pace = pace_words(tmp_path, slow_target(4.0, stages=1))  # not at its end before it is struck
    # where memory is short the first job may repack and the second not, which says that its text may be another one
    words = [*words, *"--no-repack -c 0 -n 300 --fit-target 10 --temp 0.8 -s 3".split()]
    limit = 380 * MIB
    with memory_group() as group:
        group.limit(limit)
        whole = group.finish(2, words)
        group.limit(limit + SUPERVISOR_BYTES)
        enter = group.folder / "cgroup.procs"
        job = Supervised(2, [*words, *pace], preexec_fn=lambda: enter.write_text(str(os.getpid())))
        begun = job.read(N_READ)
        pid = job.ranks()[1]
        group.limit(limit + SUPERVISOR_BYTES + 10 * MIB)
        os.kill(pid, 9)
        code, text, errors = job.finish()
    assert whole.returncode == 0 and (code, begun + text) == (0, whole.stdout), errors
    assert context(errors) and "for the job that goes on" in errors, "the same context twice"
