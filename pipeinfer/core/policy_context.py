"""The engine as the policy of one request sees it. Knows no policy."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pipeinfer.core.batch_planner import BatchPlanner
from pipeinfer.core.levels import Level
from pipeinfer.core.policy import HoldUntil, PolicyView
from pipeinfer.core.requests import Request
from pipeinfer.core.speculator import Speculator
from pipeinfer.core.tree import Node
from pipeinfer.core.types import Clock


@dataclass(slots=True)
class PolicyContext(PolicyView):
    """A request, and the parts of the engine that serve it."""

    request: Request
    target: Level
    speculator: Speculator
    batches: BatchPlanner
    clock: Clock

    @property
    def is_alone(self) -> bool:
        return self.batches.n_open == 1

    @property
    def n_stages(self) -> int:
        return self.target.pipeline.n_stages

    @property
    def is_at_head(self) -> bool:
        return self.target.pipeline.is_at_head and self.speculator.remote is None

    @property
    def n_inflight(self) -> int:
        return self.target.n_inflight(self.request)

    @property
    def n_dead(self) -> int:
        return self.target.n_dead(self.request)

    def n_inflight_at(self, draft: int) -> int:
        return self.speculator.drafts[draft - 1].n_inflight(self.request)

    @property
    def n_evaluated(self) -> int:
        return self.target.n_evaluated(self.request)

    @property
    def n_cheap_rows(self) -> int:
        return self.batches.n_rows_for_guesses(self.tree.root.position)

    def run_s(self, n_rows: int) -> float:
        cost = self.batches.run_cost
        return cost.seconds(n_rows, self.tree.root.position) if cost else 0.0

    def undisturbed_s(self, n_before: int) -> float:
        cost = self.batches.run_cost
        return cost.undisturbed_s(n_before) if cost else 0.0

    @property
    def on_way_s(self) -> float:
        return self.batches.pacer.on_way_s

    def verdict_in_s(self, node: Node) -> float:
        answer_s = self.batches.pacer.answer_s
        if node.run_id is None:
            return answer_s
        return max(0.0, self.target.sent_s(node.run_id) + answer_s - self.clock())

    def early(self, patience: float = 0.0) -> HoldUntil | None:
        if not self.is_alone:
            return None
        sent_s = next((flight.sent_s for flight in self.target.useful_flights), math.inf)
        due_s = self.batches.pacer.due_s(self.tree.root.position, sent_s, patience)
        return HoldUntil(due_s) if self.clock() < due_s else None

    @property
    def n_drafts(self) -> int:
        return self.speculator.n_drafts

    @property
    def draft_s(self) -> float:
        return self.speculator.step_s

    @property
    def drafting(self) -> tuple[Collection[Node], float]:
        return self.speculator.at_work(self.request)

    def fitting(self, nodes: Sequence[Node]) -> list[Node]:
        return self.target.pool.fitting(nodes)
