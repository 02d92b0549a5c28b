"""What became of a batch: requests, throughput, latencies, and how each rank spent the time. Runs nothing."""

from __future__ import annotations

from typing import Any

from pipeinfer import __version__
from pipeinfer.job.batch.batch_prepare import BatchWork
from pipeinfer.job.placement.deployment import Deployment
from pipeinfer.job.requests.asked import describe_drafts, describe_model
from pipeinfer.job.session.rank_uses import RankUses
from pipeinfer.job.session.session import Figures
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.observe.throughput import Throughput


class Summary:
    """Adds up while the batch runs."""

    def __init__(self, deployment: Deployment, work: BatchWork) -> None:
        self.deployment, self.work = deployment, work
        self.throughput = Throughput()
        self.n_completed = self.n_failed = self.open_max = 0
        self.start_s = self.end_s = 0.0

    @property
    def n_written(self) -> int:
        """Results in the file."""
        return self.work.n_done + self.n_completed + self.n_failed

    def begin(self, now_s: float) -> None:
        self.start_s = now_s
        self._uses = RankUses(self.deployment, now_s)

    def end(self, now_s: float, found: Figures) -> None:
        self.end_s = now_s
        self.note(found, now_s)

    def completed(self, metrics: RequestMetrics) -> None:
        self.n_completed += 1
        self.throughput.add(metrics)

    def note(self, found: Figures, now_s: float) -> None:
        """What the ranks did since the last time."""
        self._uses.note(found, now_s)

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
            "preempted_n": self.throughput.n_preempted,
            **self.throughput.figures(self.end_s - self.start_s, self.n_completed),
            "version": __version__,
            "model": describe_model(deployment.model),
            "model_draft": describe_drafts(deployment.drafts) if deployment.drafts else None,
            "ranks": self._uses.ranks(),
        }
