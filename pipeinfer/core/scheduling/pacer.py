"""When the slowest stage will want its next run. Knows costs and times; no tree, no request and no policy."""

from __future__ import annotations

import math

from pipeinfer.core.interfaces import Clock
from pipeinfer.core.scheduling.run_cost import RunCost

MEMORY = 8
"""Observations over which it is averaged."""

MARGIN_S, OFF, LOOKAHEAD = 1e-3, 2.0, 0.5
"""A run is due before the slowest stage is free, so that it is there in time: by MARGIN_S, and OFF times what costs and
the head were off by lately, but by LOOKAHEAD of a one-row run at most. Who sends later knows more verdicts."""


class Pacer:
    """Adds up what was sent, by `run_cost`, without which nothing is ever early."""

    def __init__(self, run_cost: RunCost | None, clock: Clock) -> None:
        self.run_cost, self.clock = run_cost, clock
        self._free_s = -math.inf  # when the slowest stage will have done what was sent
        self._off_s = self._late_s = 0.0  # running means: costs against what was reported; asked after a run was due
        self.answer_s = 0.0  # from a run that was not pruned to its verdict, a running mean; 0 before the first
        self.on_way_s = 0.0  # the least of that besides the slowest stage's time, lately; 0 before the first

    def due_s(self, context: int, oldest_sent_s: float = math.inf, patience: float = 0.0) -> float:
        """Before when a run would only lie in a queue, or miss a verdict that is about to come.

        `context`: tokens before it. `oldest_sent_s`: when that was sent whose verdict comes next. `patience`: so much
        of a one-row run the slowest stage may be idle if the verdict is there by then.
        """
        if self.run_cost is None:
            return -math.inf
        row_s = self.run_cost.seconds(1, context)
        due_s = self._free_s - min(LOOKAHEAD * row_s, MARGIN_S + OFF * (self._off_s + self._late_s))
        if oldest_sent_s + self.answer_s <= due_s + patience * row_s:
            due_s += patience * row_s
        return due_s

    def was_late(self, seconds: float) -> None:
        """What was held back was asked about so long after it was due."""
        if self.run_cost:
            self._late_s = _mean(self._late_s, min(seconds, self.run_cost.seconds(1, 0)))

    def sent(self, n_rows: int, context: int) -> float:
        """A run has been submitted; what it is thought to take the slowest stage."""
        if self.run_cost is None:
            return 0.0
        cost_s = self.run_cost.seconds(n_rows, context)
        self._free_s = max(self._free_s, self.clock()) + cost_s
        return cost_s

    def landed(self, cost_in_flight_s: float) -> None:
        """A verdict has come: the stages are through with all that was sent before it, whatever that was thought to
        take. `cost_in_flight_s`: what is left."""
        self._free_s = min(self._free_s, self.clock() + cost_in_flight_s)

    def answered(self, took_s: float) -> None:
        """The verdict of a run that every stage evaluated as a whole took so long."""
        self.answer_s = _mean(self.answer_s, took_s) if self.answer_s else took_s

    def reported(self, expected_s: float, took_s: float) -> None:
        """What a run that every stage evaluated as a whole took the slowest one."""
        self._off_s = _mean(self._off_s, abs(took_s - expected_s))

    def came(self, on_way_s: float) -> None:
        """The verdict of such a run took so long besides, queues included: those that met none have the least."""
        on_way_s = max(0.0, on_way_s)
        self.on_way_s = min(_mean(self.on_way_s, on_way_s), on_way_s) if self.on_way_s else on_way_s

    def given_up(self) -> None:
        """Runs were cancelled: the stages are free as soon as they hear of it."""
        self._free_s = -math.inf


def _mean(mean: float, value: float) -> float:
    return mean + (value - mean) / MEMORY
