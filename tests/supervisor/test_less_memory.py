"""A supervised job that starts again with less memory goes on with the same bits, or ends with the numbers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pipeinfer.models.llama.repacking import repacked_types
from tests.support.gguf_factory import Shape, write_model
from tests.support.memory_group import MemoryGroup, memory_group, missing
from tests.support.supervised import Supervised, held, let_go

WHY = missing() or ("" if any(each.type == 2 for each in repacked_types()) else "libggml repacks no Q4_0 here")
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)

MIB = 1 << 20
SUPERVISOR_BYTES = 60 * MIB  # of the processes above the ranks, and some more
N_READ = 40  # bytes of text, after which a rank is lost


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    shape = Shape(n_layer=16, n_embd=1024, n_head=16, n_head_kv=16, n_ff=4096)
    model = write_model(tmp_path_factory.mktemp("model") / "model.gguf", shape, "Q4_0")
    settings = "-md none -p the -n 60 -c 512 --temp 0 --ignore-eos -t 1"
    return ["run", "-m", str(model), *settings.split(), "--slice-cache", str(model.parent / "slices")]


@pytest.fixture(scope="module")
def limits(words: list[str]) -> tuple[int, int, str]:
    """Bytes with which the weights are repacked, and with which they are not; and the text with the first."""
    with memory_group() as group:
        return _limits(group, words)


def _limits(group: MemoryGroup, words: list[str]) -> tuple[int, int, str]:
    def repacks(limit: int) -> bool:
        group.limit(limit)
        done = group.finish(2, [*words, "-n", "1"])
        assert done.returncode == 0, done.stderr
        return "no memory to repack" not in done.stderr

    group.limit(200 * MIB)
    said = group.finish(2, words).stderr  # two ranks need more
    found = re.search(r"has ([\d.]+) MB of memory left, and what shall run there needs ([\d.]+) MB", said)
    assert found, said
    least = (210 + int((float(found[2]) - float(found[1])) * 1e6) // MIB) * MIB
    enough = least + 2 * SUPERVISOR_BYTES
    assert not repacks(least) and not repacks(enough), "the two layouts need about as much"
    while not repacks(enough):
        enough += 120 * MIB
        assert enough < 1200 * MIB, "it is never repacked"
    return enough + SUPERVISOR_BYTES, least + SUPERVISOR_BYTES, group.finish(2, words).stdout


def strike(group: MemoryGroup, words: list[str], enough: int, short: int) -> tuple[int, str, str]:
    """A job that begins with enough memory and goes on with less. (exit code, text, errors)."""
    group.limit(enough)
    enter = group.folder / "cgroup.procs"
    with TemporaryDirectory() as folder:
        job = Supervised(2, [*words, *held(Path(folder))], preexec_fn=lambda: enter.write_text(str(os.getpid())))
        begun = job.read(N_READ)
        pid = job.ranks()[1]
        group.limit(short)
        os.kill(pid, 9)
        before = job.wait_for(b"the job starts again").decode()
        let_go(Path(folder))
        code, text, errors = job.finish()
    return code, begun + text, before + errors


def test_a_restart_on_less_memory_ends_with_the_numbers_or_goes_on_when_that_is_allowed(
    words: list[str], limits: tuple[int, int, str]
) -> None:
    enough, short, whole = limits
    with memory_group() as group:
        code, text, errors = strike(group, words, enough, short)
        assert code == 2 and whole.startswith(text), errors
        assert re.search(r"needs [\d.]+ MB", errors) and "was begun with numerics exact-q4_0." in errors
        code, text, errors = strike(group, [*words, "--allow-other-numerics"], enough, short)
        assert code == 0 and len(text) > N_READ and "and goes on with exact: the text may be another one" in errors


def test_a_restart_on_more_memory_keeps_the_layout(words: list[str], limits: tuple[int, int, str]) -> None:
    enough, short, _ = limits
    with memory_group() as group:
        group.limit(short)
        whole = group.finish(2, words).stdout
        code, text, errors = strike(group, words, short, enough)
        assert (code, text) == (0, whole), errors
