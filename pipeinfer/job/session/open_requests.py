"""The open requests of a session: which may begin, and their output.

Knows no file and no client.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeinfer.cluster.messages.wire import text_bytes
from pipeinfer.cluster.stages.serve import N_TEXT_MAX
from pipeinfer.core.requests import Emission, Finish, Request
from pipeinfer.core.scheduling.admission import ahead_of
from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.placement.capacity import EngineSettings
from pipeinfer.job.process.complain import complain
from pipeinfer.job.requests.logprobs import Entries, Entry
from pipeinfer.job.requests.printer import Printer
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.session.notices import Notices
from pipeinfer.job.session.session import Session
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.metrics import RequestMetrics


@dataclass(slots=True, eq=False)
class Open:
    """A request in the engine. `n_heard`: tokens of its text so far, up to a stop string. `n_told`: characters of it
    that were passed on."""

    asked: GenerationRequest
    request: Request
    printer: Printer
    metrics: RequestMetrics
    entries: Entries
    n_heard: int = 0
    n_told: int = 0

    @property
    def has_ended(self) -> bool:
        return self.printer.was_cut or (bool(self.request.finish) and self.n_heard == self.request.n_generated)

    @property
    def finish(self) -> str:
        """Why its text ends, in OpenAI's words; "error" where its grammar took too much."""
        if self.request.finish is Finish.FAILED:
            return "error"
        if not self.asked.n_predict:
            return "length"
        return "stop" if self.printer.was_cut or self.request.finish is Finish.END else "length"


@dataclass(frozen=True, slots=True)
class News:
    """New output of one request: tokens, the text that they complete, and their log-probabilities, if any. The first
    text includes that of resumed tokens. `ended`: this is the last."""

    opened: Open
    tokens: Sequence[int]
    text: str
    entries: Sequence[Entry]
    ended: bool


class OpenRequests:
    """`take`: called with new output, that of one run at a time; it may begin and stop requests. `say`: called with the
    lines of `Notices`. `settings`: of the engine, None: the plan's."""

    def __init__(
        self, context: Context, session: Session, tokenizer: Tokenizer,
        take: Callable[[Sequence[News]], None], say: Callable[[str], object] = complain,
        settings: EngineSettings | None = None,
    ) -> None:  # fmt: skip
        self.take, self.notices = take, Notices(say, CLOCK)
        self.context, self.session, self.tokenizer = context, session, tokenizer
        self.n_ctx, self.n_requests = session.plan.capacity.n_ctx, session.plan.capacity.n_requests
        self.engine = session.set_up(settings)
        self.engine.taker = self._hear
        self.engine.admission.ahead, self.engine.admission.n_open = ahead_of(self.n_ctx), self.n_requests
        self._open: dict[int, Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def n_text(self) -> int:
        """Bytes of their grammars and biases."""
        return sum(text_bytes(each.asked.sampling) for each in self._open.values())

    def has_room(self, asked: GenerationRequest) -> bool:
        """Whether the engine can take one more request. Requests of higher priority are passed on even when it is full,
        so that preempted ones do not take the next free cells."""
        admission = self.engine.admission
        return self.n_text + text_bytes(asked.sampling) <= N_TEXT_MAX and (
            not self._open
            or admission.would_pass(asked.priority)
            or (len(self._open) < self.n_requests and admission.n_reserved + self._n_soon(asked) <= self.n_ctx)
        )

    def _n_soon(self, asked: GenerationRequest) -> int:
        """Cells that it needs to begin. For more of them others are preempted."""
        return min(asked.n_ctx, len(asked.prompt) + len(asked.begun) + self.engine.admission.ahead)

    def begin(
        self, asked: GenerationRequest, came_s: float | None = None,
        on_turn: Callable[[bool], None] | None = None, on_prompt: Callable[[int], None] | None = None,
    ) -> Open:  # fmt: skip
        """Add a request to the engine, where it may have to wait. `came_s`: the time of its arrival. `on_turn`: called
        with True when it starts or goes on, with False when it is preempted; `on_prompt`: with the number of prompt
        tokens that are evaluated."""
        printer = Printer(self.context.flag, self.tokenizer, asked, silent=True)
        printer.push(asked.begun)
        self.notices.pass_on()
        entries = Entries(asked.end_tokens)
        metrics = RequestMetrics(on_prompt=on_prompt, on_turn=on_turn, on_notice=self.notices.hear)
        request = replace(asked, n_predict=max(1, asked.n_predict)).open(self.session.next_id())
        opened = Open(asked, request, printer, metrics, entries, len(asked.begun))
        self._open[opened.request.id] = opened
        self.engine.add(opened.request, asked.policy.begin(), metrics)
        if came_s is not None:
            metrics.submitted_s = came_s
        return opened

    def step(self) -> None:
        """Do the next step of the engine, or wait."""
        if emission := self.engine.step():
            self._hear([emission, *self.engine.rest()])

    def _hear(self, emissions: Sequence[Emission]) -> None:
        news = [self._news(opened, each.tokens) for each in emissions if (opened := self._open.get(each.request.id))]
        if news:
            self.take(news)

    def _news(self, opened: Open, tokens: list[int]) -> News:
        if not opened.asked.n_predict:  # the token that follows the prompt is nobody's
            return self._read_only(opened)
        printer, n_before, n_told = opened.printer, opened.n_heard, opened.n_told
        for token in tokens:
            opened.n_heard += 1
            opened.entries.add(token, printer.n_decoded)
            if printer.push([token]):
                self.engine.stop(opened.request, Finish.END)
                break
        ended = opened.has_ended
        if ended:
            printer.finish()
            del self._open[opened.request.id]
        entries = opened.entries.take(len(printer.text))
        if ended and not printer.was_cut:
            entries += opened.entries.rest()
        opened.n_told = len(printer.text)
        return News(opened, tokens[: opened.n_heard - n_before], printer.text[n_told:], entries, ended)

    def _read_only(self, opened: Open) -> News:
        """The last output of a request for its prompt alone: no token."""
        del self._open[opened.request.id]
        return News(opened, [], "", [], ended=True)

    def stop(self, opened: Open) -> None:
        """Stop a request. It has no further output."""
        if self._open.pop(opened.request.id, None):
            self.engine.stop(opened.request)

    def stop_all(self) -> None:
        """Stop all open requests, and wait until nothing is in flight."""
        for opened in list(self._open.values()):
            self.stop(opened)
        with self.context.flag.held():
            for _ in self.engine.generate():
                pass
