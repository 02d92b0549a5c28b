"""The timeline of a run as Chrome trace events, one track a rank. Knows no rank's work, only its spans."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeinfer.observe.ledger import HeadLedger
from pipeinfer.outputs import write_file


@dataclass(slots=True)
class Span:
    """Something that one rank did from `start_s` on; a moment if `duration_s` is 0."""

    kind: str  # draft, send, settle, verdict, cancel; evaluate, cancelled, waiting, idle
    start_s: float
    duration_s: float = 0.0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Tracer:
    """Collects spans on `clock`, or nothing when it is off."""

    clock: Callable[[], float]
    on: bool = True
    spans: list[Span] = field(default_factory=list)

    def drafted(self, start_s: float, n_nodes: int, finished: bool) -> None:
        if self.on:
            self.spans.append(Span("draft", start_s, self.clock() - start_s, {"nodes": n_nodes, "finished": finished}))

    def settled(self, n_tokens: int) -> None:
        if self.on:
            self.spans.append(Span("settle", self.clock(), 0.0, {"tokens": n_tokens}))

    def evaluated(self, start_s: float, unit: str, number: int, n_rows: int, cancelled: bool) -> None:
        """`unit`: what is counted, a run of the target's or a question to a larger draft."""
        if self.on:
            kind = "cancelled" if cancelled else "evaluate"
            self.spans.append(Span(kind, start_s, self.clock() - start_s, {unit: number, "rows": n_rows}))


NO_TRACE = Tracer(lambda: 0.0, on=False)


@dataclass(frozen=True, slots=True)
class Message:
    """A run on its way from one track to another: an arrow between the spans at these two moments."""

    run_id: int
    source: int
    sent_s: float
    dest: int
    received_s: float
    unit: str = "run"


def write_chrome_trace(
    path: Path, tracks: Sequence[tuple[str, Sequence[Span]]], messages: Sequence[Message] = ()
) -> None:
    """One track for each (label, spans), on one clock, for Perfetto. Raises UserError when the file cannot be
    written."""
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


def _arrow(index: int, message: Message, zero: float) -> list[dict[str, Any]]:
    shared = {"name": "message", "cat": "message", "id": index, "pid": 0, "args": {message.unit: message.run_id}}
    sent, received = (message.sent_s - zero) * 1e6, (message.received_s - zero) * 1e6
    return [
        shared | {"ph": "s", "tid": message.source, "ts": sent},
        shared | {"ph": "f", "bp": "e", "tid": message.dest, "ts": received},
    ]


def pack_spans(spans: Sequence[Span], offset_s: float) -> list[dict[str, Any]]:
    """Spans as plain data, moved to another clock."""
    return [asdict(span) | {"start_s": span.start_s + offset_s} for span in spans]


MOMENT_S = 1e-6  # a span as short as that, where an arrow needs one to end at
StageRun = tuple[int, float, float, float, bool]


def head_spans(ledger: HeadLedger) -> list[Span]:
    return [
        *(Span("send", at_s, MOMENT_S, {"run": run_id}) for run_id, at_s in ledger.submitted_s.items()),
        *(Span("verdict", at_s, MOMENT_S, {"run": run_id}) for at_s, run_id in ledger.verdicts),
        *(Span("cancel", at_s, 0.0, {"runs": n_runs}) for at_s, n_runs in ledger.cancels),
        *(Span("waiting", start_s, end_s - start_s) for start_s, end_s in ledger.waits),
        *(Span("idle", start_s, end_s - start_s) for start_s, end_s in ledger.idles),
    ]


def gaps(runs: Sequence[StageRun], ledger: HeadLedger, unit: str = "run") -> Iterator[Span]:
    """The time between a stage's runs: idle until the next one leaves the head, then waiting for it."""
    for run_id, wait_s, start_s, _, _ in runs:
        if run_id not in ledger.submitted_s:
            continue  # the end of the pipeline, for which nobody waited
        left_s = min(max(ledger.submitted_s[run_id], wait_s), start_s)
        if left_s > wait_s and run_id > 1:  # before the first run there was nothing to be idle in
            yield Span("idle", wait_s, left_s - wait_s)
        if start_s > left_s:
            yield Span("waiting", left_s, start_s - left_s, {unit: run_id})


def messages(
    stages: Sequence[tuple[int, Sequence[StageRun]]], ledger: HeadLedger, unit: str = "run"
) -> Iterator[Message]:
    """Every run (or question) from the head through the remote stages and back, one message a hop."""
    source, sent_s = 0, dict(ledger.submitted_s)
    for rank, runs in stages:
        for run_id, _, start_s, _, _ in runs:
            if run_id in sent_s:
                yield Message(run_id, source, sent_s[run_id], rank, start_s, unit)
        source, sent_s = rank, {run_id: end_s for run_id, _, _, end_s, _ in runs if run_id in ledger.submitted_s}
    for received_s, run_id in ledger.verdicts:
        if source and run_id in sent_s:
            yield Message(run_id, source, sent_s[run_id], 0, received_s, unit)
