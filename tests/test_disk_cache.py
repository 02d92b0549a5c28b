"""Values kept from run to run: none of what may be in the folder is a fault."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from pipeinfer.disk_cache import BYTES_MAX, N_VALUES, DiskCache, cache_folder, user_cache


def test_a_value_comes_back(tmp_path: Path) -> None:
    kept = DiskCache(tmp_path / "new" / "folder")
    assert kept.get("a") is None
    kept.put("a", {"1": 0.5})
    kept.put("b", False)
    assert DiskCache(tmp_path / "new" / "folder").get("a") == {"1": 0.5} and kept.get("b") is False


@pytest.mark.parametrize("junk", [b"", b"{", b"\xff\x00", b"[1]", b'{"name": "other", "value": 1}', b"[" * 60_000])
def test_junk_is_no_value_and_is_replaced(tmp_path: Path, junk: bytes) -> None:
    kept = DiskCache(tmp_path)
    kept.put("a", 1)
    (file,) = tmp_path.iterdir()
    file.write_bytes(junk)
    assert kept.get("a") is None
    kept.put("a", 2)
    assert kept.get("a") == 2


def test_only_regular_files_of_a_sane_size_are_read(tmp_path: Path) -> None:
    kept = DiskCache(tmp_path)
    kept.put("a", 1)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b" " * BYTES_MAX + file.read_bytes())
    assert kept.get("a") is None
    file.unlink()
    os.mkfifo(file)  # reading it would wait for ever
    assert kept.get("a") is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        kept = DiskCache(folder)
        kept.put("a", 1)
        assert kept.get("a") is None


def test_the_folder_does_not_grow_for_ever(tmp_path: Path) -> None:
    kept = DiskCache(tmp_path)
    for number in range(N_VALUES + 20):
        kept.put(str(number), number)
        assert kept.get("0") == 0
    assert len(list(tmp_path.iterdir())) == N_VALUES, "without those that nobody has asked for"


def test_writers_at_once(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for _ in range(20):
            DiskCache(tmp_path).put("a", number)
            assert DiskCache(tmp_path).get("a") in range(4)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(tmp_path.iterdir())) == 1


def test_where_it_is(tmp_path: Path) -> None:
    user_cache({"XDG_CACHE_HOME": str(tmp_path)}).put("a", 1)
    assert (tmp_path / "pipeinfer" / "kept").is_dir()
    assert str(user_cache({"XDG_CACHE_HOME": "relative"})._folder).endswith(".cache/pipeinfer/kept")


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", str)  # as of a number that has no name
    assert cache_folder({}) == Path("/nonexistent/.cache/pipeinfer")
