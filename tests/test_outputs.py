"""Files that are written: whole or as they were, never one that is read, and named when it cannot be."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeinfer.errors import UserError
from pipeinfer.models.demo import TARGET
from pipeinfer.observe.table import RESULTS
from pipeinfer.observe.trace import TraceSpan, write_chrome_trace
from pipeinfer.outputs import check_separate, check_writable, whole_file, write_file
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import environment, finish, launcher
from tests.support.rows import make_row


@contextmanager
def room_for(n_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes: as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("before", [None, b"what was there"])
def test_a_file_is_whole_or_as_it_was(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "out"
    if before is not None:
        path.write_bytes(before)
        path.chmod(0o640)

    def untouched() -> bool:
        return names(tmp_path) == ([] if before is None else ["out"]) and (
            before is None or path.read_bytes() == before
        )

    with room_for(1000), pytest.raises(UserError, match=r"--out .*out: File too large"):
        write_file(path, "--out", b"x" * 2000)
    assert untouched()
    with pytest.raises(KeyboardInterrupt), whole_file(path, "--out") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert untouched()
    check_writable(path, "--out")
    assert untouched()
    write_file(path, "--out", b"new")
    assert path.read_bytes() == b"new" and names(tmp_path) == ["out"]
    assert before is None or path.stat().st_mode & 0o777 == 0o640


def test_a_link_stays_one_and_a_device_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")
    write_file(tmp_path / "link", "--out", b"1")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "folder/file").read_bytes() == b"1"
    assert names(tmp_path) == ["folder", "link"] and names(tmp_path / "folder") == ["file"]
    (tmp_path / "null").symlink_to("/dev/null")
    for path in (Path("/dev/null"), tmp_path / "null"):
        check_writable(path, "--out")
        write_file(path, "--out", b"1")
        assert path.is_char_device()
    with pytest.raises(UserError, match="/dev/full: No space left"):
        write_file(Path("/dev/full"), "--out", b"1")


@pytest.mark.parametrize(
    ("name", "words"), [("none/out", "there is no folder"), ("folder", "Is a directory"), ("", "Is a directory")]
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder").mkdir()
    for attempt in (lambda: check_writable(tmp_path / name, "-o"), lambda: write_file(tmp_path / name, "-o", b"")):
        with pytest.raises(UserError, match=words):
            attempt()
    assert names(tmp_path) == ["folder"] and names(tmp_path / "folder") == []


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="rights of Linux")
def test_a_folder_that_one_may_not_enter_is_said(tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    shutil.copy(TARGET, folder / "m.gguf")
    folder.chmod(0)
    plain = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    simulated = ["simulate", "--profile", "ethernet", "--nodes", "2", "-n", "4", "--policy", "iterative"]
    for words in (
        ["plan", "-m", folder / "m.gguf"],
        ["plan", "-m", TARGET, "-md", folder / "m.gguf"],
        ["models", "info", folder / "m.gguf"],
        [*simulated, "--results", folder / "new.csv"],
        ["run", "-p", "x", "-n", "2", "--trace", folder / "new.json"],
        ["run", "-p", "x", "-n", "2", "-md", "none", "--slice-cache", folder / "new"],
        ["batch", TARGET, "-o", folder / "new.jsonl"],
    ):
        command = [*plain, *launcher(2 if "run" in words else 1), sys.executable, "-m", "pipeinfer", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
        assert done.returncode == 2 and "Permission denied" in done.stderr, (words, done)
        assert "PermissionError" not in done.stderr, (words, done)


def test_an_output_is_no_input_by_any_name(tmp_path: Path) -> None:
    model, hard, soft = tmp_path / "model", tmp_path / "hard", tmp_path / "soft"
    model.write_bytes(b"m")
    hard.hardlink_to(model)
    soft.symlink_to(model)
    (tmp_path / "folder").symlink_to(".")
    for name in (model, hard, soft, tmp_path / "folder" / "model", Path(os.path.relpath(model))):
        with pytest.raises(UserError, match="is the file that --model reads"):
            check_separate({"--trace": name}, {"--model": [model]})
    with pytest.raises(UserError, match=r"--trace .*new is the file that --results writes"):
        check_separate({"--results": tmp_path / "folder/new", "--trace": tmp_path / "new"}, {})
    check_separate({"--results": Path("/dev/null"), "--trace": Path("/dev/null")}, {"--file": [Path("/dev/null")]})
    check_separate({"--results": tmp_path / "a", "--trace": tmp_path / "b", "--x": None}, {"--model": [model]})


def test_no_part_of_a_row_stays_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    with room_for(700), pytest.raises(UserError, match=r"--results .*results\.csv: File too large"):
        RESULTS.append(path, make_row())
    assert path.read_bytes() == b""
    RESULTS.append(path, make_row())
    whole = path.read_bytes()
    for n_more in (1, 50, 300):
        with room_for(len(whole) + n_more), pytest.raises(UserError, match=r"results\.csv"):
            RESULTS.append(path, make_row())
        assert path.read_bytes() == whole
    RESULTS.append(path, make_row())
    assert len(RESULTS.read(path)) == 2


def test_a_check_leaves_nothing_behind(tmp_path: Path) -> None:
    RESULTS.check(tmp_path / "results.csv")
    assert names(tmp_path) == []


def test_a_trace_is_replaced_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("before")
    with room_for(100), pytest.raises(UserError, match="trace"):
        write_chrome_trace(tmp_path / "trace", [("rank 0", [TraceSpan("draft", 0.0, 1.0)] * 99)])
    assert (tmp_path / "trace").read_text() == "before"


# -- commands


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf", Shape(n_layer=2))


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "-m", "{model}", "-p", "x", "--trace", "{model}"],
        ["run", "-m", "{model}", "-p", "x", "--results", "{model}"],
        ["run", "-m", "{model}", "-p", "x", "--trace", "{link}"],
        ["run", "-f", "{model}", "--trace", "{model}"],
        ["bench", "-m", "{model}", "--results", "{model}"],
        ["simulate", "--profile", "{model}", "--results", "{model}"],
    ],
)
def test_no_command_writes_over_what_it_reads(tmp_path: Path, target: Path, arguments: list[str]) -> None:
    model, link = tmp_path / "model.gguf", tmp_path / "link.png"
    model.write_bytes(target.read_bytes())
    link.symlink_to(model)
    done = finish(1, [part.format(model=model, link=link) for part in arguments])
    assert done.returncode == 2 and "reads; name another file" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not done.stdout
    assert model.read_bytes() == target.read_bytes() and names(tmp_path) == ["link.png", "model.gguf"]


def test_an_error_after_the_check_leaves_an_old_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("before")
    done = finish(1, ["run", "-p", "x", "-n", "9", "-c", "4", "--trace", str(trace), "--results", str(tmp_path / "r")])
    assert done.returncode == 2 and trace.read_text() == "before" and names(tmp_path) == ["trace.json"]


WRITER = """
import sys, time
from pathlib import Path
from pipeinfer.job.process.signals import end_at_once, on_signals
from pipeinfer.outputs import whole_file
on_signals(end_at_once(0))
with whole_file(Path(sys.argv[1]), "--output") as file:
    file.write(bytes(1 << 20))
    print(flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("before", [b"before", b""])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_command_leaves_what_was_there(tmp_path: Path, number: signal.Signals, before: bytes) -> None:
    output = tmp_path / "output"
    if before:
        output.write_bytes(before)
    with subprocess.Popen([sys.executable, "-c", WRITER, output], env=environment(), stdout=subprocess.PIPE) as job:
        assert job.stdout and job.stdout.readline()
        job.send_signal(number)
    assert job.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before] * bool(before)


@pytest.mark.parametrize("before", [None, b"before"])
def test_where_files_must_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes | None) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    path = tmp_path / "out"
    if before:
        path.write_bytes(before)
    check_writable(path, "--out")
    with room_for(1000), pytest.raises(UserError, match="File too large"):
        write_file(path, "--out", b"x" * 2000)
    assert names(tmp_path) == (["out"] if before else [])
    write_file(path, "--out", b"new")
    assert path.read_bytes() == b"new" and names(tmp_path) == ["out"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_read_only_place_and_a_full_disk(tmp_path: Path) -> None:
    """On a real file system of 64 kB: what fits stays, what does not is named, and the text is printed."""
    place = tmp_path / "place"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("no mounts here")
    try:
        common = ["run", "-p", "def f", "-n", "200", "--ignore-eos", "--policy", "iterative"]
        outputs = ["--trace", str(place / "trace.json"), "--results", str(place / "results.csv")]
        (place / "ballast").write_bytes(bytes(40 << 10))
        done = finish(1, [*common, *outputs])
        assert done.returncode == 2 and len(done.stdout) > 40, done.stderr
        assert f"--trace {place}/trace.json: No space left" in done.stderr and "Traceback" not in done.stderr
        assert names(place) == ["ballast", "results.csv"] and len(RESULTS.read(place / "results.csv")) == 1
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        for option in ("--trace", "--results"):
            done = finish(1, [*common, option, str(place / "new")])
            assert done.returncode == 2 and not done.stdout and "Read-only file system" in done.stderr
    finally:
        subprocess.run(["umount", place], check=True)


if sys.platform != "linux":
    pytestmark = pytest.mark.skip(reason="devices and mounts of Linux")
