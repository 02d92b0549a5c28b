"""How each rank spent the time of many requests, added up from what the ranks tell now and then. Runs nothing."""

from dataclasses import asdict, astuple, replace
from typing import Any

from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.session.outcome import time_use
from pipeinfer.job.session.session import Figures
from pipeinfer.observe.ledger import TimeUse

NOTHING = TimeUse(0.0, 0.0, 0.0, 0.0, 0.0)


class RankUses:
    """From `start_s` on."""

    def __init__(self, plan: JobPlan, start_s: float) -> None:
        self.plan, self.noted_s = plan, start_s
        self._uses = [NOTHING] * plan.assignment.n_ranks
        self._peaks = [0] * plan.assignment.n_ranks
        self._sent_s: dict[int, float] = {}  # runs that may have been in flight when the ranks told of the others

    def note(self, found: Figures, now_s: float) -> dict[int, TimeUse]:
        """Add what each rank did since the last time, and return it."""
        sent_s = found.ledger.submitted_s
        found = replace(found, ledger=replace(found.ledger, submitted_s={**self._sent_s, **sent_s}))
        uses = {rank: time_use(rank, found, (self.noted_s, now_s)) for rank in sorted(found.figures)}
        for rank, use in uses.items():
            self._uses[rank] = TimeUse(*map(sum, zip(astuple(self._uses[rank]), astuple(use), strict=True)))
            self._peaks[rank] = max(self._peaks[rank], found.figures[rank]["peak_rss_bytes"])
        self._sent_s, self.noted_s = sent_s, now_s
        return uses

    def ranks(self) -> list[dict[str, Any]]:
        """Of each rank what --json prints and the statistics show."""
        plan = self.plan
        return [
            {
                "rank": rank,
                "host": plan.hosts[rank].name,
                "role": plan.assignment.describe(rank),
                **asdict(use),
                "peak_rss_bytes": self._peaks[rank],
            }
            for rank, use in enumerate(self._uses)
        ]
