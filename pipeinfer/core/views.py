"""What policies see of the engine: makes the View of each request. Decides and sends nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from pipeinfer.core.growth import Growth
from pipeinfer.core.interfaces import Clock
from pipeinfer.core.levels import Level
from pipeinfer.core.opened import Opened
from pipeinfer.core.pacer import Pacer
from pipeinfer.core.policy import View
from pipeinfer.core.requests import Request
from pipeinfer.core.rooms import Rooms
from pipeinfer.core.run_cost import RunCost
from pipeinfer.core.tree import Node, TokenTree


@dataclass(frozen=True, slots=True)
class Views:
    """`opened`: the open requests by id."""

    target: Level
    growth: Growth
    rooms: Rooms
    pacer: Pacer
    run_cost: RunCost | None
    clock: Clock
    opened: Mapping[int, Opened]

    def of(self, request: Request) -> View:
        tree = request.tree
        return View(
            request, self.target, self.growth.n_drafts, self.growth.drafts, partial(self._holds, tree),
            self.rooms.n_rows_for_guesses, partial(self._run_s, tree), lambda: self.growth.step_s,
            partial(self.growth.at_work, request), lambda: len(self.opened) == 1, self._verdict_in_s,
            lambda: self.pacer.on_way_s, self.growth.remote is not None,
        )  # fmt: skip

    def _holds(self, tree: TokenTree, patience: float = 0.0) -> bool:
        """Whether a request that is alone should keep its guesses back for now."""
        sent_s = next((flight.sent_s for flight in self.target.useful_flights), math.inf)
        return len(self.opened) == 1 and self.pacer.is_early(tree.root.position, sent_s, patience)

    def _run_s(self, tree: TokenTree, n_rows: int) -> float:
        """What a run of so many rows takes the slowest stage; 0 if nobody knows."""
        return self.run_cost.seconds(n_rows, tree.root.position) if self.run_cost else 0.0

    def _verdict_in_s(self, node: Node) -> float:
        if node.run_id is None:
            return self.pacer.answer_s
        return max(0.0, self.target.sent_s(node.run_id) + self.pacer.answer_s - self.clock())
