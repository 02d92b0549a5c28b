"""The server's metrics for Prometheus: by llama.cpp's names, and by vLLM's where it counts the same."""

import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pipeinfer.job.serve.channel import Snapshot
from pipeinfer.server.choices import Choice

SECONDS: tuple[float, ...] = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0)
SECONDS += (2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """`n_ctx`: tokens of all open requests. `model`: the label of vLLM's names."""

    def __init__(self, model: str, n_ctx: int) -> None:
        self.n_ctx, self.registry = n_ctx, CollectorRegistry()
        self._labels = {"model_name": model}
        self._n_runs = 0
        count = partial(self._add, Counter)
        seconds, tokens = (partial(self._add, Histogram, buckets=each) for each in (SECONDS, TOKENS))
        self._evaluated = count("llamacpp:prompt_tokens", "Prompt tokens that were evaluated.")
        self._prompt = count("vllm:prompt_tokens", "Prompt tokens of requests that have ended.")
        self._predicted = count("llamacpp:tokens_predicted", "Tokens generated.")
        self._generation = count("vllm:generation_tokens", "Tokens generated.")
        self._prompt_s = count("llamacpp:prompt_seconds", "Seconds from the first run to the first token.")
        self._predicted_s = count("llamacpp:tokens_predicted_seconds", "Seconds from the first token on.")
        self._decode = count("llamacpp:n_decode", "Runs sent through the pipeline.")
        self._drafted = count("vllm:spec_decode_num_draft_tokens", "Guesses that got a verdict.")
        self._accepted = count("vllm:spec_decode_num_accepted_tokens", "Guesses that were right.")
        self._prefix_queries = count("vllm:prefix_cache_queries", "Prompt tokens.")
        self._prefix_hits = count("vllm:prefix_cache_hits", "Prompt tokens that another text had evaluated.")
        self._preempted = count("vllm:num_preemptions", "How often a text gave its cells to others.")
        of_requests, of_ranks = ["model_name", "finished_reason"], ["rank", "use"]
        ended, shares = "Requests that have ended.", "How a rank spent its time when it was last looked at."
        self._success = Counter("vllm:request_success", ended, of_requests, registry=self.registry)
        self._ttft = seconds("vllm:time_to_first_token_seconds", "From submission to the first token.")
        self._itl = seconds("vllm:inter_token_latency_seconds", "Between two tokens of a text.")
        self._e2e = seconds("vllm:e2e_request_latency_seconds", "From submission to the last token.")
        self._queue = seconds("vllm:request_queue_time_seconds", "From submission to the first run.")
        self._n_prompt = tokens("vllm:request_prompt_tokens", "Tokens of a prompt.")
        self._n_text = tokens("vllm:request_generation_tokens", "Tokens of a text.")
        self._recoveries = count("pipeinfer:recoveries", "How often the job was lost and started again.")
        self._recovery_s = count("pipeinfer:recovery_seconds", "Seconds in which there was no job.")
        self._share = Gauge("pipeinfer:rank_time_ratio", shares, of_ranks, registry=self.registry)

    def _add(self, kind: Any, name: str, help: str, **options: Any) -> Any:
        """A metric; vLLM's have the model as a label."""
        labels = self._labels if name.startswith("vllm:") else {}
        metric = kind(name, help, list(labels), registry=self.registry, **options)
        return metric.labels(**labels) if labels else metric

    def add_gauges(self, choices: Mapping[int, Choice]) -> None:
        """Gauges of these open choices."""

        def n_running() -> float:
            return sum(choice.is_running for choice in choices.values())

        def used() -> float:
            running = [choice for choice in choices.values() if choice.is_running]
            # a shared prefix counts for each text
            return min(1.0, sum(choice.n_prompt + choice.n_tokens for choice in running) / self.n_ctx)

        def n_waiting() -> float:
            return len(choices) - n_running()

        for name, help, find in (
            ("llamacpp:requests_processing", "Texts that are being written.", n_running),
            ("vllm:num_requests_running", "Texts that are being written.", n_running),
            ("llamacpp:requests_deferred", "Texts that wait.", n_waiting),
            ("vllm:num_requests_waiting", "Texts that wait.", n_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the context that open requests use.", used),
        ):
            self._add(Gauge, name, help).set_function(find)

    # -- events

    def started(self, choice: Choice) -> None:
        """For the first time."""
        self._queue.observe(choice.started_s - choice.submitted_s)

    def generated(self, choice: Choice, n_tokens: int, before_s: float) -> None:
        """`before_s`: the time of the tokens before these; NaN if there were none."""
        self._predicted.inc(n_tokens)
        self._generation.inc(n_tokens)
        is_first = math.isnan(before_s)
        if is_first:
            self._ttft.observe(choice.heard_s - choice.submitted_s)
        gap_s = 0.0 if is_first else (choice.heard_s - before_s) / max(1, n_tokens)
        for _ in range(n_tokens - is_first):
            self._itl.observe(gap_s)

    def ended(self, choice: Choice, n_runs: int) -> None:
        """Also when it was given up or cancelled: then its `finish` is empty."""
        self._success.labels(**self._labels, finished_reason=choice.finish or "abort").inc()
        self._decode.inc(max(0, n_runs - self._n_runs))
        self._n_runs = max(self._n_runs, n_runs)
        if not choice.finish:
            return
        timings, n_prompt = choice.timings, choice.n_prompt
        self._evaluated.inc(timings.get("prompt_n", 0))
        self._prompt.inc(n_prompt)
        self._n_prompt.observe(n_prompt)
        self._n_text.observe(choice.n_tokens)
        self._e2e.observe(time.monotonic() - choice.submitted_s)
        self._prompt_s.inc((timings.get("prompt_ms") or 0) / 1e3)
        self._predicted_s.inc((timings.get("predicted_ms") or 0) / 1e3)
        self._drafted.inc(timings.get("draft_n", 0))
        self._accepted.inc(timings.get("draft_n_accepted", 0))
        self._prefix_queries.inc(n_prompt)
        self._prefix_hits.inc(timings.get("cache_n", 0))
        self._preempted.inc(timings.get("preempted_n", 0))

    def ranks_reported(self, snapshot: Snapshot) -> None:
        for rank in snapshot.ranks:
            for use in ("busy", "cancelled", "waiting", "idle"):
                self._share.labels(rank["rank"], use).set(rank[use])

    def recovered(self, seconds: float) -> None:
        """Another rank 0 is ready, so long after the one before was lost."""
        self._n_runs = 0  # it counts anew
        self._recoveries.inc()
        self._recovery_s.inc(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
