"""How jobs end that are struck before they have begun: Ctrl-C while MPI starts, ranks that never come, leftovers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pipeinfer.cluster.hosts.launch import rank_from_environment
from pipeinfer.cluster.hosts.roster import check_alike, own_info
from pipeinfer.cluster.watch import shared_memory
from pipeinfer.cluster.watch.processes import first_to_close
from pipeinfer.cluster.watch.shared_memory import FOLDER, MARK, mark_own, remove_dead, segments_of, sweep
from pipeinfer.cluster.watch.watch import Watch
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.options.text_sections import ChatOptions
from pipeinfer.job.options.values import Backend
from pipeinfer.job.process.signals import HEAD_FIRST_S
from pipeinfer.job.process.stop import StopFlag, Stopper
from tests.support.jobs import (
    BY_MPICH,
    COMMAND,
    command_of,
    descendants,
    environment,
    installed_script,
    launcher,
    until,
)
from tests.support.planned import options_of

RUN = ["run", "-p", "def read_lines(path):\n", "-n", "6000", "-c", "7000", "--ignore-eos"]  # ends long after the test
only_mpich = pytest.mark.skipif(not BY_MPICH, reason="Open MPI's mpirun ends a job when any of its programs fails")


def start(*parts: Sequence[str], **settings: str) -> subprocess.Popen[str]:
    """One rank for each part: mpirun's form for programs that differ."""
    command = [launcher(2)[0]]
    for part in parts:
        command += [":"] * (len(command) > 1) + ["-np", "1", *part]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | settings,
        start_new_session=True,
    )


def complaints(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("pipeinfer: ")]


def has_mpi(pid: int) -> bool:
    """Whether a process has loaded MPI, which it starts next."""
    try:
        return "libmpi" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


@only_mpich
def test_ctrl_c_while_mpi_waits_for_a_rank() -> None:
    """Rank 1 never starts MPI, so rank 0 never returns from its start."""
    job = start([*COMMAND, *RUN], ["sh", "-c", "trap '' INT; sleep 120"])
    until(lambda: any(map(has_mpi, descendants(job.pid))))
    time.sleep(0.5)
    os.killpg(job.pid, signal.SIGINT)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 130
    assert "Traceback" not in errors and "BAD TERMINATION" not in errors


@pytest.mark.parametrize("moment_s", [0.02, 0.1, 0.3])
def test_ctrl_c_while_the_command_starts(moment_s: float, tmp_path: Path) -> None:
    """As installed: the interpreter has not begun, or imports. If the moment passes, it waits for its prompt."""
    job = subprocess.Popen(
        [str(installed_script(tmp_path)), "run", "-f", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    time.sleep(moment_s)
    job.send_signal(signal.SIGINT)
    job.wait(timeout=60)  # before the input ends
    text, errors = job.communicate()
    assert job.returncode in (130, -signal.SIGINT), "which is 130 to a shell"
    assert text == errors == ""


def test_a_lone_process_ends_with_its_terminal_unless_it_shall_not() -> None:
    """MPICH's UCX takes SIGHUP for a wish to see what it knows, and prints it behind the text."""
    words = [*COMMAND, "run", "-p", "x", "-c", "7000", "--temp", "0", "--ignore-eos", "-t", "1", "-n"]
    for starter, n, code in (([], "6000", 129), (["nohup"], "200", 0)):
        job = subprocess.Popen(
            [*starter, *words, n],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert job.stdout
        job.stdout.read(1)
        job.send_signal(signal.SIGHUP)
        text, errors = job.communicate(timeout=60)
        assert job.returncode == code and "UCX" not in text, errors
        assert ("hung up; the text up to here is complete" in errors) is bool(code), errors


def test_a_rank_that_stands_still_ends_the_job_after_its_time() -> None:
    words = [*COMMAND, *RUN, "-md", "none", "-t", "1", "--rank-timeout", "12"]
    job = start(words, words)
    assert job.stdout
    job.stdout.read(1)
    (second,) = (pid for pid in descendants(job.pid) if rank_of(pid) == 1)
    stopped_s = time.monotonic()
    os.kill(second, signal.SIGSTOP)
    _, errors = job.communicate(timeout=50)  # the usual time is longer
    assert time.monotonic() - stopped_s > 2, "it had said something shortly before"
    (line,) = (line for line in complaints(errors) if "rank 1" in line)
    assert "stage 1, layers" in line and "has said nothing for 12 s (--rank-timeout): its process" in line
    assert job.returncode
    until(lambda: command_of(second) == b"")  # also of a process that stands still nothing is left


def rank_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        pairs = (entry.partition(b"=") for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        return rank_from_environment({name.decode(): value.decode() for name, _, value in pairs})
    return 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_lone_process_that_is_stopped_while_it_loads_says_nothing_of_mpi(number: signal.Signals) -> None:
    """Nobody else is to be ended: MPI's abort has a line of its own, and crashed now and then."""
    for _ in range(3):
        job = subprocess.Popen(
            [*COMMAND, *RUN], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()
        )
        assert job.stderr
        plan = job.stderr.readline()
        job.send_signal(number)
        _, errors = job.communicate(timeout=60)
        assert " on 1 rank, " in plan and job.returncode == 128 + number
        assert "Abort" not in errors and "died" not in errors


BEHIND = """
import os, signal, sys, time
from pipeinfer.cluster.watch.watch import Watch
from pipeinfer.cli import main
start = Watch._start_sentinel
def started(*arguments):
    process = start(*arguments)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(120)
    return process
Watch._start_sentinel = started
main(sys.argv[1:])
"""


def test_a_stop_right_behind_the_start_of_the_watch_is_no_death() -> None:
    """A shell has asked for the exit code before the watch could, which took the end for a death then."""
    job = subprocess.Popen(
        [sys.executable, "-c", BEHIND, *RUN],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    _, errors = job.communicate(timeout=60)
    assert (job.returncode, errors) == (130, "")


class Joined:
    """The watch of rank 1, as far as a signal goes; notes when it was to ask rank 0 for a stop."""

    rank, joined = 1, True

    def __init__(self) -> None:
        self.asked_s: list[float] = []

    def ask_stop(self, reason: str) -> None:
        assert reason == "rank 1 was terminated"
        self.asked_s.append(time.monotonic())


def test_rank_0_speaks_first_when_a_launcher_terminates_all() -> None:
    """Otherwise the exit code was 1 or 143, as it came."""
    watch = Joined()
    stopper = Stopper(StopFlag(), cast(Watch, watch), lambda code: pytest.fail(f"ended with {code}"))
    sent_s = time.monotonic()
    stopper.on_signal(signal.SIGINT)
    stopper.on_signal(signal.SIGTERM)
    (asked_s,) = watch.asked_s
    assert asked_s - sent_s >= HEAD_FIRST_S


def test_who_asked_for_the_end_of_a_job_that_loads_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing else would say why it ended."""
    ended, watch = threading.Event(), SimpleNamespace(rank=0, joined=True, ask_stop=lambda reason: None)
    Stopper(StopFlag(), cast(Watch, watch), lambda code: ended.set()).on_request("rank 1 was terminated")
    assert ended.wait(30) and "pipeinfer: rank 1 was terminated; ending the job\n" in capfd.readouterr().err


@only_mpich
@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_ended_before_mpi_started_does_not_hang_the_job(absent: int) -> None:
    """As a version does that does not know an option."""
    parts = [[*COMMAND, *RUN], [*COMMAND, *RUN]]
    parts[absent] = ["false"]
    job = start(*parts, PIPEINFER_JOIN_TIMEOUT="3")
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 1
    (line,) = complaints(errors)
    assert line.startswith("pipeinfer: rank 1 did not join within 3 s" if absent else "pipeinfer: rank 1 (host ")
    assert "rank 0 says nothing" in line or absent


@only_mpich
def test_a_rank_that_stands_still_before_mpi_has_started_is_named() -> None:
    job = start([*COMMAND, *RUN], ["sh", "-c", "kill -STOP $$"], PIPEINFER_JOIN_TIMEOUT="3")
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 1 and "nor does it run" not in errors
    assert re.search(r"did not join within 3 s; rank 1 \(host \S+\) stands still: process \d+ is stopped", errors), (
        errors
    )


@only_mpich
def test_a_usage_error_of_one_rank_is_said_by_it() -> None:
    job = start([*COMMAND, *RUN], [*COMMAND, *RUN, "--frobnicate"])
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 2
    (line,) = complaints(errors)
    assert line.startswith("pipeinfer: rank 1 (host ") and "--frobnicate" in line


def test_ranks_with_other_options_are_refused_by_name() -> None:
    job = start([*COMMAND, *RUN], [*COMMAND, *RUN, "-s", "5"])
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 2
    (line,) = complaints(errors)
    assert "rank 1 (host " in line and "seed 5" in line and "with -1" in line


def test_another_version_is_refused_by_name() -> None:
    ours = own_info(SamplingParams())
    check_alike([ours, ours])
    with pytest.raises(UserError, match=r"rank 1 \(host b\) runs pipeinfer 0\.0\.9 and rank 0 "):
        check_alike([ours, ("0.0.9", "b", ours[2], ours[3])])


def test_what_was_asked_otherwise_is_said_as_it_is_asked() -> None:
    asked = [options_of(Path("a.gguf"), backend=backend) for backend in ((Backend(),), (Backend("torch"),) * 2)]
    with pytest.raises(UserError, match=r"was started with backend torch,torch and rank 0 \(host .*\) with llama; "):
        check_alike([own_info(each) for each in asked])


def test_another_command_is_refused_as_such() -> None:
    with pytest.raises(UserError, match="was started with another command than rank 0"):
        check_alike([own_info(SamplingParams()), own_info(ChatOptions())])


# -- leftovers


OPENER = """
import sys, time
file = open(sys.argv[1], "r+b")
print(flush=True)
time.sleep(60)
"""
MAPPER = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def segment() -> Path:
    path = Path("/dev/shm") / f"test-ends-{os.getpid()}"
    path.write_bytes(bytes(4096))
    try:
        os.setxattr(path, MARK, b"")
    except OSError:
        path.unlink()
        pytest.skip("this kernel's tmpfs has no extended attributes for users")
    return path


def test_only_marked_segments_that_nobody_maps_are_swept(segment: Path) -> None:
    holder = hold(segment, MAPPER)
    try:
        assert segments_of(holder.pid) == {segment}
        sweep()
        assert not remove_dead([segment]) and segment.exists(), "a living process maps it"
        os.setxattr(segment, MARK, os.readlink("/proc/self/ns/pid").encode())
        sweep()
        assert segment.exists()
    finally:
        end(holder)
    os.setxattr(segment, MARK, b"of another namespace")
    sweep()
    assert segment.exists()
    os.setxattr(segment, MARK, os.readlink("/proc/self/ns/pid").encode())
    sweep()
    assert not segment.exists()
    mark_own()  # this process maps none: nothing to do


@pytest.fixture
def brief_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Two named as UCX and MPICH name theirs, one that is not, where no other job sweeps."""
    folder = FOLDER / f"test-ends-brief-{os.getpid()}"
    paths = [folder / name for name in ("ucx_shm_posix_1", "mpich_shar_tmp2", "other")]
    folder.mkdir()
    monkeypatch.setattr(shared_memory, "FOLDER", folder)
    try:
        for path in paths:
            path.write_bytes(bytes(4096))
        with paths[-1].open("rb") as file:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield paths
    except OSError:
        pytest.skip("this kernel leases no files of tmpfs")
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("holder", [OPENER, MAPPER])
def test_what_a_start_left_is_swept_if_no_process_has_it(
    brief_files: list[Path], holder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no mark, and only its owner's death tells it from what a job that starts just now uses."""
    monkeypatch.setattr(shared_memory, "BRIEF_AGE_S", 3600.0)
    sweep()
    assert all(path.exists() for path in brief_files), "as new as this, its maker may not have it open yet"
    dead, alive = (hold(path, holder) for path in brief_files[:2])
    end(dead)
    monkeypatch.setattr(shared_memory, "BRIEF_AGE_S", 0.0)
    sweep()
    assert [path.exists() for path in brief_files] == [False, True, True]
    end(alive)
    sweep()
    assert [path.exists() for path in brief_files] == [False, False, True]


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def hold(path: Path, text: str) -> subprocess.Popen[bytes]:
    """A process that has the file."""
    holder = subprocess.Popen([sys.executable, "-c", text, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout
    holder.stdout.readline()
    return holder


@only_mpich
def test_a_segment_is_marked_while_mpi_still_waits() -> None:
    """Rank 1 never starts MPI; what rank 0 has made by then is known as this program's, and goes when it is killed."""
    job = start([*COMMAND, *RUN], ["sh", "-c", "trap '' INT; sleep 60"])
    found = set[Path]()

    def look() -> bool:  # what UCX makes has a name for a moment only
        used = set[Path]().union(*map(segments_of, descendants(job.pid)))
        found.update(path for path in used if not path.name.startswith("ucx"))
        return bool(found)

    until(look)
    (segment,) = found
    until(lambda: MARK in os.listxattr(segment) or not segment.exists())
    assert segment.exists()
    for pid in descendants(job.pid):
        if segments_of(pid):
            os.kill(pid, signal.SIGKILL)
    job.communicate(timeout=20)
    until(lambda: not segment.exists())


@only_mpich
@pytest.mark.parametrize("victim", ["mpirun", "proxy"])
def test_a_killed_launcher_leaves_no_rank(victim: str) -> None:
    job = start([*COMMAND, *RUN], [*COMMAND, *RUN])
    assert job.stdout
    os.read(job.stdout.fileno(), 1)
    processes = descendants(job.pid)
    os.kill(job.pid if victim == "mpirun" else processes[0], signal.SIGKILL)
    job.communicate(timeout=30)
    assert job.returncode
    until(lambda: not any(map(segments_of, processes)))


@only_mpich
@pytest.mark.parametrize("with_sentinel", [True, False])
def test_a_killed_job_leaves_nothing(with_sentinel: bool) -> None:
    """The sentinel clears up after the others; after itself the next start does. (MPICH 4 leaves names only early.)"""
    before = set(FOLDER.iterdir())
    job = start([*COMMAND, *RUN], [*COMMAND, *RUN])
    assert job.stdout
    os.read(job.stdout.fileno(), 1)  # it generates
    processes = descendants(job.pid)
    sentinels = [pid for pid in processes if b"sentinel" in command_of(pid)]
    assert len(sentinels) == 1
    struck = processes if with_sentinel else [pid for pid in processes if pid not in sentinels]
    for pid in [*(sentinels if with_sentinel else []), *struck]:  # the sentinel first
        with contextlib.suppress(ProcessLookupError):  # the launcher may be faster
            os.kill(pid, signal.SIGKILL)
    job.communicate(timeout=20)
    assert job.returncode
    if with_sentinel:
        until(lambda: not any(map(segments_of, processes)))
        sweep()
    until(lambda: not set(FOLDER.iterdir()) - before)


@pytest.mark.skipif(sys.platform != "linux", reason="the order in which others close files is not known")
def test_the_link_of_a_killed_process_closes_before_its_other_files() -> None:
    """So a busy host does not let the launcher kill others before the first death is heard."""
    watched, link = Pipe()
    before, after = socket.socketpair(), socket.socketpair()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            for end in (watched, before[0], after[0]):
                end.close()
            kept = first_to_close(link)
            kept.send_bytes(b"moved")
            time.sleep(60)
        os._exit(0)
    order: list[Connection | socket.socket] = [watched, before[0], after[0]]
    for end in (link, before[1], after[1]):
        end.close()
    assert watched.recv_bytes() == b"moved"
    heard = select.epoll()
    for end in order:
        heard.register(end, select.EPOLLIN | select.EPOLLET)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert next(number for number, _ in heard.poll(5)) == watched.fileno()
    for end in order:
        end.close()
