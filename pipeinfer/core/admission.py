"""Whether a request may begin: cells for its whole text, sequences, and what it begins with. Opens none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeinfer.core.growth import Growth
from pipeinfer.core.levels import Level
from pipeinfer.core.opened import Opened
from pipeinfer.core.prefixes import Prefixes
from pipeinfer.core.requests import Prefix, Request
from pipeinfer.core.run_cost import RunCost


class Admission:
    """`levels`: the target first. `opened`: the open requests by id."""

    def __init__(
        self, levels: Sequence[Level], growth: Growth, opened: Mapping[int, Opened], run_cost: RunCost | None
    ) -> None:
        self.levels, self.growth, self.opened, self.run_cost, target = levels, growth, opened, run_cost, levels[0]
        self.prefixes = Prefixes(target.blocks, target.pool.rewinds, opened, target.n_settled)

    def forget_oldest(self, but: Prefix | None = None) -> bool:
        """Give up what the first of the finished requests has left; whether there was one, other than `but`."""
        if request := self.prefixes.oldest(but):
            self.growth.forget(request)
            for level in self.levels:
                level.pool.close(request.id)
        return request is not None

    def better_waits(self, request: Request) -> bool:
        """Whether it does, for an open one that evaluates what it begins with too."""
        return self.prefixes.waits(request, self._is_worth_waiting)

    def _is_worth_waiting(self, n_rows: int) -> bool:
        """Whether evaluating so many rows again takes the slowest stage longer than all stages take for one: about so
        long a request waits for what another one evaluates."""
        cost = self.run_cost
        return not cost or cost.seconds(n_rows, 0) > self.levels[0].pipeline.n_stages * cost.seconds(1, 0)

    def make_room(self, request: Request) -> bool:
        """Whether there is room for the request, which notes what it `continues`; what finished ones have left is given
        up for it, at last by moving there."""
        while self.growth.has_heard:  # else it will have when its step is done
            prefix = self.prefixes.best(request)
            if self._has_room(request, prefix):
                return True
            if not self.forget_oldest(but=prefix):
                moves = prefix._replace(moves=prefix.source.id not in self.opened) if prefix else None
                return moves != prefix and self._has_room(request, moves)
        return False

    def _has_room(self, request: Request, prefix: Prefix | None) -> bool:
        request.continues = prefix
        opened, kept = [job.request for job in self.opened.values()], self.prefixes.kept(but=prefix)
        if (opened or kept) and not all(level.has_room(request, opened, kept) for level in self.levels):
            return False
        return bool(prefix and prefix.moves) or (
            all(level.pool.n_free for level in self.levels) and self.growth.can_open
        )
