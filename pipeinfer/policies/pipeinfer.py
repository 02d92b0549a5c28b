"""Asynchronous pipelined speculation (PipeInfer, sections IV-A and IV-B).

The newest token goes out at once; guesses follow in micro-batches while it is in flight. Guesses that survive a
verdict stay in the tree and in the pipeline: they are never drafted or sent twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from operator import attrgetter

from pipeinfer.policies.base import View
from pipeinfer.runs import Guess
from pipeinfer.tree import Node, Settled

SCORE = attrgetter("score")
HIT_MEMORY = 16
"""Verdicts over which the share of right guesses is averaged."""

PAUSE_BELOW, RESUME_ABOVE = 0.06, 0.15
LONGEST_PAUSE = 64

LEARNING_RATE, LARGEST_BIAS = 0.2, 4.0
"""Of the correction of the draft's confidence, in log-odds."""


@dataclass
class PipeInfer:
    """`microbatch`: guesses a run at most (0: as many as are cheap). `inflight`: runs in flight at most (0: one more
    than there are stages).

    Cutoffs are probabilities under the draft: the likeliest guess after a node enters the tree from `accept_cutoff` on,
    a further one (up to `width` in all) from `split_cutoff` on. Reactive speculation (section IV-B.2): each expansion
    that finds a guess raises the accept cutoff by `recovery`, each that finds none lowers it by `decay`; an accepted
    guess resets it.

    The draft's confidence is corrected by experience before it is compared or multiplied along a path: an overly
    modest draft would have its chains yield to their siblings, an overly bold one would never branch. Every draft has
    a correction of its own.

    Larger drafts, if there are any, are asked first about the likeliest nodes of which nothing was sent that follows.

    When hardly any guess is right, only the root is sent, and guesses are tried again at growing intervals.

    For ablation studies (the paper's figure 8): without `continuous`, one run of guesses is in flight at a time;
    without `asynchronous`, the draft works only while the pipeline is empty.
    """

    microbatch: int = 0
    inflight: int = 0
    width: int = 4
    accept_cutoff: float = 0.02
    split_cutoff: float = 0.05
    recovery: float = 0.0
    decay: float = 0.01
    continuous: bool = True
    asynchronous: bool = True
    _shift: float = field(default=0.0, init=False)
    _hit_rate: float = field(default=0.5, init=False)
    _pause: int = field(default=0, init=False)  # roots between two tries; 0 while guesses pay
    _n_roots: int = field(default=0, init=False)
    # by draft: log-odds added to the confidence in the first guess
    _biases: dict[int, float] = field(default_factory=lambda: defaultdict(float), init=False)

    # -- sending

    def send(self, view: View) -> list[Node]:
        root = view.tree.root
        if root.run_id is None:
            waits_for_draft = not self.asynchronous and not view.n_inflight and self.draft(view)
            return [] if waits_for_draft else [root]
        if view.n_inflight >= self._n_inflight_max(view):
            return []
        return view.fitting(self._unsent(view))[: self._n_rows(view)]

    def _n_inflight_max(self, view: View) -> int:
        # the root's run and one of guesses
        return (self.inflight or view.n_stages + 1) if self.continuous else 2

    def _n_rows(self, view: View) -> int:
        return self.microbatch or view.n_cheap_rows

    def _unsent(self, view: View) -> list[Node]:
        """Guesses in reach, likeliest first; a child never comes before its parent."""
        root, end = view.tree.root, view.tree.root.position + view.depth_left
        guesses = [node for node in view.tree.unsent() if node.position < end and node is not root]
        return sorted(guesses, key=SCORE, reverse=True)

    # -- drafting

    def draft(self, view: View) -> list[Node]:
        """The likeliest open nodes, if their children could belong into the next run."""
        n_rows = self._n_rows(view)
        if not n_rows or self._resting or (view.n_inflight and not self.asynchronous):
            return []
        ready = self._unsent(view)
        worst = ready[n_rows - 1].score if len(ready) >= n_rows else float("-inf")
        # children score no higher than their parent
        open_nodes = [
            node for node in view.tree.nodes if not node.expanded and node.score > worst and view.may_branch(node)
        ]
        return sorted(open_nodes, key=SCORE, reverse=True)[:n_rows]

    def keep(self, node: Node, guesses: list[Guess], draft: int = 0) -> list[Guess]:
        cutoff = max(0.0, self.accept_cutoff + self._shift)
        kept = [
            guess
            for rank, guess in enumerate(self._corrected(guesses, self._biases[draft]))
            if guess.probability >= (self.split_cutoff if rank else cutoff)
        ]
        self._shift += self.recovery if kept else -self.decay
        return kept

    @staticmethod
    def _corrected(guesses: list[Guess], bias: float) -> list[Guess]:
        """The first guess's probability moved by the bias in log-odds, the others scaled to what that leaves."""
        if not guesses:
            return guesses
        first = min(max(guesses[0].probability, 1e-6), 1 - 1e-6)
        moved = 1 / (1 + (1 - first) / first * math.exp(-bias))
        rest = (1 - moved) / (1 - first)
        return [Guess(guesses[0].token, moved), *(Guess(g.token, g.probability * rest) for g in guesses[1:])]

    def refine(self, view: View, draft: int) -> list[Node]:
        """The likeliest nodes, those first after which nothing was sent: there its guesses come in time."""
        if self._resting or (view.n_inflight and not self.asynchronous):
            return []
        open_nodes = [node for node in view.tree.nodes if node.is_open(draft) and view.may_branch(node)]
        return sorted(open_nodes, key=lambda node: (any(child.run_id for child in node.children), -node.score))

    # -- learning

    @property
    def _resting(self) -> bool:
        return self._pause > 0 and self._n_roots % self._pause > 0

    def settled(self, settled: Settled) -> str:
        if settled.n_matched:
            self._shift = 0.0
        self._n_roots += len(settled.path) - 1
        for node, right in settled.firsts:
            bias = self._biases[node.guessed_by] + LEARNING_RATE * (right - math.exp(node.log_prob))
            self._biases[node.guessed_by] = min(max(bias, -LARGEST_BIAS), LARGEST_BIAS)
        for index in range(settled.n_contested):
            self._hit_rate += (float(index < settled.n_matched) - self._hit_rate) / HIT_MEMORY
        return self._pause_or_resume(settled.n_contested > 0, settled.n_matched > 0)

    def _pause_or_resume(self, contested: bool, matched: bool) -> str:
        if not self._pause and self._hit_rate < PAUSE_BELOW:
            self._pause = 4
            return "hardly any guess of the draft is right: only single tokens are sent, guesses are tried now and then"
        if self._pause and self._hit_rate > RESUME_ABOVE:
            self._pause = 0
            return "the draft's guesses are right again: speculation goes on"
        if self._pause and contested:
            self._pause = 4 if matched else min(2 * self._pause, LONGEST_PAUSE)
        return ""
