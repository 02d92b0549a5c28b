"""What every policy answers, and what it may look at. Knows the tree, no pipeline and no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import ClassVar

from pipeinfer.core.levels import Level
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess
from pipeinfer.core.tree import Node, Settled, TokenTree


@dataclass(slots=True)
class View:
    """One request as its policy sees it: what is asked of it is answered as it is now."""

    request: Request
    target: Level
    n_drafts: int
    larger: Sequence[Level]  # drafts, without the smallest
    hold: Callable[..., bool]
    """Whether a run sent now would only lie in a queue, or, given a `patience` (one-row runs that the slowest stage may
    be idle), miss a verdict that will be there by then. The policy is asked again when it would not: who sends as late
    as possible sends the best that is known then."""

    rows_for_guesses: Callable[[int], int]  # by the tokens of context
    run_s: Callable[[int], float]
    """What a run of so many rows takes the slowest stage here, as measured; 0 if nobody knows."""

    draft_s: Callable[[], float]
    """What a step of the draft takes, as measured; 0 while nobody knows."""

    drafting: Callable[[], tuple[Collection[Node], float]]
    """What of the request the smallest draft expands at the moment, and how long its step still takes."""

    is_alone: Callable[[], bool]  # whether no other request is open

    verdict_in_s: Callable[[Node], float]
    """How long until the verdict of a node is here, as long as verdicts take lately; of one that was not sent: if it
    were sent now. 0 before the first verdict."""

    on_way_s: Callable[[], float]
    """What a verdict takes besides the evaluation in the stages, as little as it took lately; 0 before the first."""

    drafts_elsewhere: bool = False  # whether another rank than the head's has the smallest draft

    tree: TokenTree = field(init=False)

    def __post_init__(self) -> None:
        self.tree = self.request.tree

    @property
    def n_stages(self) -> int:
        return self.target.pipeline.n_stages

    @property
    def is_at_head(self) -> bool:
        """Whether the draft makes no guesses while the target evaluates a run: the head evaluates it itself."""
        return self.target.pipeline.is_at_head and not self.drafts_elsewhere

    @property
    def n_inflight(self) -> int:
        """Runs without a verdict, cancelled ones left out."""
        return self.target.n_inflight(self.request)

    def n_asked(self, draft: int) -> int:
        """Runs of a larger draft, by its number, without an answer."""
        return self.larger[draft - 1].n_inflight(self.request)

    @property
    def n_evaluated(self) -> int:
        """The same with those that nobody needs any more, if the stages are not told so (`--no-cancel`)."""
        return self.target.n_evaluated(self.request)

    @property
    def depth_left(self) -> int:
        """Tokens that can still come; deeper guesses are of no use."""
        return self.request.depth_left

    @property
    def n_cheap_rows(self) -> int:
        """What a run may carry without costing much more than a single row."""
        return self.rows_for_guesses(self.tree.root.position)

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
    def send(self, view: View) -> list[Node]:
        """Nodes to send to the target now as one run, parents before children; empty to send nothing."""

    def draft(self, view: View) -> Mapping[Node, int]:
        """Nodes the draft shall expand now, in one batch, and into how many guesses each; empty to draft nothing."""
        return {}

    def keep(self, node: Node, guesses: list[Guess], draft: int = 0) -> list[Guess]:
        """Which guesses after `node` enter the tree, and how probable they are. Draft 0 is the smallest."""
        return guesses

    def refine(self, view: View, draft: int) -> Mapping[Node, int]:
        """Nodes that draft number `draft`, a larger one, shall be asked about now, the most important first, and for
        how many guesses each."""
        return {}

    def settled(self, settled: Settled) -> str:
        """The root moved. Returns what the user should know about it, usually nothing."""
        return ""
