"""How a rank waits."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from pipeinfer.cluster import idle
from pipeinfer.cluster.idle import SLACK_NS, Idle, sleep_on_time

GET_TIMER_SLACK = 30


def in_a_thread(slack_ns: list[int]) -> None:
    def look() -> None:
        slack_ns.append(ctypes.CDLL(None).prctl(GET_TIMER_SLACK, 0, 0, 0, 0))

    sleep_on_time()
    look()
    started = threading.Thread(target=look)
    started.start()
    started.join()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no timer slack")
def test_sleeps_of_a_thread_and_of_those_it_starts_end_on_time() -> None:
    slack_ns: list[int] = []
    thread = threading.Thread(target=in_a_thread, args=(slack_ns,))
    thread.start()
    thread.join()
    assert slack_ns == [SLACK_NS, SLACK_NS]


def test_a_wait_ends_soon_after_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: how late a busy host wakes who sleeps is another matter."""
    now_s, late_s = 0.0, []

    def pass_s(seconds: float = 5e-6) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(idle, "time", SimpleNamespace(perf_counter=lambda: now_s, sleep=pass_s))
    monkeypatch.setattr(idle, "os", SimpleNamespace(sched_yield=pass_s))
    for _ in range(10):
        end_s = now_s + 0.03
        Idle().until(lambda end_s=end_s: now_s >= end_s or None)  # type: ignore[misc]
        late_s.append(now_s - end_s)
    assert max(late_s) < 0.05 * 0.03


def test_a_wait_leaves_the_core_alone() -> None:
    cpu_s, start_s = time.thread_time(), time.perf_counter()
    for _ in range(10):
        Idle().within(lambda: None, 0.03)
    assert time.thread_time() - cpu_s < 0.25 * (time.perf_counter() - start_s)


def test_a_wait_has_an_end_of_its_own() -> None:
    assert Idle().within(lambda: None, 0.01) is None
    assert Idle().within(lambda: 7, 0.0) == 7
