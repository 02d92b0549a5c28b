"""How each rank spends its time, asked for now and then while a service runs, and never waited for: for who watches it,
and because what ranks note would grow without end."""

from __future__ import annotations

from dataclasses import asdict, replace

from pipeinfer.job.launch.context import CLOCK
from pipeinfer.job.placement.deployment import Deployment
from pipeinfer.job.serve.front import Picture
from pipeinfer.job.session.outcome import time_use
from pipeinfer.job.session.session import Figures, Session

PERIOD_S = 0.5
"""Between two pictures."""

N_NOTED = 2000
"""Notes of rank 0 after which the ranks are asked although nobody watches: their memory stays below 1 MB."""

USES = ("busy", "cancelled", "waiting", "idle")


class Pictures:
    """`on`: somebody watches."""

    def __init__(self, session: Session, deployment: Deployment) -> None:
        self.session, self.deployment, self.on = session, deployment, False
        self._since_s = self._asked_s = CLOCK()
        self._sent_s: dict[int, float] = {}  # runs that may have been in flight when the ranks told of the others
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
            self._since_s, self._asked_s = self._asked_s, CLOCK()
            self.session.ask_figures()
        return None

    def _picture(self, found: Figures) -> Picture:
        sent_s = found.ledger.submitted_s
        found = replace(found, ledger=replace(found.ledger, submitted_s={**self._sent_s, **sent_s}))
        self._sent_s = sent_s
        window = self._since_s, self._asked_s
        ranks = [self._shares(rank, found, window) for rank in sorted(found.figures)]
        return Picture(window[1] - window[0], ranks)

    def _shares(self, rank: int, found: Figures, window: tuple[float, float]) -> dict[str, object]:
        use = asdict(time_use(rank, found, window))
        shares = {name: use[f"{name}_s"] / max(use["wall_s"], 1e-9) for name in USES}
        return {"rank": rank, "role": self.deployment.plan.describe(rank), **shares}
