"""One chain in flight, and while it is verified the next chain for each likely outcome (speculative speculative
decoding, Kumar, Dao and May 2026, arXiv:2603.03251)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pipeinfer.core.policy import N_ROWS, NOTHING, Answer, AwaitDraft, PaperPolicy, PolicyView, Send
from pipeinfer.core.settings import MAX_RUN, MAX_WIDTH, N_DRAFT, setting
from pipeinfer.core.tree import Node
from pipeinfer.policies.likeliest import SCORE

DRAFT, NONE = "draft", "none"
BACKUP_HELP = "After an unforeseen outcome: the draft makes the chain first, or the token goes without guesses."


@dataclass(unsafe_hash=True)  # by its settings, which stay as they are
class Ssd(PaperPolicy):
    """A round verifies the root and a chain of `n_draft` guesses (the paper's K). Its outcome is how many of them are
    right and which token follows (the bonus token), so an outcome is an unsent child of a sent node: a sibling of a
    guess, or a child of the last one. The tree is the speculation cache: while the round is verified, the draft makes
    a chain after each of `fan_out` (F) outcomes a row, all in one batch. The outcome becomes the root; its chain is the
    next round. Otherwise, or if its chain is not finished, `backup` says what is sent.

    Not the paper's, and off in its preset: `ranked` spends the same number of outcomes on those of the highest
    probability under the draft. Its preset has F outcomes after each row, the settings published with its code, not the
    geometric fan-out, which needs an acceptance rate in advance. What stays different: the target's noise is keyed by
    position, so there is no residual distribution and none of the paper's sampling, which shapes that; the backup is
    an option here, where the paper chooses it by the number of requests, and its fast one makes guesses at random; and
    the target is a pipeline, of which only one stage works at a time. Larger drafts are not asked."""

    name: ClassVar[str] = "ssd"

    n_draft: int = setting(4, *N_DRAFT, help="Guesses a chain.", least=1, most=MAX_RUN, shown=True, paper=7)
    fan_out: int = setting(
        3, "--fan-out", help="Outcomes prepared for each row.", least=1, most=MAX_WIDTH, shown=True, paper=3
    )
    backup: str = setting(DRAFT, "--backup", choices=(DRAFT, NONE), help=BACKUP_HELP)
    ranked: bool = setting(True, "--no-ranked", paper=False, help="Ablation: as many outcomes for each row.")

    @property
    def n_rows(self) -> int:
        return max(N_ROWS, 1 + self._n_outcomes)

    @property
    def _n_outcomes(self) -> int:
        return min(MAX_RUN, self.fan_out * (1 + self.n_draft))

    @property
    def _width(self) -> int:
        """Guesses after a token: one that goes on with the chain, and its siblings."""
        return min(MAX_WIDTH, 1 + self.fan_out * (2 if self.ranked else 1))

    def send(self, context: PolicyView) -> Answer:
        root = context.tree.root
        if root.run_id is not None or context.n_inflight:
            return NOTHING
        if self.backup == DRAFT and self.draft(context):
            return AwaitDraft(root)
        return Send(context.fitting(self._chain(root)) or [root])

    def draft(self, context: PolicyView) -> dict[Node, int]:
        """The ends of the unfinished chains: of the root's until it is sent, and then of those after the outcomes."""
        root = context.tree.root
        if root.run_id is None:
            starts = [root]
        else:
            sent = list(_sent(root))
            starts = self._outcomes(sent)
            if not sent[-1].expanded and context.may_branch(sent[-1]):
                return {sent[-1]: self._width}
        chains = (self._chain(start) for start in starts)
        ends = (chain[-1] for chain in chains if len(chain) <= self.n_draft)
        return {end: self._width for end in ends if not end.expanded and context.may_branch(end)}

    def _chain(self, start: Node) -> list[Node]:
        """The start, and at most `n_draft` first children after it."""
        chain = [start]
        while len(chain) <= self.n_draft and chain[-1].children:
            chain.append(chain[-1].children[0])
        return chain

    def _outcomes(self, sent: list[Node]) -> list[Node]:
        """Unsent children of the sent nodes, as many as are prepared."""
        rows = [[child for child in node.children if child.run_id is None] for node in sent]
        if not self.ranked:
            return [child for row in rows for child in row[: self.fan_out]][: self._n_outcomes]
        return sorted((child for row in rows for child in row), key=SCORE, reverse=True)[: self._n_outcomes]


def _sent(root: Node) -> Iterator[Node]:
    """The sent root and the sent guesses after it."""
    node: Node | None = root
    while node is not None:
        yield node
        node = next((child for child in node.children if child.run_id is not None), None)
