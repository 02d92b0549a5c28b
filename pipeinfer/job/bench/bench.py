"""Measure generations, one at a time: every case of a sweep, on models that are loaded once a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.job.bench.sweep import Case, Group, Sweep, group_of, plan_groups
from pipeinfer.job.bench.sweep_job import SweepHead, start_sweep
from pipeinfer.job.launch.start import Crew
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deployment import Deployment
from pipeinfer.job.planning.prepare import check_outputs
from pipeinfer.job.requests.conversation import Turn
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.session.outcome import make_result
from pipeinfer.job.session.session import Generation, Session
from pipeinfer.observe.experiment import variant_text
from pipeinfer.observe.report import number
from pipeinfer.observe.results import RESULTS, key_of, read_results, result_row
from pipeinfer.observe.summary import print_summary

WARM_UP_TOKENS = 16


def run_sweep(sweep: Sweep, warm_up: int, output: str, resume: bool) -> int:
    """`pipeinfer bench`, on every rank; returns the exit code."""

    def plan(sweep: Sweep, hosts_of: Sequence[Sequence[Host]]) -> list[Group]:
        return _plan(sweep, hosts_of, resume)

    return start_sweep(sweep, sweep, plan, lambda crew, groups: Bench(crew, groups, warm_up).run(output))


def _plan(sweep: Sweep, hosts_of: Sequence[Sequence[Host]], resume: bool) -> list[Group]:
    check_outputs(sweep.base)
    groups = plan_groups(sweep, hosts_of, group_of)
    path = sweep.base.results
    if not resume or not path or not path.exists() or not path.stat().st_size:
        return groups
    known = {key_of(row) for row in read_results(path)}
    return [left for left in (group.without(known) for group in groups) if left.cases]


class Bench(SweepHead[Group]):
    """Rank 0's part of a sweep."""

    def __init__(self, crew: Crew, groups: list[Group], warm_up: int) -> None:
        super().__init__(crew, groups, RESULTS)
        self.warm_up = warm_up

    def run(self, output: str) -> int:
        """Returns the exit code."""
        n_left = sum(case.n_left for group in self.groups for case in group.cases)
        return self.run_all(f"{n_left} generations to measure", n_left, lambda rows: print_summary(rows, output))

    def measure(self, session: Session, group: Group) -> None:
        for case in [*[_warm_up(group.cases[0])] * self.warm_up, *group.cases]:
            self._measure(session, case)

    def _measure(self, session: Session, case: Case) -> None:
        """One turn after another; each one's prompt needs the answers before it."""
        said: Sequence[int] = ()
        for turn in case.conversation.turns:
            if self.crew.flag.reason:
                return
            self.progress.update(self.task, description=_describe(case, turn))
            request = replace(case.request, prompt=case.conversation.prompt(said, turn))
            generation = self._generate(session, request, case.options)
            said = generation.request.tokens
            if case.repetition and not turn.measured and not self.crew.flag.reason:
                self._keep(session.deployment, case, turn, generation)

    def _generate(self, session: Session, request: GenerationRequest, options: RunOptions) -> Generation:
        return session.generate(request, options, options.policy.begin(), lambda tokens: None)

    def _keep(self, deployment: Deployment, case: Case, turn: Turn, generation: Generation) -> None:
        asked = case.asked(deployment, turn)
        row = self.keep(case.options, result_row(make_result("", generation, deployment, asked), asked))
        self.progress.advance(self.task)
        if self.progress.disable:
            speed, accepted = number(row["predicted_per_second"]), number(row["acceptance_rate"])
            figures = f"{speed} tokens/s" + ("" if accepted == "-" else f", acceptance {accepted}")
            self.console.print(f"[{len(self.rows)}] {_describe(case, turn)}: {figures}", markup=False)
        name = _named(case, turn)
        self.notice(name, [f"{name}: {notice}" for notice in generation.metrics.notices])


def _warm_up(case: Case) -> Case:
    """A short generation like this case's first, that no row is kept of."""
    request = replace(case.request, n_predict=min(WARM_UP_TOKENS, case.request.n_predict))
    return replace(
        case, request=request, conversation=replace(case.conversation, turns=case.conversation.turns[:1]), repetition=0
    )


def _describe(case: Case, turn: Turn) -> str:
    about = f"repetition {case.repetition}" if case.repetition else "warm-up"
    again = ["again, for its answer"] if case.repetition and turn.measured else []
    return ", ".join([_named(case, turn), about, *again])


def _named(case: Case, turn: Turn) -> str:
    """A measurement, whichever of its repetitions."""
    options = case.options
    variant = variant_text(options.policy, options.cancel, options.partitions)
    return ", ".join(filter(None, (options.policy.name, variant, turn.name, f"n {case.request.n_predict}")))
