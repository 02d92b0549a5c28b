"""Streams under Open MPI's launcher, which passes on what it reads, not its end, and tells nobody of a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeinfer.cluster.watch.protocol import SUPERVISOR
from pipeinfer.cluster.watch.rendezvous import Rendezvous
from pipeinfer.job.process.supervised import NO_ANSWER, Attempt
from tests.support.jobs import COMMAND, environment, launcher

# bash redirects a command in its process, other shells in their own
PRTERUN = """#!/bin/bash
mkfifo $0.passed
exec 3<&0 4<>$0.passed
cat <&3 >&4 &
"$@" <$0.passed 3<&-
"""
READ = """
import sys
from pipeinfer.job.process.stdin import end_input
end_input(is_whole=True)
print(len(sys.stdin.read()))
"""


@pytest.fixture
def prterun(tmp_path: Path) -> Path:
    (script := tmp_path / "prterun").write_text(PRTERUN)
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("source", ["printf abc |", "(printf a; sleep 2; printf bc) |", "yes ab | head -c 300000 |"])
def test_a_pipe_ends(prterun: Path, source: str) -> None:
    done = run(f"{source} {prterun} {sys.executable} -c '{READ}'")
    assert done.stdout == ("300000\n" if "yes" in source else "3\n"), done.stderr


@pytest.mark.parametrize("text", ["", "abc"])
def test_a_file_ends(prterun: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    done = run(f"{prterun} {sys.executable} -c '{READ}' < {tmp_path / 'file'}")
    assert done.stdout == f"{len(text)}\n", done.stderr


def test_nothing_ends(prterun: Path) -> None:
    assert run(f"{prterun} {sys.executable} -c '{READ}' < /dev/null").stdout == "0\n"


def test_where_the_launcher_is_elsewhere_a_line_says_what_to_do(tmp_path: Path) -> None:
    """Before the input has an end."""
    said = tmp_path / "said"
    source = f"printf abc; until grep -qs 'name a file' {said}; do sleep 0.1; done"
    done = run(f"({source}) | {sys.executable} -c '{READ}' 2> {said}")
    assert done.stdout == "3\n" and said.read_text().count("may not pass it on: name a file") == 1


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_prompt_comes_through_a_pipe(n_ranks: int) -> None:
    words = [*launcher(n_ranks), *COMMAND, "run", "-f", "-", "-n", "4", "-t", "1"]
    done = subprocess.run(words, input="def f(", capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0 and "prompt tokens read" in done.stderr, done.stderr


def test_a_chat_ends_with_its_input() -> None:
    words = [*launcher(2), *COMMAND, "chat", "-n", "4", "-t", "1"]
    done = subprocess.run(words, input="def\n", capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0 and done.stderr.count("prompt tokens read") == 1, done.stderr


def test_a_supervisor_that_keeps_the_input_and_has_ended_is_one_line() -> None:
    attempt = Attempt("job", 2, Rendezvous("", (), 0, ""), has_input=True)
    environ = environment() | {SUPERVISOR: attempt.text()}
    words = [*COMMAND, "run", "-f", "-", "-n", "4"]
    done = subprocess.run(words, input="", capture_output=True, text=True, env=environ, timeout=60)
    assert (done.returncode, done.stderr) == (2, f"pipeinfer: {NO_ANSWER}\n")


@pytest.mark.parametrize(("place", "code"), [("/dev/full", 2), ("/dev/null", 0)])
def test_a_full_disk_of_the_launcher_is_told(prterun: Path, place: str, code: int) -> None:
    prterun.write_text('#!/bin/bash\n"$@" | cat\nexit ${PIPESTATUS[0]}\n')
    write = "import sys; from pipeinfer.job.process.streams import *; take_streams(); print(1); sys.exit(final_code(0))"
    done = run(f"{prterun} {sys.executable} -c '{write}' > {place}")
    assert done.returncode == code and done.stderr.count("its disk is full") == (code > 0), done.stderr


def run(line: str) -> subprocess.CompletedProcess[str]:
    environ = environment() | {"OMPI_COMM_WORLD_RANK": "0"}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environ, timeout=60)
