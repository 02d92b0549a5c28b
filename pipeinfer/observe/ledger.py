"""What a rank did with its time: busy, cancelled, waiting, idle. Seconds on any one clock; knows no MPI and no model.

busy       working on runs that count; on the head also drafting, settling and printing
cancelled  working on runs that were cancelled: noticing it, or leaving between layers
waiting    for a run that was under way in earlier stages or on the wire; on the head for a verdict
idle       nothing for this stage was under way: the head had not sent its next run yet
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Window = tuple[float, float]


@dataclass(slots=True)
class StageLedger:
    """For each run when the stage began to wait, to work, and was done. Five numbers a run, so it can always be
    kept."""

    entries: array[float] = field(default_factory=lambda: array("d"))

    def note(self, run_id: int, wait_s: float, start_s: float, end_s: float, cancelled: bool) -> None:
        self.entries.extend((run_id, wait_s, start_s, end_s, cancelled))

    def moved(self, offset_s: float) -> list[tuple[int, float, float, float, bool]]:
        """(run, wait, start, end, cancelled) of every run, on another clock."""
        numbers = iter(self.entries)
        return [
            (int(run_id), wait_s + offset_s, start_s + offset_s, end_s + offset_s, bool(cancelled))
            for run_id, wait_s, start_s, end_s, cancelled in zip(*[numbers] * 5, strict=True)
        ]


@dataclass(slots=True)
class HeadLedger:
    """When the head sent each run and had its verdict, how long it waited, and what it did on cancelled runs."""

    submitted_s: dict[int, float] = field(default_factory=dict)
    verdicts: list[tuple[float, int]] = field(default_factory=list)  # when it came, of which run
    waits: list[Window] = field(default_factory=list)
    idles: list[Window] = field(default_factory=list)  # waits while no run was in flight
    cancelled: list[Window] = field(default_factory=list)
    cancels: list[tuple[float, int]] = field(default_factory=list)  # when it told the stages, of how many runs
    n_cancel_messages: int = 0  # to any stage, of whole runs or of rows

    @property
    def n_notes(self) -> int:
        """Runs and waits that are noted, by which the memory of all lists is bounded."""
        return len(self.submitted_s) + len(self.waits) + len(self.idles)


@dataclass(frozen=True, slots=True)
class TimeUse:
    """How one rank spent a request's wall time."""

    wall_s: float
    busy_s: float
    cancelled_s: float
    waiting_s: float
    idle_s: float


def overlap_s(start_s: float, end_s: float, window: Window) -> float:
    return max(0.0, min(end_s, window[1]) - max(start_s, window[0]))


def stage_time(
    entries: Iterable[tuple[int, float, float, float, bool]], submitted_s: Mapping[int, float], window: Window
) -> TimeUse:
    """A stage's time within `window`; all times on one clock. What has no entry stays unaccounted."""
    busy_s = cancelled_s = waiting_s = idle_s = 0.0
    for run_id, wait_s, start_s, end_s, was_cancelled in entries:
        worked_s = overlap_s(start_s, end_s, window)
        if was_cancelled:
            cancelled_s += worked_s
        else:
            busy_s += worked_s
        # clocks are synchronised to microseconds only: the run cannot have left after it came
        left_s = min(max(submitted_s.get(run_id, start_s), wait_s), start_s)
        idle_s += overlap_s(wait_s, left_s, window)
        waiting_s += overlap_s(left_s, start_s, window)
    return TimeUse(window[1] - window[0], busy_s, cancelled_s, waiting_s, idle_s)


def head_time(ledger: HeadLedger, window: Window) -> TimeUse:
    """The head's time within `window`. It is one thread: when it does not wait, it works."""
    wall_s = window[1] - window[0]
    waiting_s = sum(overlap_s(start_s, end_s, window) for start_s, end_s in ledger.waits)
    cancelled_s = sum(overlap_s(start_s, end_s, window) for start_s, end_s in ledger.cancelled)
    idle_s = sum(overlap_s(start_s, end_s, window) for start_s, end_s in ledger.idles)
    return TimeUse(wall_s, max(0.0, wall_s - waiting_s - cancelled_s - idle_s), cancelled_s, waiting_s, idle_s)
