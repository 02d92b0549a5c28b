"""What happens in the server, as Prometheus has it: by llama.cpp's names, and by vLLM's where it counts the same."""

import math
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pipeinfer.job.serve.front import Picture
from pipeinfer.server.choices import Choice
from pipeinfer.server.head import Head

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
           40.0, 80.0, 160.0, 640.0)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """`head`: whose state the gauges show. `n_ctx`: tokens of all open requests. `model`: the label of vLLM's names."""

    def __init__(self, model: str, n_ctx: int) -> None:
        self.n_ctx, self.registry = n_ctx, CollectorRegistry()
        self._labels = {"model_name": model}
        self._n_runs = 0
        self._evaluated = self._counter("llamacpp:prompt_tokens", "Prompt tokens that were evaluated.")
        self._prompt = self._labelled("vllm:prompt_tokens", "Prompt tokens of requests that have ended.")
        self._predicted = self._counter("llamacpp:tokens_predicted", "Tokens generated.")
        self._generation = self._labelled("vllm:generation_tokens", "Tokens generated.")
        self._prompt_s = self._counter("llamacpp:prompt_seconds", "Seconds from the first run to the first token.")
        self._predicted_s = self._counter("llamacpp:tokens_predicted_seconds", "Seconds from the first token on.")
        self._decode = self._counter("llamacpp:n_decode", "Runs sent through the pipeline.")
        self._drafted = self._labelled("vllm:spec_decode_num_draft_tokens", "Guesses that got a verdict.")
        self._accepted = self._labelled("vllm:spec_decode_num_accepted_tokens", "Guesses that were right.")
        self._kept_asked = self._labelled("vllm:prefix_cache_queries", "Prompt tokens.")
        self._kept = self._labelled("vllm:prefix_cache_hits", "Prompt tokens that another text had evaluated.")
        self._preempted = self._labelled("vllm:num_preemptions", "How often a text gave its cells to others.")
        self._success = Counter("vllm:request_success", "Requests that have ended.", ["model_name", "finished_reason"],
                                registry=self.registry)  # fmt: skip
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "From submission to the first token.", SECONDS)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens of a text.", SECONDS)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "From submission to the last token.", SECONDS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "From submission to the first run.", SECONDS)
        self._n_prompt = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._n_text = self._histogram("vllm:request_generation_tokens", "Tokens of a text.", TOKENS)
        self._recoveries = self._counter("pipeinfer:recoveries", "How often the job was lost and started again.")
        self._recovery_s = self._counter("pipeinfer:recovery_seconds", "Seconds in which there was no job.")
        self._share = Gauge("pipeinfer:rank_time_ratio", "How a rank spent its time when it was last looked at.",
                            ["rank", "use"], registry=self.registry)  # fmt: skip

    def show(self, head: Head) -> None:
        """Show its state as gauges."""

        def n_running() -> float:
            return sum(choice.is_running for choice in head.choices.values())

        def used() -> float:
            open = [choice for choice in head.choices.values() if choice.is_running]
            # what texts share is counted for each
            return min(1.0, sum(len(choice.asked.prompt) + choice.n_tokens for choice in open) / self.n_ctx)

        def n_waiting() -> float:
            return len(head.choices) - n_running()

        for ours, theirs, help, find in (
            ("llamacpp:requests_processing", "vllm:num_requests_running", "Texts that are being written.", n_running),
            ("llamacpp:requests_deferred", "vllm:num_requests_waiting", "Texts that wait.", n_waiting),
            ("", "vllm:kv_cache_usage_perc", "Share of the context that open requests use.", used),
        ):
            if ours:
                Gauge(ours, help, registry=self.registry).set_function(find)
            Gauge(theirs, help, list(self._labels), registry=self.registry).labels(**self._labels).set_function(find)

    # -- what the head says

    def begun(self, choice: Choice) -> None:
        self._queue.observe(choice.begun_s - choice.asked_s)

    def came(self, choice: Choice, n_tokens: int, before_s: float) -> None:
        self._predicted.inc(n_tokens)
        self._generation.inc(n_tokens)
        is_first = math.isnan(before_s)
        if is_first:
            self._ttft.observe(choice.came_s - choice.asked_s)
        gap_s = 0.0 if is_first else (choice.came_s - before_s) / max(1, n_tokens)
        for _ in range(n_tokens - is_first):
            self._itl.observe(gap_s)

    def ended(self, choice: Choice, n_runs: int) -> None:
        self._success.labels(**self._labels, finished_reason=choice.finish or "abort").inc()
        self._decode.inc(max(0, n_runs - self._n_runs))
        self._n_runs = max(self._n_runs, n_runs)
        if not choice.finish:
            return
        timings, n_prompt = choice.timings, len(choice.asked.prompt)
        self._evaluated.inc(timings.get("prompt_n", 0))
        self._prompt.inc(n_prompt)
        self._n_prompt.observe(n_prompt)
        self._n_text.observe(choice.n_tokens)
        self._e2e.observe(time.monotonic() - choice.asked_s)
        self._prompt_s.inc((timings.get("prompt_ms") or 0) / 1e3)
        self._predicted_s.inc((timings.get("predicted_ms") or 0) / 1e3)
        self._drafted.inc(timings.get("draft_n", 0))
        self._accepted.inc(timings.get("draft_n_accepted", 0))
        self._kept_asked.inc(n_prompt)
        self._kept.inc(timings.get("cache_n", 0))
        self._preempted.inc(timings.get("preempted_n", 0))

    def shown(self, picture: Picture) -> None:
        for rank in picture.ranks:
            for use in ("busy", "cancelled", "waiting", "idle"):
                self._share.labels(rank["rank"], use).set(rank[use])

    def recovered(self, seconds: float) -> None:
        self._recoveries.inc()
        self._recovery_s.inc(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    # -- names

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, registry=self.registry)

    def _labelled(self, name: str, help: str) -> Counter:
        return Counter(name, help, ["model_name"], registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, ["model_name"], buckets=buckets, registry=self.registry).labels(**self._labels)
