"""What every policy answers, and what it may look at. Knows the tree, no pipeline and no model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pipeinfer.core.interfaces import Clock
from pipeinfer.core.levels import Level
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess
from pipeinfer.core.scheduling.batch_planner import BatchPlanner
from pipeinfer.core.scheduling.pacer import Pacer
from pipeinfer.core.scheduling.run_cost import RunCost
from pipeinfer.core.speculator import Speculator
from pipeinfer.core.tree import Node, Settled, TokenTree


class Send(NamedTuple):
    """One run for the target, now: parents before children; of no nodes: nothing before something happens."""

    nodes: Sequence[Node]


NOTHING = Send(())


class HoldUntil(NamedTuple):
    """Nothing before this time on the engine's clock, unless something happens before."""

    when_s: float


class AwaitDraft(NamedTuple):
    """Nothing before a draft has said what follows the node. The request is the next one that the draft works for;
    where no draft has anything to do for it, its root goes at once."""

    node: Node


Answer = Send | HoldUntil | AwaitDraft


@dataclass(slots=True)
class PolicyContext:
    """One request as its policy sees it now, in an engine of these parts."""

    request: Request
    target: Level
    speculator: Speculator
    batches: BatchPlanner
    pacer: Pacer
    run_cost: RunCost | None
    clock: Clock

    @property
    def tree(self) -> TokenTree:
        return self.request.tree

    # -- the load

    @property
    def is_alone(self) -> bool:
        """Whether no other request is open."""
        return self.batches.n_open == 1

    @property
    def n_stages(self) -> int:
        return self.target.pipeline.n_stages

    @property
    def is_at_head(self) -> bool:
        """Whether the draft makes no guesses while the target evaluates a run: the head evaluates it itself."""
        return self.target.pipeline.is_at_head and self.speculator.remote is None

    @property
    def n_inflight(self) -> int:
        """Runs without a verdict, cancelled ones left out."""
        return self.target.n_inflight(self.request)

    def n_asked(self, draft: int) -> int:
        """Runs of a larger draft, by its number, without an answer."""
        return self.speculator.drafts[draft - 1].n_inflight(self.request)

    @property
    def n_evaluated(self) -> int:
        """The same with those that nobody needs any more, if the stages are not told so (`--no-cancel`)."""
        return self.target.n_evaluated(self.request)

    # -- costs, as measured

    @property
    def n_cheap_rows(self) -> int:
        """What a run may carry without costing much more than a single row, less what other requests want of it."""
        return self.batches.n_rows_for_guesses(self.tree.root.position)

    def run_s(self, n_rows: int) -> float:
        """What a run of so many rows takes the slowest stage here; 0 if nobody knows."""
        return self.run_cost.seconds(n_rows, self.tree.root.position) if self.run_cost else 0.0

    @property
    def on_way_s(self) -> float:
        """What a verdict takes besides the evaluation in the stages, the least of late; 0 before the first one."""
        return self.pacer.on_way_s

    def verdict_in_s(self, node: Node) -> float:
        """How long until the verdict of a node is here, as long as verdicts take lately; of one that was not sent: if
        it were sent now. 0 before the first verdict."""
        if node.run_id is None:
            return self.pacer.answer_s
        return max(0.0, self.target.sent_s(node.run_id) + self.pacer.answer_s - self.clock())

    def early(self, patience: float = 0.0) -> HoldUntil | None:
        """Until when a run would only wait in a queue, or, given a `patience` (one-row runs that the slowest stage may
        be idle), miss a verdict that is there by then: what is sent late is the best that is known then. None: it is
        time, or other requests are open and the engine paces the runs."""
        if not self.is_alone:
            return None
        sent_s = next((flight.sent_s for flight in self.target.useful_flights), math.inf)
        due_s = self.pacer.due_s(self.tree.root.position, sent_s, patience)
        return HoldUntil(due_s) if self.clock() < due_s else None

    # -- drafts

    @property
    def n_drafts(self) -> int:
        return self.speculator.n_drafts

    @property
    def draft_s(self) -> float:
        """What a step of the draft takes; 0 while nobody knows."""
        return self.speculator.step_s

    @property
    def drafting(self) -> tuple[Collection[Node], float]:
        """What of the request the smallest draft expands at the moment, and how long its step still takes."""
        return self.speculator.at_work(self.request)

    # -- nodes

    @property
    def depth_left(self) -> int:
        """Tokens that can still come; deeper guesses are of no use."""
        return self.request.depth_left

    def fitting(self, nodes: Sequence[Node]) -> list[Node]:
        """Which of unsent nodes there is room for, in their order."""
        return self.target.pool.fitting(nodes)

    def in_reach(self, node: Node) -> bool:
        """Whether the node's token can still be part of the output and be followed by another."""
        return node.position - self.tree.root.position < self.depth_left

    def may_branch(self, node: Node) -> bool:
        """Whether guesses after the node would be in reach."""
        return node.position + 1 - self.tree.root.position < self.depth_left


@dataclass
class Policy(ABC):
    """A dataclass whose settings (see `settings`) are its own. One instance serves one request, so it may remember;
    what it learns of the models it may share with the instances that begin from it.

    `name`: as in --policy. `drafts`: whether it has any use for a draft. `n_seq`: KV sequences that its trees can use.
    `uses`: what of the levels it uses and an ablation study can take away: to `cancel` runs, sequences as `partitions`.
    """

    name: ClassVar[str]
    drafts: ClassVar[bool] = True
    n_seq: ClassVar[int] = 31
    uses: ClassVar[tuple[str, ...]] = ()

    def begin(self) -> Policy:
        """The policy of a new request, with these settings."""
        return copy(self)

    @abstractmethod
    def send(self, context: PolicyContext) -> Answer:
        """What goes to the target now."""

    def draft(self, context: PolicyContext) -> Mapping[Node, int]:
        """Nodes the draft shall expand now, in one batch, and into how many guesses each; empty to draft nothing."""
        return {}

    def keep(self, node: Node, guesses: list[Guess], draft: int = 0) -> list[Guess]:
        """Which guesses after `node` enter the tree, and how probable they are. Draft 0 is the smallest."""
        return guesses

    def refine(self, context: PolicyContext, draft: int) -> Mapping[Node, int]:
        """Nodes that draft number `draft`, a larger one, shall be asked about now, the most important first, and for
        how many guesses each."""
        return {}

    def settled(self, settled: Settled, context: PolicyContext) -> str:
        """The root moved. Returns what the user should know about it, usually nothing."""
        return ""
