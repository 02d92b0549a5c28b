"""A service in one MPI job: clients' requests share the loaded models; snapshots show how busy ranks are. No HTTP."""

import os
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

from pipeinfer.cluster.hosts.host import Host
from pipeinfer.cluster.hosts.launch import is_by_open_mpi
from pipeinfer.core.policy import Policy
from pipeinfer.errors import HostFault, JobError, StopRequested
from pipeinfer.job.launch import CLOCK, Context
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.plan_table import show_start
from pipeinfer.job.planning.prepare import defaults_of, deploy_largest, open_job, start_prepared
from pipeinfer.job.process.stop import Drain
from pipeinfer.job.process.streams import complain
from pipeinfer.job.process.supervised import own_attempt
from pipeinfer.job.requests.chat_format import ChatFormat, open_format
from pipeinfer.job.requests.request import DEFAULT_CTX
from pipeinfer.job.serve.channel import (
    Ask,
    Cancel,
    Draining,
    Finished,
    Front,
    Listening,
    Preempted,
    PromptProgress,
    PromptScores,
    Ready,
    SendSnapshots,
    Setup,
    Snapshot,
    Started,
    TextUpdate,
    TextUpdates,
)
from pipeinfer.job.session.ranks import Figures, LoadedRanks
from pipeinfer.job.session.result import RankUses
from pipeinfer.job.session.session import OpenRequest, Output, Session, open_session
from pipeinfer.models.text.chat_template import TemplateFault
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.figures import service_timings
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.observe.report import stderr_console
from pipeinfer.text import without_nan

PERIOD_S = 0.5  # seconds between snapshots
MAX_RECORDS = 2000  # of rank 0, after which reports are requested without a watcher: they take less than 1 MB
USES = ("busy", "cancelled", "waiting", "idle")


class Snapshots:
    """`on`: a client watches."""

    def __init__(self, ranks: LoadedRanks) -> None:
        self.ranks, self.plan, self.clock, self.on = ranks, ranks.plan, ranks.context.clock, False
        self._request_s = self.clock()
        self._uses = RankUses(self.plan, self._request_s)
        self._figures: Figures | None = None

    @property
    def due(self) -> bool:
        """Whether `next` has something to do. Called in every wait."""
        if self.ranks.awaits_figures:
            self._figures = self._figures or self.ranks.poll_figures()
            return self._figures is not None
        return self.on and self.clock.real_s(self.clock() - self._request_s) >= PERIOD_S

    def next(self) -> Snapshot | None:
        """A new snapshot, if there is one; requests the reports for the next."""
        if self.due and self._figures:
            figures, self._figures = self._figures, None
            return self._snapshot(figures)
        if not self.ranks.awaits_figures and (self.due or self.ranks.n_records >= MAX_RECORDS):
            self._request_s = self.clock()
            self.ranks.request_figures()
        return None

    def end(self) -> str:
        """Take the last reports; a warning for ranks that were slower than --pace, else empty."""
        if self._figures:
            self._snapshot(self._figures)
        self._request_s = self.clock()
        self._snapshot(self.ranks.take_figures())
        return self._uses.missed_pace

    def _snapshot(self, figures: Figures) -> Snapshot:
        seconds, uses = self._request_s - self._uses.noted_s, self._uses.note(figures, self._request_s)
        ranks = []
        for rank, use in uses.items():
            shares = {name: getattr(use, f"{name}_s") / max(seconds, 1e-9) for name in USES}
            ranks.append({"rank": rank, "role": self.plan.assignment.describe(rank)} | shares)
        return Snapshot(seconds, ranks)


GRACE_S = 0.3  # how long clients have to receive their last output when the service ends


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """`run`: of the job, and defaults of requests. `front`: its settings. `drain_s`: for open requests at the end."""

    run: RunOptions
    front: Any
    drain_s: float = 30.0


OpenFront = Callable[[Any, Setup], Front]


def _prepare(
    options: RunOptions, hosts: Sequence[Host], service: ServeOptions, open_front: OpenFront
) -> "tuple[JobPlan, Service]":
    """Raises UserError for whatever is wrong with options and files."""
    options, info, drafts, tokenizer = open_job(options)
    context, parallel = options.context, options.traffic.parallel
    n_ctx = context.ctx_size or parallel * min(info.n_ctx_train, DEFAULT_CTX)  # tokens
    n_least = min(info.n_ctx_train, context.fit_ctx)
    plan = deploy_largest(options, hosts, info, drafts, n_ctx, n_least, info.n_ctx_train)
    n_ctx, timeout_s = plan.capacity.n_ctx, options.placement.rank_timeout_s
    defaults = defaults_of(options, adapters=plan.adapters)
    sizes = n_ctx, min(n_ctx, info.n_ctx_train), max(1, n_ctx // parallel)
    version = f"{info.fingerprint[:12]}-{plan.text_numerics}"
    context = replace(context, kv_disk=plan.kv_disk, kv_dir=None)
    texts = options.text, context, defaults, parallel, timeout_s
    speculates = bool(plan.drafts) or options.speculation.looks_up
    setup = Setup(options.models.target, *texts, *sizes, version, plan.fitted, speculates)
    front = open_front(service.front, setup)
    try:
        _check_template(open_format(options.text, info, tokenizer))
    except BaseException:
        front.close()
        raise
    policy, verbose = options.speculation.policy, options.output.verbose
    return plan, Service(plan, front, setup, tokenizer, policy, Drain(service.drain_s), verbose)


def _check_template(format: ChatFormat | None) -> None:
    """Warn of a broken template, which the front opens again: the model still completes texts."""
    try:
        if format:
            format.template.check()
    except TemplateFault as fault:
        complain(f"{fault}; until then chats are refused")
    except HostFault as fault:  # each chat tries again
        complain(str(fault))


def run_serve(service: ServeOptions, open_front: OpenFront) -> int:
    """On every rank; returns the exit code. `open_front`: makes rank 0's front of both settings; raises UserError."""
    prepare = partial(_prepare, service=service, open_front=open_front)
    return start_prepared(service, service.run, prepare)


@dataclass(slots=True)
class Service:
    """Rank 0's part of a service."""

    plan: JobPlan
    front: Front
    setup: Setup
    tokenizer: Tokenizer
    policy: Policy
    drain: Drain
    verbose: bool
    context: Context = field(init=False)
    session: Session = field(init=False)
    snapshots: Snapshots = field(init=False)
    _waiting: list[tuple[Ask, float]] = field(default_factory=list)  # by priority, then by their time of arrival
    _open: dict[int, OpenRequest] = field(default_factory=dict)  # by the front's ids; the origin of each is its Ask
    _is_draining: bool = False

    def run(self, context: Context) -> int:
        """Returns the exit code."""
        self.context, flag, size = context, context.flag, f"context {self.setup.n_ctx}"
        at_once = f"up to {self.plan.capacity.n_requests} requests at a time"
        about = f"policy {self.policy.name}, {at_once}, {size}"
        show_start(stderr_console(), self.plan, f"{size}, {at_once}", about, self.verbose)
        try:
            opened = open_session(context, self.plan, self.tokenizer, self._has_work, verbose=self.verbose)
            with opened as self.session:
                flag.interrupts, self.snapshots = self.drain, Snapshots(self.session.ranks)
                self.front.tell(Ready(self.setup.limit))
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

    def _has_work(self) -> bool:
        """Whether to end the engine's wait: for the front, the drain or a snapshot."""
        ends = self.drain.is_over if self._is_draining else self.drain.began
        return ends or self.front.has_news() or self.snapshots.due or bool(self.front.lost())

    def _serve(self) -> None:
        while not self._has_drained():
            self.session.engine.step()
            if snapshot := self.snapshots.next():
                self.front.tell(snapshot)

    def _has_drained(self) -> bool:
        """Handle the front's messages and the drain. Returns whether nothing is left to do."""
        self._hear()
        self._admit()
        return self._is_draining and ((not self._open and not self._waiting) or self.drain.is_over)

    def _stop(self) -> str:
        """Stop what is still open, in order. Returns why the front was lost, or an empty text."""
        self.front.has_news()  # a heartbeat may have come during a long run
        lost = self.front.lost()
        self.session.stop_all()
        for id in [*self._open, *(ask.id for ask, *_ in self._waiting)]:
            self.front.tell(Finished(id, ""))
        if notice := self.snapshots.end():  # reports that were requested must not arrive after the loop
            complain(notice)
        return lost

    # -- messages of the front

    def _hear(self) -> None:
        if self.drain.began and not self._is_draining:
            self._is_draining = True
            self.front.tell(Draining())
            n_open = len(self._open) + len(self._waiting)
            limit = f"{n_open} are open and have {self.drain.limit_s:g} s"
            complain(f"no further requests; {limit}, a second signal stops them")
        for message in self.front.take():
            if isinstance(message, Ask):
                ask = replace(message, request=message.request.with_policy(self.policy))
                insort(self._waiting, (ask, self.context.clock()), key=lambda each: each[0].request.priority)
            elif isinstance(message, Cancel):
                self._drop(message.id)
            elif isinstance(message, SendSnapshots):
                self.snapshots.on = message.on
            elif isinstance(message, Listening):
                if is_by_open_mpi() and not own_attempt():
                    stop = f"kill -TERM {os.getpid()}"
                    complain(f"Open MPI's launcher ends open requests at once; to let them finish: {stop} on this host")
                if self.front.tunnel:
                    complain(f"from another machine: {self.front.tunnel}")
                complain(f"listening on {self.front.address}")  # last: a script may read no further
        if lost := self.front.lost():
            raise StopRequested(lost)

    def _drop(self, id: int) -> None:
        if opened := self._open.pop(id, None):
            self.session.stop(opened)
        else:
            self._waiting = [each for each in self._waiting if each[0].id != id]

    # -- messages to the front

    def _admit(self) -> None:
        while self._waiting and self.session.has_room(self._waiting[at := self._first()][0].request):
            ask, arrival_s = self._waiting.pop(at)
            on_prompt, on_running = partial(self._read, ask.id), partial(self._turn, ask.id)
            metrics = RequestMetrics(on_prompt=on_prompt, on_running=on_running, on_notice=self.session.notices.hear)
            self._open[ask.id] = opened = self.session.begin(ask.request, self._tell, metrics)
            opened.origin, metrics.submitted_s = ask, arrival_s

    def _first(self) -> int:
        """The next waiting request: of the lowest priority number, of the client with the fewest open, the first."""
        n_open = Counter(opened.origin.client for opened in self._open.values())
        asks = [ask for ask, _ in self._waiting]
        lowest = takewhile(lambda ask: ask.request.priority == asks[0].request.priority, asks)
        return min(enumerate(lowest), key=lambda each: n_open[each[1].client])[0]

    def _turn(self, id: int, is_running: bool) -> None:
        self.front.tell(Started(id) if is_running else Preempted(id))

    def _read(self, id: int, n_evaluated: int) -> None:
        opened = self._open[id]
        if n_evaluated < len(opened.request.prompt):
            self.front.tell(PromptProgress(id, n_evaluated, opened.metrics.n_kept))

    def _tell(self, outputs: Sequence[Output]) -> None:
        """Send the output of one run in one message."""
        parts: list[TextUpdate] = [
            (each.opened.origin.id, [*map(int, each.tokens)], each.text, each.entries) for each in outputs
        ]
        for each in outputs:
            if each.scores is not None:
                self.front.tell(PromptScores(each.opened.origin.id, each.scores))
            metrics = each.opened.metrics
            if metrics.n_kept and len(metrics.token_s) <= len(each.tokens):  # the first ones
                id, n_prompt = each.opened.origin.id, len(each.opened.request.prompt)
                self.front.tell(PromptProgress(id, n_prompt, metrics.n_kept))
        token_s = outputs[0].opened.metrics.token_s
        at_s = self.context.clock.real_s(token_s[-1]) if token_s else CLOCK()
        self.front.tell(TextUpdates(at_s, CLOCK(), parts))
        for each in outputs:
            if each.ended:
                id = each.opened.origin.id
                del self._open[id]
                timings = without_nan(service_timings(each.opened.metrics))
                if not each.opened.request.n_predict:
                    timings["predicted_n"] = 0
                n_runs, stop = self.session.ranks.n_runs, each.opened.printer.stop
                self.front.tell(Finished(id, each.opened.finish, timings, n_runs, stop))
