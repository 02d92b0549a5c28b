"""Timestamps (seconds) and counts of one request, from the engine's events. Computes no figure: see `figures`."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeinfer.core.requests import Observer
from pipeinfer.core.tree import Settled
from pipeinfer.observe.trace import Tracer

UNGUESSED_MIN = 32  # shorter texts get no notice that no guess was sent: guesses could have saved little


@dataclass
class RequestMetrics(Observer):
    """Callbacks: `on_prompt` gets the number of prompt rows that are evaluated, `on_running` whether the request
    starts or stops running, `on_notice` the notices of its policy. `has_draft`: there is a draft beside lookup."""

    tracer: Tracer | None = None
    on_prompt: Callable[[int], None] | None = None
    on_running: Callable[[bool], None] | None = None
    on_notice: Callable[[str], None] | None = None
    has_draft: bool = True
    submitted_s: float = math.nan
    begun_s: float = math.nan  # time of its first run
    is_running: bool = False  # a run was sent since the start or the last preemption
    n_prompt: int = 0
    n_kept: int = 0  # tokens of the prompt that were cached
    n_preempted: int = 0  # how often it lost its cells and waited again
    finished_s: float | None = None
    token_s: list[float] = field(default_factory=list)  # time of each emitted token
    accepted_lengths: Counter[int] = field(default_factory=Counter)  # tokens emitted at once -> how often
    n_runs: int = 0
    n_rows: int = 0
    n_root_runs: int = 0
    n_sent: int = 0  # guesses that went to the target
    n_branches: int = 0  # guesses sent beside another guess after the same token
    n_inflight_max: int = 0  # most runs in flight at a time
    n_cancelled: int = 0
    n_saved: int = 0  # cancelled runs that at least one stage did not evaluate
    n_drafted: int = 0
    n_refined: int = 0  # nodes that a larger draft refined
    n_judged: int = 0
    n_matched: int = 0
    n_sent_matched: int = 0  # accepted guesses that had gone to the target
    n_rounds: int = 0  # tokens whose position no run in flight covered: speculation restarted there
    turns_s: list[float] = field(default_factory=list)  # the slowest stage's time for each run after the prompt
    n_contested: int = 0  # tokens at whose position there was a guess
    by_depth: dict[int, list[int]] = field(default_factory=dict)  # depth -> [likeliest guesses judged, right ones]
    draft_s: float = 0.0
    n_draft_steps: int = 0
    n_draft_steps_inflight: int = 0  # those that began while a run was in flight
    n_draft_lost: int = 0  # steps dropped because a verdict made them useless
    notices: list[str] = field(default_factory=list)  # for the user

    def submitted(self, now_s: float, n_prompt: int) -> None:
        self.submitted_s, self.n_prompt = now_s, n_prompt

    def opened(self, n_kept: int) -> None:
        self.n_kept = min(n_kept, self.n_prompt)  # further ones are resumed output

    def preempted(self) -> None:
        self.n_preempted += 1
        self._set_running(False)

    def prompt_evaluated(self, n_rows: int) -> None:
        if self.on_prompt:
            self.on_prompt(n_rows)

    def run_sent(
        self, now_s: float, n_rows: int, n_nodes: int, has_root: bool, n_branches: int, n_inflight: int
    ) -> None:
        if not self.is_running:
            self.begun_s = now_s if math.isnan(self.begun_s) else self.begun_s
            self._set_running(True)
        self.n_runs += 1
        self.n_rows += n_rows
        self.n_root_runs += has_root
        self.n_sent += n_nodes - has_root
        self.n_branches += n_branches
        self.n_inflight_max = max(self.n_inflight_max, n_inflight)

    def _set_running(self, is_running: bool) -> None:
        if self.is_running != is_running:
            self.is_running = is_running
            if self.on_running:
                self.on_running(is_running)

    def run_cancelled(self) -> None:
        self.n_cancelled += 1

    def run_spared(self) -> None:
        self.n_saved += 1

    def run_answered(self, slowest_s: float) -> None:
        if self.token_s:
            self.turns_s.append(slowest_s)

    def draft_stepped(self, start_s: float, end_s: float, n_nodes: int, n_inflight: int, lost: bool) -> None:
        self.draft_s += end_s - start_s
        self.n_draft_steps += 1
        self.n_draft_steps_inflight += n_inflight > 0
        self.n_draft_lost += lost
        if self.tracer:
            self.tracer.drafted(start_s, n_nodes, finished=not lost)

    def grown(self, n_guesses: int) -> None:
        self.n_drafted += n_guesses

    def refined(self) -> None:
        self.n_refined += 1

    def settled(self, now_s: float, n_tokens: int, settled: Settled) -> None:
        self.token_s += [now_s] * n_tokens
        self.accepted_lengths[n_tokens] += 1
        self.n_judged += settled.n_judged
        self.n_matched += settled.n_matched
        self.n_contested += settled.n_contested
        self.n_sent_matched += settled.n_matched_of_sent
        self.n_rounds += settled.path[-1].run_id is None
        for node, right in settled.firsts:
            counts = self.by_depth.setdefault(node.depth, [0, 0])
            counts[0] += 1
            counts[1] += right
        if self.tracer:
            self.tracer.settled(n_tokens)

    def noticed(self, notice: str) -> None:
        self.notices.append(notice)
        if self.on_notice:
            self.on_notice(notice)

    def finished(self, now_s: float) -> None:
        self.finished_s = now_s
        if notice := why_no_guess(self):
            self.notices.append(notice)  # not passed on: it is about this text alone


def why_no_guess(metrics: RequestMetrics) -> str:
    """A notice if a draft worked and none of its guesses was sent to the target; else empty."""
    n = len(metrics.token_s)
    if metrics.n_sent or not metrics.has_draft or not metrics.n_draft_steps or n < UNGUESSED_MIN:
        return ""
    prefix = "no guess was ever sent to the target: "
    if metrics.n_draft_steps > metrics.n_draft_lost and not metrics.n_drafted:
        return prefix + "the draft was never sure enough of one; lower -pa, or take another draft"
    step_ms = 1e3 * metrics.draft_s / metrics.n_draft_steps
    token_ms = 1e3 * (metrics.token_s[-1] - metrics.token_s[0]) / (n - 1)
    if step_ms < token_ms and 2 * metrics.n_draft_lost < metrics.n_draft_steps:
        return prefix + "whenever there was one, as many runs were in flight as the policy allows; start more ranks"
    return (
        f"{prefix}the target answers in {token_ms:.2g} ms, before the draft is done (steps of {step_ms:.2g} ms, "
        f"{metrics.n_draft_lost} of {metrics.n_draft_steps} given up); take a smaller draft, or none"
    )
