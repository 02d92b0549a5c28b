"""A hierarchy of models, each verifying what the one below it produces (PipeSpec, McDanel et al. 2025, algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeinfer.core.policy import Answer, AwaitDraft, Policy, PolicyContext, Send
from pipeinfer.core.settings import setting
from pipeinfer.core.tree import Node
from pipeinfer.policies.limits import MAX_RUN

SYNCHRONOUS_WINDOW = 8
"""Tokens a draft makes before it waits, in the paper's baseline (section 4.4)."""


@dataclass(unsafe_hash=True)  # by its settings, which stay as they are
class PipeSpec(Policy):
    """Models M_0 … M_K: M_0 is the smallest draft, M_K the target. No branches: one guess follows each token.

    The output of M_i, the paper's O_i, is the tree's chain of first children down to `_tip(i)`, the newest token that
    M_i has chosen and no larger model has replaced. A rejection (lines 6, 7 and 16) needs no message: the token that
    M_i chose instead becomes the first child, and the old one leaves the chain, unless a larger model chooses it later.

    `lookahead`: tokens that M_i waits for before it verifies them (section 4.4), unless M_0 … M_(i-1) cannot make more.
    Without `asynchronous` (table 1) a model that has made so many waits until they are verified.
    """

    name: ClassVar[str] = "pipespec"
    uses: ClassVar[tuple[str, ...]] = ("cancel",)

    lookahead: int = setting(
        0, "--lookahead", most=MAX_RUN,
        help=f"Tokens that each model waits for before it verifies them; 0: none, with --no-async {SYNCHRONOUS_WINDOW}."
    )  # fmt: skip
    asynchronous: bool = setting(True, "--no-async", help="Ablation: the draft works only while the pipeline is empty.")

    def draft(self, context: PolicyContext) -> dict[Node, int]:
        """M_0 makes its next token (line 9)."""
        return dict.fromkeys(self._taken(context, 0), 1)

    def refine(self, context: PolicyContext, draft: int) -> dict[Node, int]:
        """What M_`draft` compares with its own predictions (lines 11 to 14)."""
        return dict.fromkeys(self._taken(context, draft), 1)

    def send(self, context: PolicyContext) -> Answer:
        """What M_K does."""
        batch = self._taken(context, context.n_drafts)
        return Send(batch) if batch or context.n_inflight else AwaitDraft(context.tree.root)

    def _taken(self, context: PolicyContext, model: int) -> list[Node]:
        """The next batch of M_`model`, if it goes now: its newest token and what the model below added."""
        if _works(context, model) or self._rests(context, model):
            return []
        batch = _batch(context, model)
        below = range(model) if len(batch) <= self._window else ()
        waits = any(_works(context, smaller) or self._taken(context, smaller) for smaller in below)
        if model < context.n_drafts:
            batch = [node for node in batch if context.may_branch(node) and node.passed_over < max(model, 1)]
        return [] if waits else batch

    @property
    def _window(self) -> int:
        return self.lookahead or (0 if self.asynchronous else SYNCHRONOUS_WINDOW)

    def _rests(self, context: PolicyContext, model: int) -> bool:
        """Whether M_`model` waits for a larger one, as synchronous models do."""
        if self.asynchronous or model == context.n_drafts:
            return False
        larger = range(model + 1, context.n_drafts + 1)
        return any(_works(context, each) for each in larger) or len(_batch(context, model + 1)) > self._window


def _works(context: PolicyContext, model: int) -> bool:
    """Whether M_`model` has a batch in flight; the smallest never has."""
    return model > 0 and (context.n_asked(model) if model < context.n_drafts else context.n_inflight) > 0


def _batch(context: PolicyContext, model: int) -> list[Node]:
    """From the newest token of M_`model` to the newest of the model below."""
    chain, n_left = [context.tree.root], context.depth_left
    while len(chain) < n_left and chain[-1].children:
        chain.append(chain[-1].children[0])
    start = _tip(chain, model) if model < context.n_drafts else 0
    return chain[start : _tip(chain, max(0, model - 1)) + 1]


def _tip(chain: list[Node], draft: int) -> int:
    """The end of M_`draft`'s output: the first token after which it has not chosen one."""
    heard = (node.refined >= draft and node.expanded for node in chain)
    return next((index for index, known in enumerate(heard) if not known), len(chain))
