"""The requests of a command in one engine on loaded ranks, and the text of their output. Knows no command."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import Any

from pipeinfer.cluster.stages.serve import N_TEXT_MAX
from pipeinfer.cluster.wire import text_bytes
from pipeinfer.core.requests import Emission, Finish, Request
from pipeinfer.core.types import Clock
from pipeinfer.errors import StopRequested
from pipeinfer.job.launch import CLOCK, Context
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.process.streams import complain
from pipeinfer.job.requests.answers import Entries, Entry, Printer, prompt_entries
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.session.ranks import Figures, LoadedRanks
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.figures import missed_pace
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.observe.report import ProgressBar, stderr_console

OnTokens = Callable[[Sequence[int]], object] | None
OnPrompt = Callable[[int], None] | None
Poll = Callable[[], bool]
Say = Callable[[str], object]
MOST_LINES, PERIOD_S = 4, 3600.0  # at most so many lines a period: where guesses hardly matter notices come often


class Notices:
    """Notices of policies while many requests are open, few an hour. One that comes too early waits for a later one."""

    def __init__(self, say: Say, clock: Clock) -> None:
        self.say, self.clock = say, clock
        self._newest = self._waiting = ""
        self._times_s = deque([-math.inf] * MOST_LINES, MOST_LINES)

    def hear(self, line: str) -> None:
        """Take a line; one that differs from the newest in its figures alone is dropped."""
        self._waiting = line if _subject(line) != _subject(self._newest) else ""
        self.pass_on()

    def pass_on(self) -> None:
        """Say the line that waits, if it may be said by now."""
        if self._waiting and self.clock() >= self._times_s[0] + PERIOD_S:
            self._newest, self._waiting = self._waiting, ""
            self._times_s.append(self.clock())
            self.say(self._newest)


def _subject(line: str) -> str:
    return line.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Output:
    """New output of one request: tokens, the text that they complete, log-probabilities. The first text includes that
    of resumed tokens. `ended`: this is the last. `scores`: of the prompt, if they are wanted, with the first."""

    opened: "OpenRequest"
    tokens: Sequence[int]
    text: str
    entries: Sequence[Entry]
    ended: bool
    scores: Sequence[Entry] | None = None


OnOutput = Callable[[Sequence[Output]], object]


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request in the engine, which has its `state`. `origin`: what the caller knows of it. `n_output`: tokens of its
    text so far, up to a stop string. `n_passed`: characters of it that were passed to `on_output`."""

    request: GenerationRequest
    state: Request
    printer: Printer
    metrics: RequestMetrics
    on_output: OnOutput
    entries: Entries
    n_output: int
    origin: Any = None
    n_passed: int = 0
    has_scores: bool = False  # they were passed to `on_output`

    @property
    def has_ended(self) -> bool:
        return self.printer.was_cut or (bool(self.state.finish) and self.n_output == self.state.n_generated)

    def as_shown(self) -> Request:
        """Its state without the tokens behind a stop string, whose number depends on the policy."""
        shown = copy(self.state)
        shown.tokens, shown.finish = shown.tokens[: len(shown.prompt) + self.n_output], self._finish
        return shown

    @property
    def _finish(self) -> Finish | None:
        """Why its text ends, whatever came behind a stop string."""
        return Finish.END if self.printer.was_cut else self.state.finish

    @property
    def finish(self) -> str:
        """Why its text ends, in OpenAI's words; "error" where its grammar took too much."""
        if self._finish is Finish.FAILED:
            return "error"
        return "stop" if self._finish is Finish.END and self.request.n_predict else "length"


@dataclass(frozen=True, slots=True)
class Generation(Figures):
    """The result of one request that was alone."""

    request: Request
    metrics: RequestMetrics
    text: str
    was_cut: bool  # by a stop string


class Session:
    """Requests in one engine on loaded ranks. What the engine learns of the models stays as long as the session."""

    def __init__(
        self, ranks: LoadedRanks, tokenizer: Tokenizer, has_work: Poll = lambda: False, say: Say = complain
    ) -> None:
        """`has_work`: returns True to end a wait of the engine. `say`: called with notices of policies."""
        self.ranks, self.tokenizer, self.plan, self.context = ranks, tokenizer, ranks.plan, ranks.context
        self.notices = Notices(say, self.context.clock)
        self.engine = ranks.make_engine(has_work, self._hear)
        self._open: dict[int, OpenRequest] = {}
        self._ids = count()

    # -- many requests

    @property
    def n_open(self) -> int:
        return len(self._open)

    def has_room(self, request: GenerationRequest) -> bool:
        """Whether the engine can take one more. One of higher priority it takes when full, to preempt others."""
        admission, capacity = self.engine.admission, self.plan.capacity
        n_bytes = sum(text_bytes(each.state.sampling) for each in self._open.values())
        n_soon = min(request.n_ctx, len(request.prompt) + len(request.begun) + admission.ahead)
        return n_bytes + text_bytes(request.sampling_with_ends) <= N_TEXT_MAX and (
            not self._open
            or admission.would_pass(request.priority)
            or (len(self._open) < capacity.n_requests and admission.n_reserved + n_soon <= capacity.n_ctx)
        )

    def begin(
        self,
        request: GenerationRequest,
        on_output: OnOutput,
        metrics: RequestMetrics | None = None,
        silent: bool = True,
    ) -> OpenRequest:
        """Add a request to the engine, where it may have to wait. `on_output`: called with the new output of one run,
        of all its requests; it may begin and stop requests. Text is printed unless `silent`."""
        self.notices.pass_on()
        metrics = metrics or RequestMetrics(on_notice=self.notices.hear)
        printer, entries = Printer(self.context.flag, self.tokenizer, request, silent), Entries(request.end_tokens)
        printer.push(request.begun)
        state = replace(request, n_predict=max(1, request.n_predict)).open(next(self._ids))
        opened = OpenRequest(request, state, printer, metrics, on_output, entries, len(request.begun))
        self._open[state.id] = opened
        self.engine.add(state, request.policy.begin(), metrics)
        return opened

    def stop(self, opened: OpenRequest) -> None:
        """Stop a request. It has no further output."""
        if self._open.pop(opened.state.id, None):
            self.engine.stop(opened.state)

    def stop_all(self) -> None:
        """Stop all open requests, and wait until nothing is in flight."""
        for opened in list(self._open.values()):
            self.stop(opened)
        with self.context.flag.held():
            self.engine.complete()

    # -- one request

    def generate(
        self, request: GenerationRequest, on_tokens: OnTokens = None, on_prompt: OnPrompt = None, silent: bool = True
    ) -> Generation:
        """One request, alone, until it ends or the user stops it. `on_tokens`: called with its new tokens.
        `on_prompt`: called with the number of prompt tokens that are evaluated."""

        def take(outputs: Sequence[Output]) -> None:
            for output in outputs:
                if on_tokens:
                    on_tokens(output.tokens)

        metrics = RequestMetrics(self.context.tracer, on_prompt, has_draft=bool(self.plan.drafts))
        opened = self.begin(request, take, metrics, silent)
        try:
            if not request.n_predict:
                self.engine.stop(opened.state, Finish.LENGTH)
            self.engine.complete()
        except StopRequested:
            opened.printer.finish()
        self.stop_all()
        figures = self.ranks.take_figures()
        late_s = {rank: report["late_s"] for rank, report in figures.reports.items()}
        if notice := missed_pace(late_s, self.context.clock() - metrics.submitted_s):
            metrics.noticed(notice)
        shared = figures.ledger, figures.reports, figures.draft_ledgers, figures.row_s
        return Generation(*shared, opened.as_shown(), metrics, opened.printer.text, opened.printer.was_cut)

    # -- output

    def _hear(self, emissions: Sequence[Emission]) -> None:
        # one request may have several emissions, and the first may end it
        outputs = [
            self._output(opened, each.tokens) for each in emissions if (opened := self._open.get(each.request.id))
        ]
        for on_output, group in groupby(outputs, key=lambda output: output.opened.on_output):
            on_output(list(group))

    def _output(self, opened: OpenRequest, tokens: Sequence[int]) -> Output:
        state, scores = opened.state, None
        if state.is_scored and not opened.has_scores:
            opened.has_scores, scores = True, prompt_entries(state.scores)
        if not opened.request.n_predict:  # the token after the prompt belongs to no text
            del self._open[opened.state.id]
            return Output(opened, [], "", [], True, scores)
        printer, n_before = opened.printer, opened.n_output
        for token in tokens:
            if printer.was_cut:  # by what the text began with
                break
            opened.n_output += 1
            opened.entries.add(token, printer.n_decoded)
            printer.push([token])
        if printer.was_cut:
            self.engine.stop(opened.state, Finish.END)
            del opened.metrics.token_s[opened.n_output - len(opened.request.begun) :]
        ended = opened.has_ended
        if ended:
            printer.finish()
            del self._open[opened.state.id]
        entries = opened.entries.take(math.inf if ended and not printer.was_cut else len(printer.text))
        text, opened.n_passed = printer.text[opened.n_passed :], len(printer.text)
        return Output(opened, tokens[: opened.n_output - n_before], text, entries, ended, scores)


@contextmanager
def open_session(
    context: Context,
    plan: JobPlan,
    tokenizer: Tokenizer,
    has_work: Poll = lambda: False,
    say: Say = complain,
    verbose: bool = False,
) -> Iterator[Session]:
    """A session whose models are loaded, closed at the end; within it the job stops in order. `has_work`: as in
    `Session`; `say` takes the plan's warnings; `verbose`: print a line for each rank that has loaded. Raises
    JobError, as `LoadedRanks.load` does."""
    console = stderr_console()
    progress = ProgressBar(console, CLOCK, "loading", plan.assignment.n_ranks, "ranks")

    def on_loaded(rank: int, loaded_s: float) -> None:
        progress.advance(1)
        if verbose:
            console.print(f"rank {rank} ({plan.assignment.describe(rank)}) loaded in {loaded_s:.1f} s", style="dim")

    ranks = LoadedRanks(context, plan, on_loaded)
    try:
        ranks.load()
    finally:
        progress.close()
    for warning in plan.warnings:
        say(warning)
    context.flag.orderly = True  # from now on there is something to keep
    yield Session(ranks, tokenizer, has_work, say)
    ranks.close()  # not after an exception: the watch then ends ranks that may never answer
