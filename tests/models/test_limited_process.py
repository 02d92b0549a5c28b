"""Processes that work on what strangers give: one that somebody stops is started again, and is waited for no longer."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from pipeinfer import child
from pipeinfer.child import LimitedProcess, ProcessLimits
from pipeinfer.errors import HostFault
from pipeinfer.launchers import process_stat
from pipeinfer.models.text.grammar import PROCESS as GRAMMAR_CHECK
from tests.support.jobs import until

PROCESS = LimitedProcess("tests.support.stopping")


def test_a_stopped_process_is_started_again(tmp_path: Path) -> None:
    start_s = time.monotonic()
    assert PROCESS.ask({"mark": str(tmp_path / "mark"), "always": False}) == {"done": True}
    assert time.monotonic() - start_s < PROCESS.limits.wall_s


def test_one_that_is_always_stopped_is_the_hosts_fault(tmp_path: Path) -> None:
    with pytest.raises(HostFault, match="stopped or not started, 2 times"):
        PROCESS.ask({"mark": str(tmp_path / "mark"), "always": True})


def test_so_is_one_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(HostFault, match="cannot be used: No such file"):
        PROCESS.ask({})


def test_and_one_that_ends_before_it_begins() -> None:
    with pytest.raises(HostFault, match="not started, 2 times"):
        LimitedProcess("tests.support.no_such_module").ask({})


def test_its_own_limit_is_not_taken_for_a_kill_from_outside(tmp_path: Path) -> None:
    """Also where it has used most of its time before it was asked."""
    process, log = LimitedProcess("tests.support.working", ProcessLimits(cpu_s=1)), tmp_path / "log"
    process.start_ahead()
    (ahead,) = process.ahead
    until(lambda: sum(map(int, process_stat(ahead.pid)[11:13])) >= 0.6 * os.sysconf("SC_CLK_TCK"))
    answer = process.ask({"log": str(log)})
    assert "takes more than 1 s" in answer["error"]
    assert log.read_text() == "asked\n"


def test_a_long_input_arrives_where_the_process_starts_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipes hold 64 KiB, and checks whether the process was stopped come before it reads."""
    monkeypatch.setattr(child, "CHECK_EVERY_S", 0.001)
    process = LimitedProcess("tests.support.niceness", ProcessLimits(wall_s=30))
    assert process.ask({"text": "x" * 200_000}).keys() == {"niceness"}


def test_long_work_leaves_the_cores_to_others() -> None:
    assert GRAMMAR_CHECK.limits.niceness > 0
    process = LimitedProcess("tests.support.niceness", ProcessLimits(niceness=3))
    assert process.ask({}) == {"niceness": min(19, os.nice(0) + 3)}
