"""What every step of a job on one rank works with."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeinfer.cluster.hosts.energy import EnergyMeter
from pipeinfer.cluster.stages.pace import PacedStage
from pipeinfer.cluster.stages.stage import StageStats, StageWorker
from pipeinfer.cluster.transport import Link, Outbox
from pipeinfer.cluster.watch.flow import Flow
from pipeinfer.job.process.stop import StopFlag
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.text.vocabulary_file import VocabularyFile
from pipeinfer.observe.ledger import StageLedger
from pipeinfer.observe.trace import Tracer, pack_spans

CLOCK: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class Context:
    """This rank: its link to the others, its stop flag and its timeline."""

    link: Link
    flag: StopFlag
    tracer: Tracer
    flow: Flow
    """Progress of this rank's stage, for the watch."""

    clock_offset_s: float = 0.0
    meter: EnergyMeter = field(default_factory=EnergyMeter)
    paced: list[PacedStage] = field(default_factory=list)
    """The models of this rank, in a paced job."""

    arrived: dict[int, SliceFile] = field(default_factory=dict)
    """The slices that rank 0 sent, by the number of a draft, or `arrivals.TARGET`."""

    vocabulary: VocabularyFile | None = None
    """Of the target, on the ranks of its last layers and of the smallest draft."""

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
            "joules": self.meter.take_joules(),
            "rss_bytes": resident_bytes(),
            "peak_rss_bytes": peak_resident_bytes(),
            "open_files": count_open_files(),
            "n_messages": n_messages,
            "n_bytes": n_bytes,
            "n_out_of_band": n_out_of_band,
            "runs": ledger.moved(self.clock_offset_s) if ledger else [],
            "spans": pack_spans(spans, self.clock_offset_s),
        }


def resident_bytes() -> int:
    """Memory this process holds now, mapped pages of model files counted once they were touched (as pmap does).

    0 where the system does not tell.
    """
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most memory this process held, since its start or the last `forget_peak`."""
    # macOS counts in bytes; Linux, in kilobytes, is asked through /proc, whose peak can be reset
    unit = 1 if sys.platform == "darwin" else 1024
    return _status_bytes("VmHWM") or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forget_peak() -> None:
    """Begin the peak anew, where the system can: what was loaded before is not the next models' memory."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def count_open_files() -> int:
    """How many file descriptors this process has open; 0 where there is no /proc."""
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return 0


def _status_bytes(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
