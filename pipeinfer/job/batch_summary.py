"""What became of a batch: requests, throughput, latencies, and how each rank spent the time. Runs nothing."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from pipeinfer import __version__
from pipeinfer.job.asked import describe_drafts, describe_model
from pipeinfer.job.batch_prepare import BatchWork
from pipeinfer.job.deployment import Deployment
from pipeinfer.job.outcome import time_use
from pipeinfer.job.session import Figures
from pipeinfer.observe.ledger import TimeUse
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.observe.throughput import Throughput

NOTHING = TimeUse(0.0, 0.0, 0.0, 0.0, 0.0)


class Summary:
    """Adds up while the batch runs."""

    def __init__(self, deployment: Deployment, work: BatchWork) -> None:
        self.deployment, self.work = deployment, work
        self.throughput = Throughput()
        self.n_completed = self.n_failed = self.open_max = 0
        self.start_s = self.end_s = 0.0
        self._uses = [NOTHING] * deployment.plan.n_ranks
        self._peaks = [0] * deployment.plan.n_ranks
        self._sent_s: dict[int, float] = {}  # runs that may have been in flight when the ranks told of the others

    @property
    def n_written(self) -> int:
        """Results in the file."""
        return self.work.n_done + self.n_completed + self.n_failed

    def begin(self, now_s: float) -> None:
        self.start_s = self._noted_s = now_s

    def end(self, now_s: float, found: Figures) -> None:
        self.end_s = now_s
        self.note(found, now_s)

    def completed(self, metrics: RequestMetrics) -> None:
        self.n_completed += 1
        self.throughput.add(metrics)

    def note(self, found: Figures, now_s: float) -> None:
        """What the ranks did since the last time."""
        sent_s = found.ledger.submitted_s
        found = replace(found, ledger=replace(found.ledger, submitted_s={**self._sent_s, **sent_s}))
        for rank in found.figures:
            use = time_use(rank, found, (self._noted_s, now_s))
            self._uses[rank] = TimeUse(
                *map(sum, zip(asdict(self._uses[rank]).values(), asdict(use).values(), strict=True))
            )
            self._peaks[rank] = max(self._peaks[rank], found.figures[rank]["peak_rss_bytes"])
        self._sent_s, self._noted_s = sent_s, now_s

    def figures(self) -> dict[str, Any]:
        """The object that --json prints and the statistics show."""
        deployment = self.deployment
        return {
            "requests": self.work.n_requests,
            "done_before": self.work.n_done,
            "completed": self.n_completed,
            "failed": self.n_failed,
            "left": self.work.n_requests - self.n_written,
            "open_max": self.open_max,
            **self.throughput.figures(self.end_s - self.start_s, self.n_completed),
            "version": __version__,
            "model": describe_model(deployment.model),
            "model_draft": describe_drafts(deployment.drafts) if deployment.drafts else None,
            "ranks": [
                {
                    "rank": rank,
                    "host": deployment.hosts[rank].name,
                    "role": deployment.plan.describe(rank),
                    **asdict(use),
                    "peak_rss_bytes": self._peaks[rank],
                }
                for rank, use in enumerate(self._uses)
            ],
        }
