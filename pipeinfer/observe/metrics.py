"""Timestamps and counts of one request -> speeds, latencies, acceptance. Wall clock, seconds; knows no clock itself."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from pipeinfer.core.observer import Observer
from pipeinfer.core.tree import Settled
from pipeinfer.observe.trace import Tracer

UNGUESSED_MIN = 32
"""Of shorter texts it is not said that they went without a guess, which could have saved little."""


@dataclass
class RequestMetrics(Observer):
    """Counts events of a request. `on_prompt`: called with rows of its prompt; `on_turn`: when it starts or stops
    running; `on_notice`: with what its policy says. `has_draft`: guesses are not only looked up."""

    tracer: Tracer | None = None
    on_prompt: Callable[[int], None] | None = None
    on_turn: Callable[[bool], None] | None = None
    on_notice: Callable[[str], None] | None = None
    has_draft: bool = True
    submitted_s: float = math.nan
    begun_s: float = math.nan  # when its first run was sent
    is_running: bool = False  # a run was sent, since it was preempted if it was
    n_prompt: int = 0
    n_kept: int = 0  # of the prompt, what another request had evaluated
    n_preempted: int = 0  # how often others needed its cells, so that it waited again
    finished_s: float | None = None
    token_s: list[float] = field(default_factory=list)  # when each token was emitted
    accepted_lengths: Counter[int] = field(default_factory=Counter)  # tokens emitted at once -> how often
    n_runs: int = 0
    n_rows: int = 0
    n_root_runs: int = 0
    n_sent: int = 0  # guesses that went to the target
    n_branches: int = 0  # guesses sent beside another one after the same token
    n_inflight_max: int = 0  # most runs in flight at a time
    n_cancelled: int = 0
    n_saved: int = 0  # cancelled runs that at least one stage did not evaluate
    n_drafted: int = 0
    n_refined: int = 0  # nodes of which a larger draft said what follows
    n_judged: int = 0
    n_matched: int = 0
    n_sent_matched: int = 0  # accepted guesses that had gone to the target
    n_rounds: int = 0  # tokens whose place no run in flight stood for: speculation began anew after them
    turns_s: list[float] = field(default_factory=list)  # of runs after the prompt, the slowest stage's time
    n_contested: int = 0  # tokens in whose place at least one guess stood
    by_depth: dict[int, list[int]] = field(default_factory=dict)  # depth -> [likeliest guesses judged, right ones]
    draft_s: float = 0.0
    n_draft_steps: int = 0
    n_draft_steps_inflight: int = 0  # those that began while a run was in flight
    n_draft_lost: int = 0  # steps given up because the target had decided otherwise meanwhile
    notices: list[str] = field(default_factory=list)  # what the policy wants the user to know

    def submitted(self, now_s: float, n_prompt: int) -> None:
        self.submitted_s, self.n_prompt = now_s, n_prompt

    def opened(self, n_kept: int) -> None:
        self.n_kept = min(n_kept, self.n_prompt)  # the rest is of an output that was begun

    def preempted(self) -> None:
        self.n_preempted += 1
        self._turn(False)

    def prompt_evaluated(self, n_rows: int) -> None:
        if self.on_prompt:
            self.on_prompt(n_rows)

    def run_sent(
        self, now_s: float, n_rows: int, n_nodes: int, has_root: bool, n_branches: int, n_inflight: int
    ) -> None:
        if not self.is_running:
            self.begun_s = now_s if math.isnan(self.begun_s) else self.begun_s
            self._turn(True)
        self.n_runs += 1
        self.n_rows += n_rows
        self.n_root_runs += has_root
        self.n_sent += n_nodes - has_root
        self.n_branches += n_branches
        self.n_inflight_max = max(self.n_inflight_max, n_inflight)

    def _turn(self, is_running: bool) -> None:
        if self.is_running != is_running:
            self.is_running = is_running
            if self.on_turn:
                self.on_turn(is_running)

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
            self.notices.append(notice)  # of this text alone: others may have taken the room for its guesses

    @property
    def itl_s(self) -> list[float]:
        """Gaps between tokens, one for each token after the first. Tokens of one verdict share the gap before it."""
        found, before_s = list[float](), math.nan
        for now_s, tokens in groupby(self.token_s):
            n = len(list(tokens))
            found += [0.0] * (n - 1) if math.isnan(before_s) else [(now_s - before_s) / n] * n
            before_s = now_s
        return found

    @property
    def ttft_s(self) -> float:
        """Time to first token, from submission."""
        return self.token_s[0] - self.submitted_s if self.token_s else float("nan")

    @property
    def ttft_after_prompt_s(self) -> float:
        """From the token that the prompt's evaluation gives to the next one (PipeInfer, section V-A)."""
        after_s = (at_s for at_s in self.token_s if at_s > self.token_s[0])
        return next(after_s, math.nan) - self.token_s[0] if self.token_s else math.nan

    @property
    def top1_rate(self) -> float:
        """Tokens that the draft's likeliest guess named / tokens in whose place a guess stood."""
        return sum(right for _, right in self.by_depth.values()) / self.n_contested if self.n_contested else math.nan

    @property
    def sent_acceptance(self) -> float:
        """Accepted guesses / guesses that went to the target, cancelled ones too: the papers' acceptance rate."""
        return self.n_sent_matched / self.n_sent if self.n_sent else math.nan

    @property
    def tokens_per_turn(self) -> float:
        """FlowSpec's ALT: tokens / turns of the pipeline, each as long as the slowest stage takes for a run."""
        if not self.turns_s or self.token_s[-1] == self.token_s[0]:
            return math.nan
        return (len(self.token_s) - 1) / (self.token_s[-1] - self.token_s[0]) * float(np.mean(self.turns_s))

    @property
    def acceptance_rate(self) -> float:
        """Accepted guesses / guesses that got their verdict."""
        return self.n_matched / self.n_judged if self.n_judged else float("nan")

    @property
    def hit_rate(self) -> float:
        """Tokens that had been guessed / tokens in whose place a guess stood, however many."""
        return self.n_matched / self.n_contested if self.n_contested else float("nan")


def why_no_guess(metrics: RequestMetrics) -> str:
    """What the user should know of a draft that worked and of which no guess was sent to the target; else empty."""
    n = len(metrics.token_s)
    if metrics.n_sent or not metrics.has_draft or not metrics.n_draft_steps or n < UNGUESSED_MIN:
        return ""
    said = "no guess was ever sent to the target: "
    if metrics.n_draft_steps > metrics.n_draft_lost and not metrics.n_drafted:
        return said + "the draft was never sure enough of one; lower -pa, or take another draft"
    step_ms = 1e3 * metrics.draft_s / metrics.n_draft_steps
    token_ms = 1e3 * (metrics.token_s[-1] - metrics.token_s[0]) / (n - 1)
    if step_ms < token_ms and 2 * metrics.n_draft_lost < metrics.n_draft_steps:
        return said + "whenever there was one, as many runs were in flight as the policy allows; start more ranks"
    return (
        f"{said}the target answers in {token_ms:.2g} ms, before the draft is done (steps of {step_ms:.2g} ms, "
        f"{metrics.n_draft_lost} of {metrics.n_draft_steps} given up); take a smaller draft, or none"
    )


def percentiles(values: Sequence[float], ranks: Sequence[float] = (50, 95, 99)) -> list[float]:
    return [float(value) for value in np.percentile(values, ranks)] if values else [float("nan")] * len(ranks)


def timings(metrics: RequestMetrics) -> dict[str, Any]:
    """llama.cpp's server names, in milliseconds, then TTFT, TPOT (time per output token) and ITL in seconds."""
    n = len(metrics.token_s)
    p50, p95, p99 = percentiles(metrics.itl_s)
    return {
        **speeds(metrics),
        "itl_mean_s": float(np.mean(metrics.itl_s)) if n > 1 else float("nan"),
        "itl_p50_s": p50,
        "itl_p95_s": p95,
        "itl_p99_s": p99,
        "itl_percentiles_s": percentiles(metrics.itl_s, range(101)) if n > 1 else [],
    }


def speeds(metrics: RequestMetrics) -> dict[str, Any]:
    """The figures without percentiles. `prompt_n`: evaluated tokens of the prompt; `cache_n`: the others."""
    n, n_evaluated = len(metrics.token_s), metrics.n_prompt - metrics.n_kept
    generation_s = metrics.token_s[-1] - metrics.token_s[0] if n else float("nan")
    return {
        "prompt_n": n_evaluated,
        "cache_n": metrics.n_kept,
        "prompt_ms": 1e3 * metrics.ttft_s,
        "prompt_per_second": n_evaluated / metrics.ttft_s,
        "predicted_n": n,
        "predicted_ms": 1e3 * generation_s,
        "predicted_per_second": (n - 1) / generation_s if n > 1 and generation_s > 0 else float("nan"),
        "ttft_s": metrics.ttft_s,
        "ttft_after_prompt_s": metrics.ttft_after_prompt_s,
        "tpot_s": generation_s / (n - 1) if n > 1 else float("nan"),
        "total_s": (metrics.finished_s or float("nan")) - metrics.submitted_s,
    }


def service_timings(metrics: RequestMetrics) -> dict[str, Any]:
    """Timings in answers of a service, by llama.cpp's names. `prompt_ms` is without the time before the first run,
    `queued_s`; `contested_n` as in `speculation`."""
    queued_s = metrics.begun_s - metrics.submitted_s
    prompt_s = metrics.ttft_s - queued_s
    found = speeds(metrics)
    return {
        **found,
        "prompt_ms": 1e3 * prompt_s,
        "prompt_per_second": found["prompt_n"] / prompt_s if prompt_s > 0 else float("nan"),
        "prompt_per_token_ms": 1e3 * prompt_s / found["prompt_n"] if found["prompt_n"] else float("nan"),
        "predicted_per_token_ms": 1e3 * found["tpot_s"],
        "draft_n": metrics.n_judged,
        "draft_n_accepted": metrics.n_matched,
        "contested_n": metrics.n_contested,
        "preempted_n": metrics.n_preempted,
        "queued_s": queued_s,
    }


def speculation(metrics: RequestMetrics) -> dict[str, Any]:
    """What the draft was worth, as docs/reference/results-csv.md defines it. `contested_n`: tokens in whose place a
    guess stood.
    `by_depth`: how often the likeliest guess was right, by how many tokens ahead it was made."""
    n_settled = sum(metrics.accepted_lengths.values())
    return {
        "draft_n": metrics.n_drafted,
        "refined_n": metrics.n_refined,
        "draft_n_judged": metrics.n_judged,
        "draft_n_accepted": metrics.n_matched,
        "acceptance_rate": metrics.acceptance_rate,
        "sent_acceptance": metrics.sent_acceptance,
        "top1_rate": metrics.top1_rate,
        "contested_n": metrics.n_contested,
        "hit_rate": metrics.hit_rate,
        "by_depth": {str(depth): {"n": n, "right": right} for depth, (n, right) in sorted(metrics.by_depth.items())},
        "accepted_length": len(metrics.token_s) / n_settled if n_settled else float("nan"),
        "tokens_per_turn": metrics.tokens_per_turn,
        "tokens_per_round": len(metrics.token_s) / metrics.n_rounds if metrics.n_rounds else float("nan"),
        "accepted_length_histogram": {str(length): n for length, n in sorted(metrics.accepted_lengths.items())},
        "draft_n_sent": metrics.n_sent,
        "runs": metrics.n_runs,
        "rows": metrics.n_rows,
        "branches": metrics.n_branches,
        "inflight_max": metrics.n_inflight_max,
        "runs_cancelled": metrics.n_cancelled,
        "runs_cancelled_in_time": metrics.n_saved,
        "draft_steps": metrics.n_draft_steps,
        "draft_steps_inflight": metrics.n_draft_steps_inflight,
        "draft_s": metrics.draft_s,
        "draft_step_s": metrics.draft_s / metrics.n_draft_steps if metrics.n_draft_steps else float("nan"),
        "notices": list(metrics.notices),
    }
