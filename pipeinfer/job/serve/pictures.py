"""How each rank spends its time, asked for now and then while a service runs, and never waited for: for who watches it,
and because what ranks note would grow without end."""

from pipeinfer.job.launch.context import CLOCK
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.serve.front import Picture
from pipeinfer.job.session.rank_uses import RankUses
from pipeinfer.job.session.session import Figures, Session

PERIOD_S = 0.5
"""Between two pictures."""

N_NOTED = 2000
"""Notes of rank 0 after which the ranks are asked although nobody watches: their memory stays below 1 MB."""

USES = ("busy", "cancelled", "waiting", "idle")


class Pictures:
    """`on`: somebody watches."""

    def __init__(self, session: Session, plan: JobPlan) -> None:
        self.session, self.plan, self.on = session, plan, False
        self._asked_s = CLOCK()
        self._uses = RankUses(plan, self._asked_s)
        self._found: Figures | None = None

    @property
    def due(self) -> bool:
        """Whether `next` has something to do. Asked in every wait."""
        if self.session.asks_figures:
            self._found = self._found or self.session.poll_figures()
            return self._found is not None
        return self.on and CLOCK() >= self._asked_s + PERIOD_S

    def next(self) -> Picture | None:
        """A picture, if there is a new one; asks for what it shows."""
        if self.due and self._found:
            found, self._found = self._found, None
            return self._picture(found)
        if not self.session.asks_figures and (self.due or self.session.n_noted >= N_NOTED):
            self._asked_s = CLOCK()
            self.session.ask_figures()
        return None

    def _picture(self, found: Figures) -> Picture:
        seconds, uses = self._asked_s - self._uses.noted_s, self._uses.note(found, self._asked_s)
        return Picture(seconds, [
            {"rank": rank, "role": self.plan.assignment.describe(rank)}
            | {name: getattr(use, f"{name}_s") / max(seconds, 1e-9) for name in USES}
            for rank, use in uses.items()
        ])  # fmt: skip
