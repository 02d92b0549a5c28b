"""A rank's track in a timeline, from its ledger, and the messages between ranks. Knows no rank's work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeinfer.observe.ledger import HeadLedger
from pipeinfer.observe.trace import Message, Span

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
