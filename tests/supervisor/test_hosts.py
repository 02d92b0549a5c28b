"""A supervised job on hosts of their own: one that cannot be reached is left out, and the text goes on."""

import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeinfer.cluster.hosts.launcher import Launcher, read_launcher
from pipeinfer.supervisor.supervisor import Supervisor
from tests.support.jobs import COMMAND, finish
from tests.support.namespaces import Hosts, hosts, missing
from tests.support.supervised import held, let_go

SETTINGS = "-n 300 -c 400 --ignore-eos -t 1 --temp 0.8 --seed 3"
TEXT = ["run", "-p", "def read_lines(path):\n", *SETTINGS.split()]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Hosts]:
    if why := missing():
        pytest.skip(why)
    with hosts(3, tmp_path) as made:
        yield made


def test_a_host_that_is_cut_off_is_left_out(three: Hosts, tmp_path: Path) -> None:
    job = three.start([*TEXT, "--rank-timeout", "3", *held(tmp_path)], supervised=True)
    late = threading.Timer(300, job.kill)
    late.start()
    assert job.stdout and job.stderr
    begun, errors = os.read(job.stdout.fileno(), 1).decode(), ""
    three.cut("node3")
    while "without node3" not in errors and (line := job.stderr.readline()):
        errors += line
    let_go(tmp_path)
    out, more = job.communicate()
    late.cancel()
    errors += more
    assert job.returncode == 0 and "the job starts again, without node3" in errors, errors
    assert begun + out == finish(1, [*TEXT, "--policy", "iterative"]).stdout


def test_open_mpi_is_told_to_hand_the_variable_on(tmp_path: Path) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "mpirun (Open MPI) 5.0"; else echo "$@" >&2; fi\n'
    )
    launcher.chmod(0o755)
    done = subprocess.run(
        [*COMMAND, "supervise", str(launcher), "-np", "2", "pipeinfer", "run"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "-x PIPEINFER_SUPERVISOR -np 2 pipeinfer run\n")


def test_hosts_on_which_nothing_starts_are_found(tmp_path: Path) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text('#!/bin/sh\nif grep -q bad "$2"; then exit 1; fi\n')
    launcher.chmod(0o755)
    (tmp_path / "hosts").write_text("good\nbad1\nbad2\nfine\n")
    words = [str(launcher), "-f", str(tmp_path / "hosts"), "-np", "4", "pipeinfer", "run"]
    supervisor = Supervisor(read_launcher(words), 9, os.environ)
    supervisor._probe()
    assert supervisor.excluded.keys() == {"bad1", "bad2"}


def test_hosts_that_are_left_out_are_taken_again_when_programs_start_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those on which ranks die again and again."""
    launcher = tmp_path / "mpirun"
    launcher.write_text(f'#!/bin/sh\nif grep -q -f {tmp_path}/down "$2"; then exit 1; fi\n')
    launcher.chmod(0o755)
    (tmp_path / "hosts").write_text("good\naway\nback\nbad\n")
    (tmp_path / "down").write_text("away\n")
    words = [str(launcher), "-f", str(tmp_path / "hosts"), "-np", "4", "pipeinfer", "run"]
    supervisor = Supervisor(read_launcher(words), 9, os.environ)
    for name in ("away", "back", "bad"):
        supervisor._leave_out(name, "lost")
    supervisor._deaths["bad"] = deque([0.0, 1.0])
    with monkeypatch.context() as full:
        full.setattr("tempfile.tempdir", str(tmp_path / "nothing"))
        supervisor._take_back()
        assert supervisor.excluded.keys() == {"away", "back", "bad"}, "nothing could be tried"
    supervisor._take_back()
    assert supervisor.excluded.keys() == {"away", "bad"}


def test_a_trial_that_cannot_be_started_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"first": ["sleep", "60"], "second": [str(tmp_path / "nothing")]}
    monkeypatch.setattr(Launcher, "trial", lambda _, host, hosts_file: words[host])
    supervisor = Supervisor(read_launcher(["mpirun", "-np", "2", "pipeinfer", "run"]), 9, os.environ)
    begin_s = time.monotonic()
    assert supervisor._failing([*words], 60) == set() and time.monotonic() - begin_s < 30
