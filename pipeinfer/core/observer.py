"""What the engine tells of one request as it happens. Keeps nothing: figures and timelines override it."""

from __future__ import annotations

from pipeinfer.core.tree import Settled


class Observer:
    """Hears what becomes of a request; this one does not care. Times are seconds on the engine's clock."""

    def submitted(self, now_s: float, n_prompt: int) -> None:
        """The engine has taken it in; it may still wait for room."""

    def opened(self, n_kept: int) -> None:
        """There is room for it, if not yet for a run. `n_kept`: tokens of its prompt that need not be evaluated."""

    def preempted(self) -> None:
        """Others need its cells: it waits again, and goes on from what it has emitted."""

    def prompt_evaluated(self, n_rows: int) -> None:
        """So many rows of its prompt, from the first on, have been evaluated by every stage."""

    def run_sent(
        self, now_s: float, n_rows: int, n_nodes: int, has_root: bool, n_branches: int, n_inflight: int
    ) -> None:
        """The first one ends its wait, as the first one after it was preempted does. `n_nodes`: the root and guesses
        among the rows. `n_inflight`: runs in flight with it, if not cancelled."""

    def run_cancelled(self) -> None:
        """No row of a run can count any more, and the stages were told."""

    def run_spared(self) -> None:
        """A cancelled run came back that at least one stage did not evaluate."""

    def draft_stepped(self, start_s: float, end_s: float, n_nodes: int, n_inflight: int, lost: bool) -> None:
        """`n_inflight`: runs in flight when the step began. `lost`: given up, the target had decided otherwise."""

    def grown(self, n_guesses: int) -> None:
        """So many guesses were added to the tree."""

    def refined(self) -> None:
        """A larger draft has said what follows a node."""

    def settled(self, now_s: float, n_tokens: int, settled: Settled) -> None:
        """`n_tokens` of what was settled were emitted."""

    def noticed(self, notice: str) -> None:
        """Something that the user should know."""

    def finished(self, now_s: float) -> None:
        """Nothing more comes."""
