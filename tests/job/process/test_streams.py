"""Standard streams that are closed, full, or left by their reader: one line where it can be said, and an exit code."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import COMMAND, environment

RUN = "run -p x -n 40 --policy iterative --ignore-eos --temp 0"
LOST = "pipeinfer: standard output: No space left on device; what was written there is not complete"


def shell(arguments: str, streams: str) -> subprocess.CompletedProcess[str]:
    """The command with its streams redirected by a shell, its exit code also where its output goes to a pipe."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{shlex.join(COMMAND)} {arguments} {streams}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )


@pytest.mark.parametrize("arguments", [RUN, "--version", "simulate --list"])
def test_closed_output_is_refused_before_anything_is_done(arguments: str) -> None:
    done = shell(arguments, ">&-")
    assert done.returncode == 2
    assert done.stderr == "pipeinfer: standard output is closed; give it a place, such as > /dev/null\n"


@pytest.mark.parametrize("arguments", ["--help", "simulate --list", "simulate --profile pipeinfer-c -n 9 --json"])
def test_full_output_is_one_line(arguments: str) -> None:
    done = shell(arguments, "> /dev/full")
    assert (done.returncode, done.stderr.splitlines()) == (2, [LOST])


def test_a_character_that_the_output_cannot_have_ends_no_job() -> None:
    words = [*COMMAND, "run", "-p", "x", "-n", "20", "--grammar", 'root ::= "é→"']
    done = subprocess.run(words, capture_output=True, env=environment() | {"PYTHONIOENCODING": "latin-1"}, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"\xe9?"), done.stderr


@pytest.mark.parametrize(("variable", "is_direct"), [("OMPI_COMM_WORLD_RANK", True), ("PMI_RANK", False)])
def test_rank_0_of_open_mpi_writes_to_the_launchers_terminal(tmp_path: Path, variable: str, is_direct: bool) -> None:
    """Its launcher passes on whole lines; this one none."""
    (launcher := tmp_path / "prterun").write_text('#!/bin/sh\n"$@" 2>&1 | cat > /dev/null\n')
    launcher.chmod(0o755)
    code = "from pipeinfer.job.process.streams import take_streams; take_streams(); print('half', end='', flush=True)"
    words = [str(launcher), sys.executable, "-c", code]
    ours, theirs = pty.openpty()
    environ = environment() | {variable: "0"}
    done = subprocess.run(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, timeout=60)
    assert done.returncode == 0
    os.write(theirs, b";")
    seen = bytearray()
    while b";" not in seen:
        seen += os.read(ours, 100)
    os.close(ours)
    os.close(theirs)
    assert bytes(seen) == (b"half;" if is_direct else b";")


@pytest.mark.parametrize("form", ["", "--json"])
def test_full_output_keeps_the_files(tmp_path: Path, form: str) -> None:
    outputs = ["--results", tmp_path / "results.csv", "--trace", tmp_path / "trace.json"]
    done = shell(f"{RUN} {form} {shlex.join(map(str, outputs))}", "> /dev/full")
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == LOST and "Traceback" not in done.stderr
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 2
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    "arguments",
    [
        f"{RUN} --json",
        "run -p x -n 0 --json",
        "simulate --profile pipeinfer-c -n 9 --policy iterative --json",
        "bench -p 4 -n 2 -r 1 --warm-up 0 --policy iterative -o json",
    ],
)
def test_a_figure_that_does_not_exist_is_null(arguments: str) -> None:
    """Python's json reads NaN too; most others refuse the whole text."""
    done = shell(arguments, "")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout, parse_constant=pytest.fail)
    (figures,) = result if isinstance(result, list) else (result["speculation"],)
    assert figures["acceptance_rate"] is None
    if "-n 0" in arguments:
        assert result["finish"] == "length"


@pytest.mark.parametrize("streams", ["2>&-", "2> /dev/full"])
def test_lost_statistics_keep_the_text(streams: str) -> None:
    done = shell(RUN, streams)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == shell(RUN, "").stdout != ""


@pytest.mark.parametrize("streams", ["2>&-", "2> /dev/full", ">&- 2>&-", "> /dev/full 2>&1"])
def test_a_usage_error_that_cannot_be_said(streams: str) -> None:
    done = shell("run --frobnicate", streams)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_nothing_to_say_on_a_closed_stream() -> None:
    assert shell("--version", "2>&-").returncode == 0


@pytest.mark.parametrize("arguments", ["--help", "run --help", RUN, f"{RUN} --json", "simulate --list"])
def test_a_reader_that_is_gone(arguments: str) -> None:
    done = shell(arguments, "| sleep 0")
    assert done.returncode in (0, 141), "0 when all was written before the reader left"
    assert "Traceback" not in done.stderr and "Error" not in done.stderr and "xception" not in done.stderr


@pytest.mark.parametrize("command", ["run", "perplexity"])
def test_closed_input(command: str) -> None:
    done = shell(f"{command} -f -", "<&-")
    assert done.returncode == 2 and done.stderr.startswith("pipeinfer: --file -: standard input is closed")
