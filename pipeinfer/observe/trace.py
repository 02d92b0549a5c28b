"""How ranks spend their time, and the timeline of a generation: spans and runs, written as Chrome trace events.

Seconds on one clock; knows no MPI and no model. A rank is

busy       work on runs that count; on the head also drafting, settling and printing
cancelled  work on cancelled runs, until the stage leaves them between layers
waiting    for a run that is in earlier stages or on the wire; on the head for a verdict
idle       the head has not sent the next run yet"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeinfer.outputs import write_file

Window = tuple[float, float]
StageRun = tuple[int, float, float, float, bool]
"""(run, wait, start, end, cancelled): when a stage began to wait, to work, and was done."""


@dataclass(slots=True)
class StageLedger:
    """A stage's runs, five numbers each."""

    entries: array[float] = field(default_factory=lambda: array("d"))

    def note(self, run_id: int, wait_s: float, start_s: float, end_s: float, cancelled: bool) -> None:
        self.entries.extend((run_id, wait_s, start_s, end_s, cancelled))

    def moved(self, offset_s: float) -> list[StageRun]:
        """Every run, on another clock."""
        numbers = iter(self.entries)
        return [
            (int(run_id), wait_s + offset_s, start_s + offset_s, end_s + offset_s, bool(cancelled))
            for run_id, wait_s, start_s, end_s, cancelled in zip(*[numbers] * 5, strict=True)
        ]


@dataclass(slots=True)
class HeadLedger:
    """The head's times: when it sent runs and received verdicts, its waits, its work on cancelled runs."""

    submitted_s: dict[int, float] = field(default_factory=dict)
    verdicts: list[tuple[float, int]] = field(default_factory=list)  # when, of which run
    waits: list[Window] = field(default_factory=list)
    idles: list[Window] = field(default_factory=list)  # waits while no run was in flight
    cancelled: list[Window] = field(default_factory=list)
    cancels: list[tuple[float, int]] = field(default_factory=list)  # when, how many runs
    n_cancel_messages: int = 0  # to any stage, of whole runs or of rows

    @property
    def n_notes(self) -> int:
        """Runs and waits: a measure of the memory of all lists."""
        return len(self.submitted_s) + len(self.waits) + len(self.idles)


@dataclass(frozen=True, slots=True)
class TimeUse:
    """How one rank spent a request's wall time."""

    wall_s: float
    busy_s: float
    cancelled_s: float
    waiting_s: float
    idle_s: float

    @property
    def work_share(self) -> float:
        """The share of the time spent on runs, cancelled ones included."""
        return (self.busy_s + self.cancelled_s) / self.wall_s if self.wall_s > 0 else 0.0


def overlap_s(start_s: float, end_s: float, window: Window) -> float:
    return max(0.0, min(end_s, window[1]) - max(start_s, window[0]))


def stage_time(entries: Iterable[StageRun], submitted_s: Mapping[int, float], window: Window) -> TimeUse:
    """A stage's time within `window`; all times are on one clock. Time without an entry is not counted."""
    busy_s = cancelled_s = waiting_s = idle_s = 0.0
    for run_id, wait_s, start_s, end_s, was_cancelled in entries:
        worked_s = overlap_s(start_s, end_s, window)
        if was_cancelled:
            cancelled_s += worked_s
        else:
            busy_s += worked_s
        # clocks agree to microseconds only: a run is not sent after it arrives
        sent_s = min(max(submitted_s.get(run_id, start_s), wait_s), start_s)
        idle_s += overlap_s(wait_s, sent_s, window)
        waiting_s += overlap_s(sent_s, start_s, window)
    return TimeUse(window[1] - window[0], busy_s, cancelled_s, waiting_s, idle_s)


def time_use(ledger: HeadLedger, runs: Sequence[StageRun] | None, window: Window) -> TimeUse:
    """A rank's time within `window`. `runs`: of a stage, whose pipeline has this ledger; None: of the head."""
    return head_time(ledger, window) if runs is None else stage_time(runs, ledger.submitted_s, window)


def head_time(ledger: HeadLedger, window: Window) -> TimeUse:
    """The head's time within `window`. It is one thread: when it does not wait, it works."""
    wall_s, spans = window[1] - window[0], (ledger.waits, ledger.cancelled, ledger.idles)
    waiting_s, cancelled_s, idle_s = (sum(overlap_s(*span, window) for span in each) for each in spans)
    return TimeUse(wall_s, max(0.0, wall_s - waiting_s - cancelled_s - idle_s), cancelled_s, waiting_s, idle_s)


@dataclass(slots=True)
class TraceSpan:
    """Something that one rank did; a moment if `duration_s` is 0."""

    kind: str  # draft, send, settle, verdict, cancel; evaluate, cancelled, waiting, idle
    start_s: float
    duration_s: float = 0.0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Tracer:
    """Collects spans on `clock`, or nothing when it is off."""

    clock: Callable[[], float]
    on: bool = True
    spans: list[TraceSpan] = field(default_factory=list)

    def drafted(self, start_s: float, n_nodes: int, finished: bool) -> None:
        if self.on:
            self.spans.append(
                TraceSpan("draft", start_s, self.clock() - start_s, {"nodes": n_nodes, "finished": finished})
            )

    def settled(self, n_tokens: int) -> None:
        if self.on:
            self.spans.append(TraceSpan("settle", self.clock(), 0.0, {"tokens": n_tokens}))

    def evaluated(self, start_s: float, unit: str, number: int, n_rows: int, cancelled: bool) -> None:
        """`unit`: what `number` counts, `run` of the target or `question` to a larger draft."""
        if self.on:
            kind = "cancelled" if cancelled else "evaluate"
            self.spans.append(TraceSpan(kind, start_s, self.clock() - start_s, {unit: number, "rows": n_rows}))


NO_TRACE = Tracer(lambda: 0.0, on=False)


def pack_spans(spans: Sequence[TraceSpan], offset_s: float) -> list[dict[str, Any]]:
    """Spans as plain data, on another clock."""
    return [asdict(span) | {"start_s": span.start_s + offset_s} for span in spans]


@dataclass(frozen=True, slots=True)
class Track:
    """What one rank did. `row`: its fields in --json, with `rank` and `role`. `runs`: those of a stage; None: this is
    the head. `ledger`: the head's, of the pipeline that the stage is part of; `unit`: `question` if that is a draft's.
    """

    row: dict[str, Any]
    ledger: HeadLedger
    runs: Sequence[StageRun] | None = None
    spans: Sequence[TraceSpan] = ()
    unit: str = "run"

    def all_spans(self) -> list[TraceSpan]:
        """`spans`, and those of the ledger or of the gaps between runs, in order."""
        more = _head_spans(self.ledger) if self.runs is None else _gaps(self.runs, self.ledger, self.unit)
        return sorted([*self.spans, *more], key=lambda span: span.start_s)


def write_trace(path: Path, tracks: Sequence[Track]) -> None:
    """Write what --trace names: a track for each rank, an arrow for each message. Ranks of a pipeline are in its order.
    Raises UserError if the file cannot be written."""
    pipelines: dict[int, list[Track]] = {}
    tracks = sorted(tracks, key=lambda track: track.row["rank"])  # arrows name tracks by their number
    for track in tracks:
        if track.runs is not None and track.row["rank"]:
            pipelines.setdefault(id(track.ledger), []).append(track)
    arrows: list[Arrow] = []
    for stages in pipelines.values():
        runs = [(track.row["rank"], track.runs or ()) for track in stages]
        arrows += _messages(runs, stages[0].ledger, stages[0].unit)
    spans = [(f"rank {track.row['rank']}: {track.row['role']}", track.all_spans()) for track in tracks]
    write_chrome_trace(path, spans, arrows)


@dataclass(frozen=True, slots=True)
class Arrow:
    """A run that is sent from one track to another: an arrow between the spans at these times."""

    run_id: int
    source: int
    sent_s: float
    dest: int
    received_s: float
    unit: str = "run"


def write_chrome_trace(
    path: Path, tracks: Sequence[tuple[str, Sequence[TraceSpan]]], messages: Sequence[Arrow] = ()
) -> None:
    """Write a track for each (label, spans), on one clock, for Perfetto. Raises UserError if it cannot be written."""
    zero = min((span.start_s for _, spans in tracks for span in spans), default=0.0)
    events = [event for index, message in enumerate(messages) for event in _arrow(index, message, zero)]
    for track, (label, spans) in enumerate(tracks):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": label}})
        for span in spans:
            shared = {"name": span.kind, "pid": 0, "tid": track, "ts": (span.start_s - zero) * 1e6, "args": span.args}
            events.append(
                shared | ({"ph": "X", "dur": span.duration_s * 1e6} if span.duration_s else {"ph": "i", "s": "t"})
            )
    write_file(path, "--trace", json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())


def _arrow(index: int, message: Arrow, zero: float) -> list[dict[str, Any]]:
    shared = {"name": "message", "cat": "message", "id": index, "pid": 0, "args": {message.unit: message.run_id}}
    sent, received = (message.sent_s - zero) * 1e6, (message.received_s - zero) * 1e6
    return [
        shared | {"ph": "s", "tid": message.source, "ts": sent},
        shared | {"ph": "f", "bp": "e", "tid": message.dest, "ts": received},
    ]


MOMENT_S = 1e-6  # an arrow needs a span to end at


def _head_spans(ledger: HeadLedger) -> list[TraceSpan]:
    return [
        *(TraceSpan("send", at_s, MOMENT_S, {"run": run_id}) for run_id, at_s in ledger.submitted_s.items()),
        *(TraceSpan("verdict", at_s, MOMENT_S, {"run": run_id}) for at_s, run_id in ledger.verdicts),
        *(TraceSpan("cancel", at_s, 0.0, {"runs": n_runs}) for at_s, n_runs in ledger.cancels),
        *(TraceSpan("waiting", start_s, end_s - start_s) for start_s, end_s in ledger.waits),
        *(TraceSpan("idle", start_s, end_s - start_s) for start_s, end_s in ledger.idles),
    ]


def _gaps(runs: Sequence[StageRun], ledger: HeadLedger, unit: str) -> Iterator[TraceSpan]:
    """The time between a stage's runs: idle until the next one leaves the head, then waiting for it."""
    for run_id, wait_s, start_s, _, _ in runs:
        if run_id not in ledger.submitted_s:
            continue  # the shutdown
        sent_s = min(max(ledger.submitted_s[run_id], wait_s), start_s)
        if sent_s > wait_s and run_id > 1:
            yield TraceSpan("idle", wait_s, sent_s - wait_s)
        if start_s > sent_s:
            yield TraceSpan("waiting", sent_s, start_s - sent_s, {unit: run_id})


def _messages(stages: Sequence[tuple[int, Sequence[StageRun]]], ledger: HeadLedger, unit: str) -> Iterator[Arrow]:
    """A message for each hop of every run (or question): from the head through the remote stages and back."""
    source, sent_s = 0, dict(ledger.submitted_s)
    for rank, runs in stages:
        for run_id, _, start_s, _, _ in runs:
            if run_id in sent_s:
                yield Arrow(run_id, source, sent_s[run_id], rank, start_s, unit)
        source, sent_s = rank, {run_id: end_s for run_id, _, _, end_s, _ in runs if run_id in ledger.submitted_s}
    for received_s, run_id in ledger.verdicts:
        if source and run_id in sent_s:
            yield Arrow(run_id, source, sent_s[run_id], 0, received_s, unit)
