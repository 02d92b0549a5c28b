"""A service in one MPI job: a front asks for others, their requests share the loaded models. Knows no HTTP."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from pipeinfer.errors import JobError, StopRequested
from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.plan_table import show_start
from pipeinfer.job.planning.prepared import start_prepared
from pipeinfer.job.process.complain import complain
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.serve.drain import Drain
from pipeinfer.job.serve.front import (
    Ask,
    Begun,
    Came,
    Draining,
    Drop,
    Ended,
    Front,
    Listening,
    Part,
    Read,
    Ready,
    Waits,
    Watch,
)
from pipeinfer.job.serve.pictures import Pictures
from pipeinfer.job.serve.serve_prepare import ServeOptions, ServeWork, prepare_serve
from pipeinfer.job.session.open_requests import News, Open, OpenRequests
from pipeinfer.job.session.open_session import open_session
from pipeinfer.observe.metrics import service_timings
from pipeinfer.observe.report import stderr_console
from pipeinfer.observe.texts.json_text import without_nan

GRACE_S = 0.3
"""How long clients have to take what there is for them when the service ends."""


def run_serve(asked: ServeOptions, open_front: Callable[[Any, str], Front]) -> int:
    """`pipeinfer serve`, on every rank; returns the exit code. `open_front`: makes the front on rank 0 of its settings
    and a version, as `Setup` has it;
    raises UserError for what is wrong with them."""
    return start_prepared(
        asked, asked.run, lambda options, hosts: prepare_serve(replace(asked, run=options), hosts, open_front),
        lambda *head: Service(*head).run(),
    )  # fmt: skip


class Service:
    """Rank 0's part of one."""

    def __init__(self, context: Context, plan: JobPlan, work: ServeWork) -> None:
        self.context, self.plan, self.work = context, plan, work
        self.n_requests = plan.capacity.n_requests
        self.front, self.drain = work.front, Drain(work.drain_s)
        self.console = stderr_console()
        self._waiting: list[tuple[Ask, GenerationRequest, float]] = []  # by priority, then as they came; when
        self._open: dict[int, Open] = {}  # by the front's ids
        self._clients: dict[int, str] = {}  # of those
        self._ids: dict[Open, int] = {}
        self._is_draining = False

    def run(self) -> int:
        """Returns the exit code."""
        flag, n_ctx = self.context.flag, self.work.setup.n_ctx
        brief = f"context {n_ctx}, up to {self.n_requests} requests at a time"
        show_start(self.console, self.plan, brief, self._about(), self.work.verbose)
        self.front.start(self.work.setup)
        try:
            with open_session(self.context, self.plan, self._has_work, verbose=self.work.verbose) as session:
                flag.interrupts = self.drain
                self.session, self.pictures = session, Pictures(session, self.plan)
                self.requests = OpenRequests(self.context, session, self.work.tokenizer, self._tell)
                self.front.tell(Ready(self.work.setup.limit))
                with suppress(StopRequested):
                    self._serve()
                lost = self._stop()
        except JobError:
            self.front.close()
            raise
        self.front.close(GRACE_S if flag.reason else max(GRACE_S, self.drain.left_s))
        if lost:
            complain(lost)
        code = 1 if lost else self.drain.exit_code
        if flag.reason:
            complain(flag.reason)
        return flag.exit_code or code

    def _about(self) -> str:
        setup, policy = self.work.setup, self.work.policy.name
        return f"policy {policy}, up to {self.n_requests} requests at a time, context {setup.n_ctx}"

    def _has_work(self) -> bool:
        """Whether the front, the drain or a picture wants attention: the engine's wait ends then."""
        ends = self.drain.is_over if self._is_draining else self.drain.began
        return ends or self.front.has_news() or self.pictures.due or bool(self.front.lost())

    def _serve(self) -> None:
        """Until the service shall end."""
        while not self._has_drained():
            self.requests.step()
            if picture := self.pictures.next():
                self.front.tell(picture)

    def _has_drained(self) -> bool:
        """Take in what the front says and what the drain wants; whether that was all."""
        self._hear()
        self._admit()
        return self._is_draining and ((not self._open and not self._waiting) or self.drain.is_over)

    def _stop(self) -> str:
        """Give up what is still open, in order. Returns why the front was lost, or an empty text."""
        lost = self.front.lost()
        self.requests.stop_all()
        for id in [*self._open, *(ask.id for ask, *_ in self._waiting)]:
            self.front.tell(Ended(id, ""))
        self.session.take_figures()  # or what was asked for would come when nobody takes it
        return lost

    # -- what the front says

    def _hear(self) -> None:
        if self.drain.began and not self._is_draining:
            self._is_draining = True
            self.front.tell(Draining())
            complain(f"no further requests; {len(self._open) + len(self._waiting)} are open and have "
                     f"{self.drain.limit_s:g} s, a second signal stops them")  # fmt: skip
        for message in self.front.take():
            if isinstance(message, Ask):
                waiting = message, self._generation(message), CLOCK()
                insort(self._waiting, waiting, key=lambda each: each[0].priority)
            elif isinstance(message, Drop):
                self._drop(message.id)
            elif isinstance(message, Watch):
                self.pictures.on = message.on
            elif isinstance(message, Listening):
                if self.front.tunnel:
                    complain(f"from another machine: {self.front.tunnel}, then the same address")
                complain(f"listening on {self.front.address}")  # last: who waits for it may read no further
        if lost := self.front.lost():
            raise StopRequested(lost)

    def _generation(self, ask: Ask) -> GenerationRequest:
        return GenerationRequest(
            ask.prompt, ask.n_predict, len(ask.prompt) + max(1, ask.n_predict), ask.sampling,
            frozenset(ask.ends), ask.stops, ask.markers, ask.spans, ask.keep,
            ask.priority, ask.begun, policy=self.work.policy,
        )  # fmt: skip

    def _drop(self, id: int) -> None:
        if opened := self._open.pop(id, None):
            del self._clients[id]
            del self._ids[opened]
            self.requests.stop(opened)
        else:
            self._waiting = [each for each in self._waiting if each[0].id != id]

    # -- what becomes of it

    def _admit(self) -> None:
        """Begin those that wait, while there is room."""
        while self._waiting and self.requests.has_room(self._waiting[at := self._first()][1]):
            ask, asked, came_s = self._waiting.pop(at)
            on_turn, on_prompt = partial(self._turn, ask.id), partial(self._read, ask.id)
            opened = self.requests.begin(asked, came_s, on_turn, on_prompt)
            self._open[ask.id], self._ids[opened], self._clients[ask.id] = opened, ask.id, ask.client

    def _first(self) -> int:
        """Which of those that wait begins next: of the lowest priority, of the client with the fewest open texts, the
        one that came first."""
        n_open = Counter(self._clients.values())
        lowest = takewhile(lambda each: each[0].priority == self._waiting[0][0].priority, self._waiting)
        return min(enumerate(lowest), key=lambda each: n_open[each[1][0].client])[0]

    def _turn(self, id: int, is_running: bool) -> None:
        self.front.tell(Begun(id) if is_running else Waits(id))

    def _read(self, id: int, n_evaluated: int) -> None:
        opened = self._open[id]
        if n_evaluated < len(opened.asked.prompt):
            self.front.tell(Read(id, n_evaluated, opened.metrics.n_kept))

    def _tell(self, news: Sequence[News]) -> None:
        """In one message what has come at one time."""
        parts: list[Part] = [
            (self._ids[each.opened], [*map(int, each.tokens)], each.text, each.entries) for each in news
        ]
        token_s = news[0].opened.metrics.token_s
        self.front.tell(Came(token_s[-1] if token_s else CLOCK(), CLOCK(), parts))
        for each in news:
            if each.ended:
                id = self._ids.pop(each.opened)
                del self._open[id], self._clients[id]
                timings = without_nan(service_timings(each.opened.metrics))
                if not each.opened.asked.n_predict:
                    timings["predicted_n"] = 0
                self.front.tell(Ended(id, each.opened.finish, timings, self.session.n_runs, each.opened.printer.stop))
