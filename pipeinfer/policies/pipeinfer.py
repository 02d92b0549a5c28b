"""Asynchronous pipelined speculation (PipeInfer, sections IV-A and IV-B).

The newest token is sent at once; guesses follow in micro-batches while it is in flight. Guesses that survive a verdict
stay in the tree and in the pipeline, and are never drafted or sent twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from pipeinfer.core.policy import NOTHING, Answer, AwaitDraft, Policy, PolicyContext, Send
from pipeinfer.core.runs import Guess
from pipeinfer.core.settings import setting
from pipeinfer.core.tree import Node, Settled
from pipeinfer.policies.backoff import SpeculationBackoff
from pipeinfer.policies.calibration import Calibration
from pipeinfer.policies.likeliest import SCORE, to_expand, to_refine, unsent_in_reach
from pipeinfer.policies.limits import MAX_RUN, MAX_RUNS, MAX_WIDTH


@dataclass(unsafe_hash=True)  # by its settings, which stay as they are
class PipeInfer(Policy):
    """`microbatch`: guesses a run at most (0: as many as are cheap). `inflight`: runs in flight at most (0: one more
    than there are stages).

    Cutoffs are probabilities under the draft: the likeliest guess after a node enters the tree from `accept_cutoff` on,
    a further one (up to `width` in all) from `split_cutoff` on. Reactive speculation (section IV-B.2): each expansion
    that finds a guess raises the accept cutoff by `recovery`, each that finds none lowers it by `decay`; an accepted
    guess resets it. Probabilities are corrected by experience (`confidence`) before they are compared or multiplied
    along a path; requests of one session share it.

    Larger drafts are asked first about the likeliest nodes after which nothing was sent. When hardly any guess is
    right, only the root is sent, and guesses are tried again at growing intervals.

    For ablation studies (the paper's figure 8): without `continuous`, one run of guesses is in flight at a time;
    without `asynchronous`, the draft works only while the pipeline is empty.
    """

    name: ClassVar[str] = "pipeinfer"
    uses: ClassVar[tuple[str, ...]] = ("cancel", "partitions")

    microbatch: int = setting(
        0, "--microbatch", help="Guesses a run at most; 0: as many as cost hardly more than one row.", most=MAX_RUN,
        shown=True,
    )  # fmt: skip
    inflight: int = setting(
        0, "--inflight", help="Runs in flight at most; 0: one more than there are stages.", most=MAX_RUNS, shown=True
    )
    width: int = setting(4, "--width", help="Guesses after each token at most.", least=1, most=MAX_WIDTH, shown=True)
    accept_cutoff: float = setting(
        0.02, "--accept-cutoff", "-pa", "--draft-p-min", "--spec-draft-p-min", most=1,
        help="Probability from which the draft's first guess counts.",
    )  # fmt: skip
    split_cutoff: float = setting(
        0.05, "--split-cutoff", "-ps", "--draft-p-split", "--spec-draft-p-split", most=1,
        help="The same for further guesses, which make branches.",
    )  # fmt: skip
    recovery: float = setting(
        0.0, "--recovery", "-pr", most=1, help="Added to -pa for every expansion, until a guess is accepted."
    )
    decay: float = setting(
        0.01, "--decay", "-pd", most=1, help="Taken off -pa for every expansion that finds no guess."
    )
    continuous: bool = setting(True, "--no-continuous", help="Ablation: one run of guesses in flight at a time.")
    asynchronous: bool = setting(True, "--no-async", help="Ablation: the draft works only while the pipeline is empty.")
    calibration: Calibration = field(default_factory=Calibration, compare=False, repr=False)
    _shift: float = field(default=0.0, init=False, repr=False, compare=False)
    _backoff: SpeculationBackoff = field(default_factory=SpeculationBackoff, init=False, repr=False, compare=False)

    def begin(self) -> PipeInfer:
        return replace(self)

    # -- sending

    def send(self, context: PolicyContext) -> Answer:
        root = context.tree.root
        if root.run_id is None:
            waits_for_draft = not self.asynchronous and not context.n_inflight and self.draft(context)
            return AwaitDraft(root) if waits_for_draft else Send([root])
        if context.n_inflight and (early := context.early()):
            return early
        if context.n_inflight >= self._n_inflight_max(context):
            return NOTHING
        return Send(context.fitting(self._unsent(context))[: self._n_rows(context)])

    def _n_inflight_max(self, context: PolicyContext) -> int:
        # the root's run and one of guesses
        return (self.inflight or context.n_stages + 1) if self.continuous else 2

    def _n_rows(self, context: PolicyContext) -> int:
        return self.microbatch or context.n_cheap_rows

    def _unsent(self, context: PolicyContext) -> list[Node]:
        """Guesses in reach, likeliest first; a child never comes before its parent."""
        return sorted(unsent_in_reach(context), key=SCORE, reverse=True)

    # -- drafting

    def draft(self, context: PolicyContext) -> dict[Node, int]:
        """The likeliest open nodes whose children could be in the next run."""
        n_rows = self._n_rows(context)
        if not n_rows or self._backoff.holds or (context.n_inflight and not self.asynchronous):
            return {}
        return dict.fromkeys(to_expand(context, n_rows), self.width)

    def keep(self, node: Node, guesses: list[Guess], draft: int = 0) -> list[Guess]:
        cutoff = max(0.0, self.accept_cutoff + self._shift)
        kept = [
            guess
            for rank, guess in enumerate(self.calibration.corrected(guesses, draft))
            if guess.probability >= (self.split_cutoff if rank else cutoff)
        ]
        self._shift += self.recovery if kept else -self.decay
        return kept

    def refine(self, context: PolicyContext, draft: int) -> dict[Node, int]:
        if self._backoff.holds or (context.n_inflight and not self.asynchronous):
            return {}
        return dict.fromkeys(to_refine(context, draft), self.width)

    def settled(self, settled: Settled, context: PolicyContext) -> str:
        if settled.n_matched:
            self._shift = 0.0
        self.calibration.settled(settled)
        return self._backoff.settled(settled, self.calibration.hit_rate)
