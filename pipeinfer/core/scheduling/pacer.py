"""When the slowest stage will want its next run, and what verdicts teach of costs. Knows times; no tree, no policy."""

import math

from pipeinfer.core.in_flight import InFlightRun
from pipeinfer.core.scheduling.run_cost import RunCost
from pipeinfer.core.types import Clock

MEMORY = 8
"""Observations in a running mean."""

MARGIN_S, OFF, LOOKAHEAD = 1e-3, 2.0, 0.5
"""A run is due before the slowest stage is free, to be there in time: by MARGIN_S, and OFF times the recent errors of
costs and of the head, but by LOOKAHEAD of a one-row run at most. A run that is sent later uses more verdicts."""


class Pacer:
    """Adds up the expected costs of what was sent. Without `run_cost` nothing is ever early."""

    def __init__(self, run_cost: RunCost | None, clock: Clock) -> None:
        self.run_cost, self.clock = run_cost, clock
        self._free_s = -math.inf  # when the slowest stage will have done what was sent
        self._off_s = self._late_s = 0.0  # running means: error of costs; how late a run that was due was asked for
        self.answer_s = 0.0  # from sending a run to its verdict, a running mean; 0 before the first
        self.on_way_s = 0.0  # of that, beside the slowest stage's time, the least of late; 0 before the first
        self._n_prompts = 0  # runs of prompts in flight

    def due_s(self, context: int, oldest_sent_s: float = math.inf, patience: float = 0.0) -> float:
        """Until when a run would only be queued, or miss a verdict that is about to come.

        `context`: tokens before it. `oldest_sent_s`: when the run was sent whose verdict comes next. `patience`: the
        share of a one-row run for which the slowest stage may be idle if that verdict is there by then.
        """
        if self.run_cost is None:
            return -math.inf
        row_s = self.run_cost.seconds(1, context)
        due_s = self._free_s - min(LOOKAHEAD * row_s, MARGIN_S + OFF * (self._off_s + self._late_s))
        if oldest_sent_s + self.answer_s <= due_s + patience * row_s:
            due_s += patience * row_s
        return due_s

    def asked_late(self, seconds: float) -> None:
        """A run was asked for so long after it was due."""
        if self.run_cost:
            self._late_s = _mean(self._late_s, min(seconds, self.run_cost.seconds(1, 0)))

    def sent(self, flight: InFlightRun) -> None:
        """A run was submitted: note when, and what it should cost."""
        flight.sent_s, flight.queued = self.clock(), self._n_prompts > 0
        self._n_prompts += flight.n_context > 0
        if self.run_cost:
            flight.cost_s = self.run_cost.seconds(flight.n_rows, flight.context)
            self._free_s = max(self._free_s, flight.sent_s) + flight.cost_s

    def landed(self, flight: InFlightRun, slowest_s: float, left_s: float) -> float:
        """A verdict has come; returns when. Only a run that every stage evaluated as a whole teaches costs.

        `slowest_s`: what it took the slowest stage; 0: unknown. `left_s`: expected costs of runs still in flight.
        """
        now_s = self.clock()
        self._free_s = min(self._free_s, now_s + left_s)
        self._n_prompts -= flight.n_context > 0
        if not flight.whole:
            return now_s
        if not flight.n_context:
            took_s = now_s - flight.sent_s
            self.answer_s = _mean(self.answer_s, took_s) if self.answer_s else took_s
            if slowest_s:
                self._off_s = _mean(self._off_s, abs(slowest_s - flight.cost_s))
                if not flight.queued:
                    on_way_s = max(0.0, took_s - slowest_s)  # the least: the others met queues
                    self.on_way_s = min(_mean(self.on_way_s, on_way_s), on_way_s) if self.on_way_s else on_way_s
        if slowest_s and self.run_cost:
            learn = self.run_cost.learn_chunk if flight.n_context else self.run_cost.learn
            learn(flight.n_rows, flight.context, slowest_s)
        return now_s

    def given_up(self) -> None:
        """Runs were cancelled: the stages are free as soon as they hear of it."""
        self._free_s = -math.inf


def _mean(mean: float, value: float) -> float:
    return mean + (value - mean) / MEMORY
