"""What every step of a job on one rank works with."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeinfer.cli.options import RunOptions
from pipeinfer.cli.stop import StopFlag
from pipeinfer.cluster.mpi import Link, Outbox
from pipeinfer.cluster.stage import StageStats, StageWorker
from pipeinfer.trace import Tracer, pack_spans

CLOCK: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class Context:
    """This rank: its options, its link to the others, its stop flag and its timeline."""

    options: RunOptions
    link: Link
    flag: StopFlag
    tracer: Tracer
    clock_offset_s: float = 0.0

    @property
    def rank(self) -> int:
        return self.link.rank

    def figures(self, worker: StageWorker | None, outbox: Outbox) -> dict[str, Any]:
        """What this rank did, as plain data for rank 0."""
        stats = worker.stats if worker else StageStats()
        return {
            "busy_s": stats.busy_s,
            "runs_skipped": stats.n_skipped,
            "runs_stopped": stats.n_stopped,
            "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "n_messages": outbox.n_runs,
            "n_bytes": outbox.n_run_bytes,
            "spans": pack_spans(self.tracer.spans, self.clock_offset_s),
        }


def complain(message: str) -> None:
    """The one line about what is wrong; rank 0 only."""
    print(f"pipeinfer: {message}", file=sys.stderr)
