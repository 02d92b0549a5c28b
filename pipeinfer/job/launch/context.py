"""A rank's state throughout a job, and its reports. Knows no command."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.cluster.hosts.resources import EnergyMeter, count_open_files, peak_resident_bytes, resident_bytes
from pipeinfer.cluster.stages.pace import JobClock, PacedStage
from pipeinfer.cluster.stages.stage import StageStats, StageWorker
from pipeinfer.cluster.transport import Link, Outbox
from pipeinfer.cluster.watch.protocol import Flow
from pipeinfer.job.process.stop import StopFlag
from pipeinfer.models.text.tokenizer import VocabularyFile
from pipeinfer.observe.trace import StageLedger, Tracer, pack_spans

CLOCK: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class Context:
    """`link`: to the other ranks. `flow`: progress of this rank's stage, for the watch. `clock`: of the job's times.
    `clock_offset_s`: to rank 0's clock. `paced`: this rank's models in a paced job. `vocabulary`: the target's, on the
    ranks of its last layers and of the smallest draft."""

    link: Link
    flag: StopFlag
    tracer: Tracer
    flow: Flow
    clock: JobClock = field(default_factory=JobClock)
    clock_offset_s: float = 0.0
    meter: EnergyMeter = field(default_factory=EnergyMeter)
    paced: list[PacedStage] = field(default_factory=list)
    vocabulary: VocabularyFile | None = None

    @property
    def rank(self) -> int:
        return self.link.rank

    def close_vocabulary(self) -> None:
        if self.vocabulary:
            self.vocabulary.close()
        self.vocabulary = None

    def take_figures(self, worker: StageWorker | None, outbox: Outbox, ledger: StageLedger | None) -> dict[str, Any]:
        """This rank's report since the last one, as plain data; times on rank 0's clock."""
        stats = StageStats()
        if worker:
            stats, worker.stats = worker.stats, stats
        spans, self.tracer.spans = self.tracer.spans, []
        n_messages, n_bytes, n_out_of_band = outbox.take_counts()
        return {
            "runs_skipped": stats.n_skipped,
            "runs_stopped": stats.n_stopped,
            "runs_left_to_samplers": stats.n_left,
            "layers_saved": stats.n_layers_saved,
            "late_s": sum(stage.take_late_s() for stage in self.paced),
            "joules": math.nan if self.clock.dilation > 1 else self.meter.take_joules(),
            "rss_bytes": resident_bytes(),
            "peak_rss_bytes": peak_resident_bytes(),
            "open_files": count_open_files(),
            "n_messages": n_messages,
            "n_bytes": n_bytes,
            "n_out_of_band": n_out_of_band,
            "runs": ledger.moved(self.clock_offset_s) if ledger else [],
            "spans": pack_spans(spans, self.clock_offset_s),
        }
