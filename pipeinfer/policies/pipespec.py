"""A hierarchy of models, each verifying what the one below it produces (PipeSpec, McDanel et al. 2025, algorithm 1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pipeinfer.core.policy import N_ROWS, Answer, AwaitDraft, PaperPolicy, PolicyView, Send
from pipeinfer.core.settings import MAX_RUN, setting
from pipeinfer.core.tree import Node

SYNCHRONOUS_WINDOW = 8  # tokens a draft makes before it waits, in the paper's baseline (section 4.4)
LOOKAHEAD_HELP = (
    f"Tokens that each model waits for before it verifies them; 0: none, with --no-async {SYNCHRONOUS_WINDOW}."
)


@dataclass(unsafe_hash=True)  # by its settings, which stay as they are
class PipeSpec(PaperPolicy):
    """Models M_0 … M_K: M_0 is the smallest draft, M_K the target. No branches: one guess follows each token.

    Algorithm 1, line by line: `_next` has lines 5 to 11. Line 12 is the run of a batch. Lines 13 and 14 are the core's,
    which compares tokens and makes what matches the chain of first children. So are lines 15 and 16: the token that a
    model chose instead becomes the first child, and no message is needed.

    `lookahead`: tokens that M_i waits for before it verifies them (section 4.4), unless M_0 … M_(i-1) cannot make more.
    Without `asynchronous` (table 1) a model that has made so many waits until they are verified."""

    name: ClassVar[str] = "pipespec"
    uses: ClassVar[tuple[str, ...]] = ("cancel",)

    lookahead: int = setting(0, "--lookahead", most=MAX_RUN, help=LOOKAHEAD_HELP)
    asynchronous: bool = setting(True, "--no-async", help="Ablation: the draft works only while the pipeline is empty.")

    @property
    def n_rows(self) -> int:
        return max(N_ROWS, 1 + self.lookahead)

    def draft(self, context: PolicyView) -> dict[Node, int]:
        """Line 9: M_0 generates the next token."""
        return dict.fromkeys(self._next(context)[0], 1)

    def refine(self, context: PolicyView, draft: int) -> dict[Node, int]:
        """Line 12: M_`draft` generates its predictions."""
        return dict.fromkeys(self._next(context)[draft], 1)

    def send(self, context: PolicyView) -> Answer:
        """Line 12: so does M_K."""
        batch = self._next(context)[-1]
        return Send(batch) if batch or context.n_inflight else AwaitDraft(context.tree.root)

    def _next(self, context: PolicyView) -> list[list[Node]]:
        """What each model takes up now; nothing if it works or waits."""
        batches, smaller_go_on = list[list[Node]](), False
        outputs = [_rolled_back(context, model) for model in range(context.n_drafts + 1)]  # lines 6 and 7
        for model in range(context.n_drafts + 1):  # line 5
            # line 9: M_0's newest token, after which it generates the next; line 11
            batch = list(outputs[0][-1:]) if model == 0 else _draft_tokens(outputs, model)
            works = _works(context, model)
            awaits_tokens = len(batch) <= self._window and smaller_go_on
            takes = not (works or awaits_tokens or self._rests(context, outputs, model))
            batches.append(_askable(context, batch, model) if takes else [])
            smaller_go_on |= works or bool(batches[model])
        return batches

    @property
    def _window(self) -> int:
        return self.lookahead or (0 if self.asynchronous else SYNCHRONOUS_WINDOW)

    def _rests(self, context: PolicyView, outputs: Sequence[Sequence[Node]], model: int) -> bool:
        """Whether M_`model` waits for a larger one, as synchronous models do."""
        if self.asynchronous or model == context.n_drafts:
            return False
        larger = range(model + 1, context.n_drafts + 1)
        return any(_works(context, each) for each in larger) or len(_draft_tokens(outputs, model + 1)) > self._window


def _rolled_back(context: PolicyView, model: int) -> list[Node]:
    """Line 7: O_`model` up to the last token of the larger models that it goes with: from the root along the chain of
    first children, which larger models reorder, to the first token after which M_`model` has not chosen one."""
    output, n_left = [context.tree.root], context.depth_left
    if model == context.n_drafts:
        return output
    while len(output) < n_left and output[-1].children and _has_chosen(output[-1], model):
        output.append(output[-1].children[0])
    return output


def _draft_tokens(outputs: Sequence[Sequence[Node]], model: int) -> list[Node]:
    """Line 11: M_`model`'s newest token, and what M_(model - 1) has appended after it."""
    return list(outputs[model - 1][len(outputs[model]) - 1 :])


def _works(context: PolicyView, model: int) -> bool:
    """Whether M_`model` has a batch in flight; the smallest never has."""
    return model > 0 and (context.n_inflight_at(model) if model < context.n_drafts else context.n_inflight) > 0


def _askable(context: PolicyView, batch: list[Node], model: int) -> list[Node]:
    """Without tokens after which a draft has chosen one, has no room for one, or needs none."""
    if model == context.n_drafts:
        return batch
    askable = (node for node in batch if context.may_branch(node) and node.passed_over < max(model, 1))
    return [node for node in askable if not _has_chosen(node, model)]


def _has_chosen(node: Node, model: int) -> bool:
    """Whether M_`model`, a draft, has chosen what follows the token."""
    return node.expanded and node.refined >= model
