"""The events of one request, as the engine reports them. Keeps nothing: metrics and timelines override it."""

from pipeinfer.core.tree import Settled


class Observer:
    """Ignores all events. Times are seconds on the engine's clock."""

    def submitted(self, now_s: float, n_prompt: int) -> None:
        """The engine has the request; it may wait for room."""

    def opened(self, n_kept: int) -> None:
        """The request has room. `n_kept`: tokens of its prompt that are cached."""

    def preempted(self) -> None:
        """Others need its cells: the request waits again, and goes on from what it has emitted."""

    def prompt_evaluated(self, n_rows: int) -> None:
        """Every stage has evaluated the first `n_rows` of its prompt."""

    def run_sent(
        self, now_s: float, n_rows: int, n_nodes: int, has_root: bool, n_branches: int, n_inflight: int
    ) -> None:
        """The first run ends the wait for room, also after a preemption. `n_nodes`: root and guesses among the rows.
        `n_inflight`: runs in flight that are not dead, this one included."""

    def run_cancelled(self) -> None:
        """A run is dead, and the stages were told."""

    def run_answered(self, slowest_s: float) -> None:
        """The verdict of a run has come; its slowest stage took `slowest_s` for it."""

    def run_spared(self) -> None:
        """At least one stage did not evaluate a cancelled run."""

    def draft_stepped(self, start_s: float, end_s: float, n_nodes: int, n_inflight: int, lost: bool) -> None:
        """`n_inflight`: runs in flight when the step began. `lost`: it was interrupted, its nodes are dead."""

    def grown(self, n_guesses: int) -> None:
        """The tree got `n_guesses` new nodes."""

    def refined(self) -> None:
        """A larger draft has refined a node."""

    def settled(self, now_s: float, n_tokens: int, settled: Settled) -> None:
        """`n_tokens` of the settled tokens were emitted."""

    def noticed(self, notice: str) -> None:
        """A notice for the user."""

    def finished(self, now_s: float) -> None:
        """The request has ended."""
