"""Asynchronous pipelined speculation (PipeInfer, sections IV-A and IV-B). The newest token is sent at once; guesses
follow in micro-batches while it is in flight. Guesses that survive a verdict stay in the tree and in the pipeline, and
are never drafted or sent twice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from pipeinfer.core.policy import N_ROWS, NOTHING, Answer, AwaitDraft, PaperPolicy, PolicyView, Send
from pipeinfer.core.runs import Guess
from pipeinfer.core.settings import MAX_RUN, MAX_RUNS, MAX_WIDTH, P_MIN, P_SPLIT, setting
from pipeinfer.core.tree import Node, Settled
from pipeinfer.policies.learning import Calibration, PauseNotices, SpeculationBackoff
from pipeinfer.policies.likeliest import SCORE, to_expand, to_refine, unsent_in_reach

MICROBATCH_HELP = "Guesses a run at most; 0: as many as cost hardly more than one row."
INFLIGHT_HELP = "Runs in flight at most; 0: one more than there are stages."
RECOVERY_HELP = "Added to -pa and -ps for each run of guesses after a verdict."


@dataclass(unsafe_hash=True)  # by its settings, which stay as they are
class PipeInfer(PaperPolicy):
    """Cutoffs are probabilities under the draft: the likeliest guess after a node counts from `accept_cutoff` on, a
    further one (up to `width` in all) from `split_cutoff` on. Reactive speculation (section IV-B.2): each micro-batch
    raises both cutoffs by `recovery` until the next verdict, each draft step that finds no guess lowers them by `decay`
    until a guess is accepted. A node is drafted once: guesses below a raised cutoff stay in the tree and count when it
    falls.

    Not the paper's, and off in its preset: `pacing` holds a run back until a stage is about to want it; `best_first`
    fills runs with the likeliest guesses of the whole tree, where the paper drafts micro-batches after each other, each
    from the end of the one before; `calibrated` corrects probabilities by experience, which requests of one session
    share; `backoff` stops guessing for a while when hardly any guess is right; `pruning` leaves dead rows out of runs
    in flight, where the paper cancels whole runs; `early` guesses while the target reads the prompt. Larger drafts are
    asked first about the likeliest nodes after which nothing was sent."""

    name: ClassVar[str] = "pipeinfer"
    uses: ClassVar[tuple[str, ...]] = ("cancel", "partitions")

    microbatch: int = setting(0, "--microbatch", help=MICROBATCH_HELP, most=MAX_RUN, shown=True, paper=4)
    inflight: int = setting(0, "--inflight", help=INFLIGHT_HELP, most=MAX_RUNS, shown=True, paper=MAX_RUNS)
    width: int = setting(
        4, "--width", help="Guesses after each token at most.", least=1, most=MAX_WIDTH, shown=True, paper=3
    )
    accept_cutoff: float = setting(
        0.02, *P_MIN, most=1, paper=0.001, help="Probability from which the draft's first guess counts."
    )
    split_cutoff: float = setting(
        0.05, *P_SPLIT, most=1, paper=0.8, help="The same for further guesses, which make branches."
    )
    recovery: float = setting(0.0, "--recovery", "-pr", most=1, paper=0.4, help=RECOVERY_HELP)
    decay: float = setting(
        0.01, "--decay", "-pd", most=1, help="Taken off -pa and -ps for every draft step that finds no guess."
    )
    pacing: bool = setting(True, "--no-pacing", paper=False, help="Ablation: runs go at once, and wait in queues.")
    best_first: bool = setting(
        True, "--no-best-first", paper=False, help="Ablation: micro-batches continue each other, whatever is likelier."
    )
    calibrated: bool = setting(True, "--no-calibration", paper=False, help="Ablation: the draft is taken at its word.")
    backoff: bool = setting(True, "--no-backoff", paper=False, help="Ablation: guesses go on when hardly any is right.")
    pruning: bool = setting(True, "--no-pruning", paper=False, help="Ablation: runs in flight keep dead rows.")
    early: bool = setting(True, "--no-early", paper=False, help="Ablation: no guesses while a prompt is read.")
    continuous: bool = setting(True, "--no-continuous", help="Ablation: one run of guesses in flight at a time.")
    asynchronous: bool = setting(True, "--no-async", help="Ablation: the draft works only while the pipeline is empty.")
    calibration: Calibration = field(default_factory=Calibration, compare=False, repr=False)
    notices: PauseNotices = field(default_factory=PauseNotices, compare=False, repr=False)
    _backoff: SpeculationBackoff = field(init=False, repr=False, compare=False)
    _newest_run: int = field(default=0, init=False, repr=False, compare=False)  # of those sent before the last verdict
    _n_failed: int = field(default=0, init=False, repr=False, compare=False)  # failed draft steps since the last hit
    _raised: float = field(default=0.0, init=False, repr=False, compare=False)  # the cutoffs are, in a draft step
    _guesses: bool = field(default=True, init=False, repr=False, compare=False)  # that step does

    def __post_init__(self) -> None:
        self._backoff = SpeculationBackoff(self.notices)

    def begin(self) -> "PipeInfer":
        return replace(self)

    @property
    def n_rows(self) -> int:
        return max(N_ROWS, self.microbatch)

    @property
    def prunes(self) -> bool:
        return self.pruning

    # -- sending

    def send(self, context: PolicyView) -> Answer:
        root = context.tree.root
        if root.run_id is None:
            waits_for_draft = not self.asynchronous and not context.n_inflight and self.draft(context)
            return AwaitDraft(root) if waits_for_draft else Send([root])
        if self.pacing and context.n_inflight and (early := context.early()):
            return early
        # the root's run and one of guesses
        n_most = (self.inflight or context.n_stages + 1) if self.continuous else 2
        if context.n_inflight >= n_most:
            return NOTHING
        if self.best_first:
            return Send(context.fitting(self._unsent(context))[: self._n_rows(context)])
        batch = self._microbatch(context)
        return NOTHING if self._open(context, batch) else Send(context.fitting(batch[1:]))

    def _n_rows(self, context: PolicyView) -> int:
        return self.microbatch or context.n_cheap_rows

    def _unsent(self, context: PolicyView) -> list[Node]:
        """Guesses in reach that count, likeliest first; a child never comes before its parent."""
        raised, guesses = self._shift(context), dict[Node, None]()
        for node in unsent_in_reach(context):
            is_joined = node.parent in guesses or (node.parent and node.parent.run_id is not None)
            if raised <= 0 or (is_joined and self._counts(node, raised)):
                guesses[node] = None
        return sorted(guesses, key=SCORE, reverse=True)

    # -- micro-batches (section IV-B.1)

    def _microbatch(self, context: PolicyView) -> list[Node]:
        """The newest sent guess, the first of its siblings, and the guesses drafted from it, layer by layer."""
        tip, raised, n_rows = context.tree.root, self._shift(context), self._n_rows(context)
        while tip.children and tip.children[0].run_id is not None:
            tip = tip.children[0]
        batch, layer = [tip], [tip]
        while layer and len(batch) <= n_rows:
            children = [child for node in layer for child in node.children if child.run_id is None]
            layer = [child for child in context.in_reach(children) if self._counts(child, raised)]
            batch += layer
        return batch[: 1 + n_rows]

    def _open(self, context: PolicyView, batch: Sequence[Node]) -> list[Node]:
        """The nodes of an unfinished micro-batch that the draft expands next; none once it is finished."""
        if len(batch) > self._n_rows(context) or self.accept_cutoff + self._shift(context) >= 1:
            return []
        return [node for node in batch if not node.expanded and context.may_branch(node)]

    # -- reactive speculation (section IV-B.2)

    def _shift(self, context: PolicyView) -> float:
        """By how much both cutoffs are raised now."""
        raised = 0.0
        if self.recovery:
            runs = {node.run_id for node in context.tree.nodes[1:] if (node.run_id or 0) > self._newest_run}
            raised = self.recovery * len(runs)
        return raised - self.decay * self._n_failed

    def _counts(self, node: Node, raised: float) -> bool:
        assert node.parent
        cutoff = self.accept_cutoff if node is node.parent.children[0] else self.split_cutoff
        return math.exp(node.log_prob) >= cutoff + raised

    def keep(self, node: Node, guesses: list[Guess], draft: int = 0) -> list[Guess]:
        if not self._guesses:
            return []
        lowered = min(0.0, self._raised)
        first = self.accept_cutoff + lowered if self.best_first else 0.0  # micro-batches look at the cutoff later
        chosen = [
            guess
            for rank, guess in enumerate(self.calibration.corrected(guesses, draft) if self.calibrated else guesses)
            if guess.probability >= max(0.0, self.split_cutoff + lowered if rank else first)
        ]
        begins_run = self.best_first or node.run_id is not None
        self._n_failed += begins_run and (not chosen or chosen[0].probability < self.accept_cutoff + self._raised)
        return chosen

    # -- drafting

    def draft(self, context: PolicyView) -> dict[Node, int]:
        """The nodes whose children could be in the next run: the likeliest, or those of the micro-batch."""
        n_rows = self._n_rows(context)
        if not n_rows or self._backoff.holds or (context.n_inflight and not self.asynchronous):
            return {}
        self._raised, self._guesses = self._shift(context), self.early or context.request.n_generated > 0
        best = to_expand(context, n_rows) if self.best_first else self._open(context, self._microbatch(context))
        return dict.fromkeys(best, self.width)

    def refine(self, context: PolicyView, draft: int) -> dict[Node, int]:
        if self._backoff.holds or (context.n_inflight and not self.asynchronous):
            return {}
        return dict.fromkeys(to_refine(context, draft), self.width)

    def settled(self, settled: Settled, context: PolicyView) -> str:
        if settled.n_matched:
            self._n_failed = 0
        self._newest_run = max((node.run_id or 0) for node in context.tree.nodes)
        self.calibration.settled(settled)
        return self._backoff.settled(settled, self.calibration.hit_rate) if self.backoff else ""
