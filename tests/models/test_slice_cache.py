"""Slices on disk: reused when they are right, written anew when not; writers that race, or were killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.contents import SEAL_BYTES, slice_samples
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from tests.support.gguf_factory import Shape, write_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cached") / "model.gguf")


def cached(model: Path, cache: Path) -> tuple[Path, list[str]]:
    """The file of layers 1 and 2, and what was said about it."""
    notices: list[str] = []
    part = open_slice(read_model_info(model), 1, 3, cache, notices.append)
    part.close()
    return part.path, notices


def in_memory(model: Path) -> bytes:
    part = open_slice(read_model_info(model), 1, 3)
    data = part.path.read_bytes()
    part.close()
    return data


def test_a_right_slice_is_reused(model: Path, tmp_path: Path) -> None:
    path, notices = cached(model, tmp_path / "cache")
    inode = path.stat().st_ino
    assert path.read_bytes()[:-SEAL_BYTES] == in_memory(model)
    assert cached(model, tmp_path / "cache") == (path, []) and notices == []
    assert path.stat().st_ino == inode
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", ["cut", "zeros", "block", "header", "seal", "longer", "empty"])
def test_a_damaged_slice_is_said_and_written_anew(model: Path, tmp_path: Path, damage: str) -> None:
    path, _ = cached(model, tmp_path)
    good = path.read_bytes()
    at = len(good) // 2
    bad = {
        "cut": good[:-100],
        "zeros": bytes(len(good)),
        "block": good[:at] + os.urandom(4096) + good[at + 4096 :],
        "header": good[:9] + b"\x7f" + good[10:],
        "seal": good[:-32] + bytes(32),
        "longer": good + b"\0",
        "empty": b"",
    }[damage]
    path.write_bytes(bad)
    _, (notice,) = cached(model, tmp_path)
    assert str(path) in notice and "written anew" in notice and "\n" not in notice
    assert path.read_bytes() == good
    assert cached(model, tmp_path)[1] == []


@pytest.mark.parametrize("n_bytes", [1, 5000, 1 << 24, (1 << 26) + 12345, 3 << 30])
def test_junk_anywhere_in_a_slice_meets_a_sample(n_bytes: int) -> None:
    spans = list(slice_samples(n_bytes))
    assert spans[0][0] == 0 and sum(spans[-1]) == n_bytes
    ends = [0, *(start + length for start, length in spans)]
    unseen = max(start - end for (start, _), end in zip(spans, ends, strict=False))
    assert unseen <= (0 if n_bytes <= 1 << 24 else 256 << 10)
    assert sum(length for _, length in spans) <= max(17 << 20, n_bytes // 60)


def test_another_model_of_the_same_shape_at_the_same_path_gets_its_own_layers(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf")
    first, _ = cached(model, tmp_path / "cache")
    old = first.read_bytes()
    write_model(model, Shape(seed=1))
    second, notices = cached(model, tmp_path / "cache")
    assert notices == [] and second.read_bytes()[:-SEAL_BYTES] == in_memory(model) != old[:-SEAL_BYTES]


def test_a_change_between_the_samples_is_found_by_the_files_state(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", Shape(n_ff=2048))
    before = read_model_info(model)
    cached(model, tmp_path / "cache")
    tensor = before.tensor("blk.1.ffn_up.weight")
    assert tensor is not None and tensor.n_bytes > 100_000
    with model.open("r+b") as file:
        file.seek(tensor.offset + 9000)  # behind the first sampled block, before the second
        file.write(os.urandom(8))
    assert read_model_info(model).fingerprint == before.fingerprint, "this test must change what no sample sees"
    path, _ = cached(model, tmp_path / "cache")
    assert path.read_bytes()[:-SEAL_BYTES] == in_memory(model)


def test_a_model_that_changes_after_its_header_was_read_is_not_cut(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf")
    info = read_model_info(model)
    write_model(model, Shape(seed=1))
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(UserError, match=r"model.gguf was changed while it was read"):
            open_slice(info, 1, 3, cache)
    with pytest.raises(UserError, match=r"model.gguf was changed while it was read"):
        open_slice(info, 0, info.n_layer)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_model_that_becomes_shorter_is_not_cut(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf")
    info = read_model_info(model)
    os.truncate(model, model.stat().st_size - 100)
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(UserError, match=r"model.gguf became shorter while it was read"):
            open_slice(info, 1, info.n_layer, cache)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_model_that_cannot_be_read_is_no_lack_of_room(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf")
    info = read_model_info(model)
    model.unlink()
    with pytest.raises(UserError, match=r"model.gguf cannot be read: No such file or directory; check the file"):
        open_slice(info, 1, info.n_layer)


def test_what_went_wrong_is_said_where_nothing_can_be_removed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    with pytest.raises(UserError, match="cannot be written: Read-only file system"):
        cached(model, tmp_path)


def test_writers_may_race(model: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: cached(model, tmp_path), range(24)))
    assert [notices for _, notices in results] == [[]] * 24
    (path,) = tmp_path.iterdir()
    assert path.read_bytes()[:-SEAL_BYTES] == in_memory(model)


WRITER = """
import sys, time
from pathlib import Path
from pipeinfer.models.gguf import slice as gguf_slice
from pipeinfer.models.gguf.model_info import read_model_info
info = read_model_info(sys.argv[1])
def stall(*args):
    print("writing", flush=True)
    time.sleep(100)
gguf_slice._write_slice = stall
gguf_slice.open_slice(info, 1, 3, Path(sys.argv[2]))
"""


def test_what_a_killed_writer_leaves_is_swept_and_a_living_ones_file_is_not(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(model), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as writer:
        assert writer.stdout and writer.stdout.readline() == "writing\n"
        (temporary,) = tmp_path.iterdir()
        cached(model, tmp_path)
        assert temporary.exists(), "its writer lives"
        writer.send_signal(signal.SIGKILL)
    (tmp_path / temporary.name.replace(".gguf.", "-tokens.bin.")).touch()
    path, _ = cached(model, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
