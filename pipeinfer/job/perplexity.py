"""Rank 0's part of `pipeinfer perplexity`: chunks of a text as requests whose prompts are scored, and compared."""

import math
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeinfer import __version__
from pipeinfer.cluster.hosts.host import Host
from pipeinfer.cluster.stages.log_prob_file import LEAST_CHUNK, OPTION, LogProbFile, check_compared, chunk_text, create
from pipeinfer.cluster.verdicts import Comparison, ScoredToken
from pipeinfer.errors import StopRequested, UserError
from pipeinfer.job.launch import Context
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.deploy import DoesNotFit, deploy
from pipeinfer.job.planning.plan_table import show_start
from pipeinfer.job.planning.prepare import inputs_of, make_request, open_job, start_prepared
from pipeinfer.job.process.streams import complain
from pipeinfer.job.requests.request import GenerationRequest, read_text
from pipeinfer.job.session.result import describe_model
from pipeinfer.job.session.session import Output, open_session
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.report import stderr_console
from pipeinfer.outputs import check_separate, check_writable, is_stream
from pipeinfer.text import json_text
from pipeinfer.unfinished import beside, sweep

GEOMETRIC = ("base_perplexity", "ratio")  # means of logarithms
TABLE = """Mean PPL(Q)                   : {perplexity:10.6f} ± {error:10.6f}
Mean PPL(base)                : {base_perplexity:10.6f} ± {base_perplexity_error:10.6f}
Mean PPL(Q)/PPL(base)         : {ratio:10.6f} ± {ratio_error:10.6f}
Mean    KLD: {divergence:10.6f} ± {divergence_error:10.6f}
Maximum KLD: {divergence_max:10.6f}
99.0%   KLD: {divergence_99:10.6f}
Median  KLD: {divergence_median:10.6f}
Same top p: {same_top:.3%} ± {same_top_error:.3%}"""
"""llama-perplexity's names."""


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions:
    """`source`: the text; None: that of `base`, a file to compare with; else `base` is written. `n_chunks`: 0: all."""

    run: RunOptions
    source: Path | None
    n_chunks: int
    base: Path | None = None


def run_perplexity(options: PerplexityOptions) -> int:
    """On every rank; returns the exit code."""
    return start_prepared(options, options.run, partial(_prepare, work=options))


def _prepare(options: RunOptions, hosts: Sequence[Host], work: PerplexityOptions) -> "tuple[JobPlan, PerplexityRun]":
    """Raises UserError for a text that is too short, and for whatever is wrong with options and files."""
    source, base = work.source, work.base
    if base and source:
        base = _checked_base(base, inputs_of(options.changed(file=source)))
    text = read_text("--file", source) if source else ""
    options, info, drafts, tokenizer = open_job(options)
    n_ctx = options.context.ctx_size or 0
    chunks = _chunks(tokenizer.encode(text), n_ctx, str(source)) if source else _chunks_of(base, info)
    chunks = chunks[: work.n_chunks or None]
    size = len(chunks[0])
    prompts = [[tokenizer.bos, *chunk[1:]] if tokenizer.adds_bos else chunk for chunk in chunks]
    n_open = min(len(prompts), len(hosts) + 1)
    options = options.changed(ctx_size=size + 1, predict=0)
    requests = [make_request(options, info, tokenizer, prompt) for prompt in prompts]
    while True:  # with fewer chunks at a time where memory is short
        try:
            plan = deploy(options.changed(parallel=n_open), hosts, info, drafts, n_open * (size + 1), size)
            break
        except DoesNotFit:
            if n_open == 1:
                raise
            n_open //= 2
    new_base = base if source else None
    if base:
        file = beside(base) if new_base else base.absolute()  # of this job alone; the last rank opens it by its name
        for index, each in enumerate(requests):
            sampling = replace(each.sampling, base_chunk=chunk_text(file, index, bool(source)))
            requests[index] = replace(each, sampling=sampling)
    output = options.output
    new = _begin(file, new_base, info.n_vocab, chunks) if new_base else None
    return plan, PerplexityRun(plan, requests, tokenizer, output.json, output.verbose, new)


def _checked_base(base: Path, inputs: Mapping[str, Iterable[Path]]) -> Path:
    """The file that is to be written, of a link the one that it names. Raises UserError for one of `inputs`, and
    for what is no file: rows are written in any order."""
    check_separate({OPTION: base}, inputs)
    base = base.resolve()
    if is_stream(base):
        raise UserError(f"{OPTION} {base} is a device or a pipe, and is written in any order; name a file")
    check_writable(base, OPTION)
    return base


def _begin(unfinished: Path, base: Path, n_vocab: int, chunks: Sequence[Sequence[int]]) -> "NewBase":
    """Make the file, and remove those of killed jobs. Raises UserError."""
    sweep(base.parent, base.name)
    return NewBase(unfinished, base, create(unfinished, n_vocab, chunks))


def _chunks(tokens: list[int], size: int, source: str) -> list[list[int]]:
    if size < LEAST_CHUNK:
        raise UserError(f"-c {size} is no chunk: half of it is scored; give {LEAST_CHUNK} or more")
    if len(tokens) < 2 * size:
        reason = f"{source} has {len(tokens)} tokens, and two chunks of {size} are the least"
        less = len(tokens) // 2
        raise UserError(f"{reason}; give a longer text{f', or -c {less}' if less >= LEAST_CHUNK else ''}")
    return [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]


def _chunks_of(base: Path | None, info: ModelInfo) -> list[list[int]]:
    assert base, "there is a text or a base"
    file = LogProbFile(base)
    if file.n_vocab != info.n_vocab:
        reason = f"{OPTION} {base} is of {file.n_vocab} tokens, the vocabulary of {info.path} of {info.n_vocab}"
        raise UserError(f"{reason}; compare models of one vocabulary")
    return file.tokens


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


def divergence_figures(losses: Sequence[float], comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Means over all compared tokens, with standard errors. `losses`: their negative log-probabilities."""
    divergences, base_logprobs, same_tops = np.array(comparisons, np.float64).T
    means = dict(zip(GEOMETRIC, (-base_logprobs, losses + base_logprobs), strict=True))
    figures = {"divergence_max": float(divergences.max()), "divergence_median": float(np.median(divergences))}
    figures["divergence_99"] = float(np.quantile(divergences, 0.99))
    for name, values in {**means, "divergence": divergences, "same_top": same_tops}.items():
        mean, error = float(values.mean()), float(values.std()) / math.sqrt(max(1, len(values) - 1))
        if name in GEOMETRIC:
            mean, error = math.exp(mean), math.exp(mean) * error
        figures |= {name: mean, f"{name}_error": error}
    return figures


class NewBase(NamedTuple):
    """`unfinished`: the file that rows are written to, locked by `fd`; it replaces `base` when whole."""

    unfinished: Path
    base: Path
    fd: int


@dataclass(slots=True)
class PerplexityRun:
    """Rank 0's part. `requests`: one for each chunk."""

    plan: JobPlan
    requests: Sequence[GenerationRequest]
    tokenizer: Tokenizer
    json: bool
    verbose: bool
    new_base: NewBase | None = None
    losses: list[float] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    n_done: int = 0  # chunks
    _early: dict[int, list[ScoredToken]] = field(default_factory=dict)  # scored chunks that wait for earlier ones

    def run(self, context: Context) -> int:
        """Returns the exit code."""
        if not self.new_base:
            return self._score(context)
        unfinished, base, fd = self.new_base
        try:
            code = self._score(context)
            if self.n_done == len(self.requests):
                unfinished.replace(base)
            return code
        finally:
            unfinished.unlink(missing_ok=True)
            os.close(fd)

    def _score(self, context: Context) -> int:
        size = len(self.requests[0].prompt)
        about = f"{len(self.requests)} chunks of {size} tokens"
        show_start(stderr_console(), self.plan, about, about, self.verbose)
        waiting = deque(enumerate(self.requests))
        with closing(self.tokenizer), open_session(context, self.plan, self.tokenizer, verbose=self.verbose) as session:

            def take(outputs: Sequence[Output]) -> None:
                for output in outputs:
                    scores = output.opened.state.scores.items()
                    ordered = [token for _, token in sorted(scores) if isinstance(token, ScoredToken)]
                    self._note(output.opened.origin, ordered)
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
            except UserError as error:  # a damaged base
                context.flag.note(str(error), 2)
            session.stop_all()
        if context.flag.reason:
            complain(f"{context.flag.reason}; the estimate is that of {self.n_done} of {len(self.requests)} chunks")
        if self.losses:
            print(json_text(self._figures()) if self.json else self._estimate_text(), flush=True)
        return context.flag.exit_code

    def _note(self, index: int, tokens: Sequence[ScoredToken]) -> None:
        """Take a chunk's tokens, all but the first: its second half counts. Chunks count in their order. Raises
        UserError for a damaged base."""
        request, comparisons = self.requests[index], [token.comparison for token in tokens if token.comparison]
        check_compared(request.sampling.base_chunk, comparisons)
        self._early[index] = [*tokens[len(request.prompt) // 2 :]]
        while (ready := self._early.pop(self.n_done, None)) is not None:
            self.losses += [-token.logprob for token in ready]
            self.comparisons += [token.comparison for token in ready if token.comparison]
            self.n_done += 1
            complain(f"[{self.n_done}] {Estimate.of(self.losses).perplexity:.4f}")

    def _estimate_text(self) -> str:
        if self.comparisons:
            return TABLE.format(**self._figures())
        estimate = Estimate.of(self.losses)
        return f"Final estimate: PPL = {estimate.perplexity:.4f} +/- {estimate.error:.5f}"

    def _figures(self) -> dict[str, object]:
        estimate = Estimate.of(self.losses)
        return {
            "perplexity": estimate.perplexity,
            "error": estimate.error,
            **(divergence_figures(self.losses, self.comparisons) if self.comparisons else {}),
            "tokens": estimate.n_tokens,
            "chunks": self.n_done,
            "chunk_tokens": len(self.requests[0].prompt),
            "model": describe_model(self.plan.model),
            "numerics_name": self.plan.numerics.name,
            "ranks": self.plan.assignment.n_ranks,
            "version": __version__,
        }
