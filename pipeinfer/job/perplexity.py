"""Rank 0's part of `pipeinfer perplexity`: chunks of a text as requests whose prompts are scored."""

import math
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pipeinfer import __version__
from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.errors import StopRequested, UserError
from pipeinfer.job.launch import Context
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.deploy import deploy
from pipeinfer.job.planning.plan_table import show_start
from pipeinfer.job.planning.prepare import make_request, open_job, start_prepared
from pipeinfer.job.process.streams import complain
from pipeinfer.job.requests.request import GenerationRequest, read_text
from pipeinfer.job.session.result import describe_model
from pipeinfer.job.session.session import Output, open_session
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.report import stderr_console
from pipeinfer.text import json_text

LEAST_CHUNK = 4


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions:
    """`source`: the text. `n_chunks`: of it; 0: all."""

    run: RunOptions
    source: Path
    n_chunks: int


def run_perplexity(options: PerplexityOptions) -> int:
    """On every rank; returns the exit code."""
    prepare = partial(_prepare, source=options.source, n_chunks=options.n_chunks)
    return start_prepared(options, options.run, prepare, lambda context, _, work: work.run(context))


def _prepare(
    options: RunOptions, hosts: Sequence[Host], source: Path, n_chunks: int
) -> "tuple[JobPlan, PerplexityRun]":
    """Raises UserError for a text that is too short, and whatever is wrong with options and files."""
    size = options.context.ctx_size
    if size < LEAST_CHUNK:
        raise UserError(f"-c {size} is no chunk: half of it is scored; give {LEAST_CHUNK} or more")
    text = read_text("--file", source)
    options, info, tokenizer = open_job(options)
    tokens = tokenizer.encode(text)
    if len(tokens) < 2 * size:
        reason = f"{source} has {len(tokens)} tokens, and two chunks of {size} are the least"
        raise UserError(f"{reason}; give a longer text, or -c {len(tokens) // 2}")
    starts = range(0, len(tokens) - size + 1, size)[: n_chunks or None]
    prompts = [tokens[start : start + size] for start in starts]
    if tokenizer.adds_bos:
        prompts = [[tokenizer.bos, *prompt[1:]] for prompt in prompts]
    n_open = min(len(prompts), len(hosts) + 1)
    options = options.changed(parallel=n_open, ctx_size=size + 1, predict=0)
    requests = [make_request(options, info, tokenizer, prompt) for prompt in prompts]
    plan = deploy(options, hosts, info, n_open * (size + 1), size)
    return plan, PerplexityRun(plan, requests, tokenizer, options.output.json, options.output.verbose)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of the scored tokens so far: the perplexity, and its standard error."""

    n_tokens: int
    perplexity: float
    error: float

    @classmethod
    def of(cls, losses: Sequence[float]) -> "Estimate":
        """`losses`: of each token, its negative log-probability."""
        n = len(losses)
        mean = math.fsum(losses) / n
        variance = math.fsum(loss * loss for loss in losses) / n - mean * mean
        perplexity = math.exp(mean)
        return cls(n, perplexity, perplexity * math.sqrt(variance / (n - 1)) if n > 1 and variance > 0 else 0.0)


@dataclass(slots=True)
class PerplexityRun:
    """Rank 0's part. `requests`: one for each chunk."""

    plan: JobPlan
    requests: Sequence[GenerationRequest]
    tokenizer: Tokenizer
    json: bool
    verbose: bool
    losses: list[float] = field(default_factory=list)
    n_done: int = 0  # chunks
    _early: dict[int, list[float]] = field(default_factory=dict)  # losses of chunks before which some are missing

    def run(self, context: Context) -> int:
        """Returns the exit code."""
        size = len(self.requests[0].prompt)
        about = f"{len(self.requests)} chunks of {size} tokens"
        show_start(stderr_console(), self.plan, about, about, self.verbose)
        waiting = deque(enumerate(self.requests))
        with closing(self.tokenizer), open_session(context, self.plan, self.tokenizer, verbose=self.verbose) as session:

            def take(outputs: Sequence[Output]) -> None:
                for output in outputs:
                    self._note(output.opened.origin, [-(entry.logprob or 0.0) for entry in output.scores or ()])
                begin()

            def begin() -> None:
                while waiting and session.has_room(waiting[0][1]):
                    index, request = waiting.popleft()
                    session.begin(request, take).origin = index

            try:
                begin()
                while session.engine.busy:
                    session.engine.step()
            except StopRequested:
                pass
            session.stop_all()
        if context.flag.reason:
            complain(f"{context.flag.reason}; the estimate is that of {self.n_done} of {len(self.requests)} chunks")
        if self.losses:
            print(json_text(self._figures()) if self.json else self._estimate_text(), flush=True)
        return context.flag.exit_code

    def _note(self, index: int, losses: Sequence[float]) -> None:
        """Take a chunk's losses of all tokens but the first: its second half counts. Chunks count in their order."""
        self._early[index] = [*losses[len(self.requests[index].prompt) // 2 :]]
        while (ready := self._early.pop(self.n_done, None)) is not None:
            self.losses += ready
            self.n_done += 1
            complain(f"[{self.n_done}] {Estimate.of(self.losses).perplexity:.4f}")

    def _estimate_text(self) -> str:
        estimate = Estimate.of(self.losses)
        return f"Final estimate: PPL = {estimate.perplexity:.4f} +/- {estimate.error:.5f}"

    def _figures(self) -> dict[str, object]:
        estimate = Estimate.of(self.losses)
        return {
            "perplexity": estimate.perplexity,
            "error": estimate.error,
            "tokens": estimate.n_tokens,
            "chunks": self.n_done,
            "chunk_tokens": len(self.requests[0].prompt),
            "model": describe_model(self.plan.model),
            "numerics_name": self.plan.numerics.name,
            "ranks": self.plan.assignment.n_ranks,
            "version": __version__,
        }
