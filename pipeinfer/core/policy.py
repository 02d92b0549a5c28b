"""What every policy answers, and what it may look at. Knows the tree, no pipeline and no model."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from pipeinfer.core.requests import Observer, Request
from pipeinfer.core.runs import Guess
from pipeinfer.core.settings import paper_settings, setting
from pipeinfer.core.tree import Node, Settled, TokenTree
from pipeinfer.core.types import Clock


class Send(NamedTuple):
    """A run for the target, parents before children. Without nodes: nothing until the next event."""

    nodes: Sequence[Node]


NOTHING = Send(())


class HoldUntil(NamedTuple):
    """Nothing until this time on the engine's clock, or the next event."""

    when_s: float


class AwaitDraft(NamedTuple):
    """Nothing until a draft has answered for the node. The draft's next step is for this request; if no draft has
    anything to do for it, its root is sent at once."""

    node: Node


Answer = Send | HoldUntil | AwaitDraft

N_ROWS = 32  # rows of a run, and of a draft's step, at most, unless a setting of the policy says more
OURS, PAPER = "ours", "paper"  # presets: our settings and additions, or the rule and the settings of the policy's paper
PRESET_HELP = "paper: the paper's rule and published settings, without our additions."


class PolicyView(Protocol):
    """What the policy of one request may look at."""

    request: Request
    clock: Clock

    @property
    def tree(self) -> TokenTree:
        return self.request.tree

    # -- the load

    @property
    def is_alone(self) -> bool:
        """Whether no other request is open."""

    @property
    def n_stages(self) -> int: ...

    @property
    def is_at_head(self) -> bool:
        """Whether this rank evaluates the whole target and the draft, one after the other."""

    @property
    def n_inflight(self) -> int:
        """Runs in flight that are not dead."""

    @property
    def n_dead(self) -> int:
        """Dead runs in flight."""

    def n_inflight_at(self, draft: int) -> int:
        """Runs in flight at a larger draft, by its number."""

    @property
    def n_evaluated(self) -> int:
        """Runs in flight that the stages evaluate: with `--no-cancel` dead ones too."""

    # -- costs, as measured

    @property
    def n_cheap_rows(self) -> int:
        """Rows that a run may have without costing much more than one row, less those that other requests want."""

    def run_s(self, n_rows: int) -> float:
        """Seconds of a run of `n_rows` in the slowest stage, after the request's text; 0: unknown."""

    def undisturbed_s(self, n_before: int) -> float:
        """Seconds of a one-row run in the slowest stage after so many tokens, without ranks beside it; 0: unknown."""

    @property
    def on_way_s(self) -> float:
        """Seconds from sending a run to its verdict, less the slowest stage's: the least of recent runs; 0: unknown."""

    def verdict_in_s(self, node: Node) -> float:
        """Seconds until a node's verdict, by the running mean; of an unsent one, if sent now. 0 before the first."""

    def early(self, patience: float = 0.0) -> HoldUntil | None:
        """The answer while a run would only be queued, or miss a verdict that is about to come: a later run has better
        guesses. None if it is time; with other requests open the engine paces runs. `patience`: one-row runs for which
        the slowest stage may be idle to wait for that verdict."""

    # -- drafts

    @property
    def n_drafts(self) -> int: ...

    @property
    def draft_s(self) -> float:
        """Seconds of a step of the smallest draft; 0: unknown."""

    @property
    def drafting(self) -> tuple[Collection[Node], float]:
        """The request's nodes that the smallest draft is expanding, and the seconds that its step still takes."""

    # -- nodes

    @property
    def depth_left(self) -> int:
        """Tokens that can still come; deeper guesses are useless."""
        return self.request.depth_left

    def fitting(self, nodes: Sequence[Node]) -> list[Node]:
        """The unsent nodes for which there is room, in their order."""

    def in_reach(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes whose token can be part of the output with another one after it, in their order."""
        end = self.tree.root.position + self.depth_left
        return [node for node in nodes if node.position < end]

    def may_branch(self, node: Node) -> bool:
        """Whether guesses after the node would be in reach."""
        return node.position + 1 - self.tree.root.position < self.depth_left


@dataclass
class Policy(ABC):
    """A dataclass with settings of its own (see `settings`). One instance serves one request and may keep state; it may
    share what it learns of the models with the instances that `begin` from it.

    `name`: as in --policy. `drafts`: whether it uses a draft. `n_seq`: KV sequences that its trees use. `uses`:
    features that an ablation study can take away: `cancel` (of runs) and `partitions` (sequences). `looks_up`: whether
    `--lookup` is its default. `n_rows`: rows of a run and of a draft's step at most. `prunes`: stages leave dead rows
    out of runs in flight."""

    name: ClassVar[str]
    drafts: ClassVar[bool] = True
    n_seq: ClassVar[int] = 31
    uses: ClassVar[tuple[str, ...]] = ()
    looks_up: ClassVar[bool] = False

    @property
    def n_rows(self) -> int:
        return N_ROWS

    @property
    def n_sequences(self) -> int:
        """KV sequences that its trees can use: `n_seq`, with wide runs more."""
        return max(self.n_seq, 2 * self.n_rows - 2 if self.n_rows > N_ROWS else 0)

    @property
    def prunes(self) -> bool:
        return True

    def preset_values(self) -> dict[str, Any]:
        """Settings whose values in the policy's preset are not their defaults, and those values."""
        return {}

    def begin(self) -> "Policy":
        """The policy of a new request, with these settings. What a request changes must not be shared: a policy with
        lists or dictionaries of its own answers `fresh()` here."""
        return copy(self)

    def fresh(self) -> "Policy":
        """One with these settings that has learned nothing, and shares nothing with this one."""
        settings = {each.name: getattr(self, each.name) for each in fields(self) if each.init and each.compare}
        return type(self)(**settings)

    @abstractmethod
    def send(self, context: PolicyView) -> Answer:
        """What goes to the target now."""

    def draft(self, context: PolicyView) -> Mapping[Node, int]:
        """Nodes for the smallest draft to expand now, in one batch, and how many guesses after each."""
        return {}

    def look_up(self, context: PolicyView) -> Collection[Node]:
        """Nodes after which guesses that take no time come before the draft is asked. Asked until there are none."""
        return ()

    def keep(self, node: Node, guesses: list[Guess], draft: int = 0) -> list[Guess]:
        """The guesses after `node` that enter the tree, with probabilities. Draft 0: the smallest; LOOKED_UP: none."""
        return guesses

    def refine(self, context: PolicyView, draft: int) -> Mapping[Node, int]:
        """Nodes that a larger draft is asked about now, the most important first, and how many guesses after each."""
        return {}

    def settled(self, settled: Settled, context: PolicyView) -> str:
        """The root moved. Returns a notice for the user, usually empty."""
        return ""


@dataclass(kw_only=True)
class PaperPolicy(Policy):
    """A policy of a paper. Settings that are our additions are off in the preset `paper`; `from_paper` makes that."""

    preset: str = setting(OURS, "--preset", choices=(OURS, PAPER), help=PRESET_HELP)

    @classmethod
    def from_paper(cls: "type[P]", **settings: Any) -> "P":
        """The preset `paper`; `settings`: in place of the published ones."""
        return cls(**{**paper_settings(cls), **settings, "preset": PAPER})

    def preset_values(self) -> dict[str, Any]:
        return paper_settings(type(self)) if self.preset == PAPER else {}


P = TypeVar("P", bound=PaperPolicy)


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that is open or waits to be opened, as the parts of the engine share it."""

    request: Request
    policy: Policy
    observer: Observer
    context: PolicyView
    n_heard: int = 0  # rows of the prompt that every stage has evaluated
    arrival: int = 0  # its number in the order of arrival; 0: it has yet to wait
    was_open: bool = False  # if it waits, it was preempted
    to_draft: Mapping[Node, int] = field(default_factory=dict)  # as the policy's `draft` answered
    drafts_at: int = -1  # the engine's version at that answer; -1: it has to be asked again

    @property
    def rank(self) -> tuple[int, int]:
        """Lower ranks are opened first and preempted last."""
        return self.request.priority, self.arrival


Active = Mapping[int, ActiveRequest]  # the open requests, by id
