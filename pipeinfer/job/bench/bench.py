"""Measure generations, one at a time: every case of a sweep, on models that are loaded once a group."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.job.bench.sweep import Group, Key, Sweep, Variant, describe, variants_of
from pipeinfer.job.bench.sweep_job import WARM_UP_TOKENS, SweepHead, start_sweep
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deploy import deploy
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.placement.model_files import open_models
from pipeinfer.job.requests.conversation import Conversation, Turn, conversation_of
from pipeinfer.job.requests.experiment import experiment_columns
from pipeinfer.job.requests.request import GenerationRequest, fit_context, make_request
from pipeinfer.job.session.outcome import make_result
from pipeinfer.job.session.session import Generation, Session
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.observe.report import number
from pipeinfer.observe.results import RESULTS, as_read, key_of, result_row
from pipeinfer.observe.summary import print_summary
from pipeinfer.observe.table import Record


def run_sweep(sweep: Sweep) -> int:
    """`pipeinfer bench`, on every rank; returns the exit code."""
    return start_sweep(sweep, RESULTS, group_of, Bench)


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation to measure: one generation a turn, each from an empty cache."""

    variant: Variant
    request: GenerationRequest  # its prompt is the first turn's
    conversation: Conversation
    repetition: int

    @property
    def n_left(self) -> int:
        """Generations to measure."""
        return sum(not turn.measured for turn in self.conversation.turns)

    def without(self, plan: JobPlan, known: Set[Key]) -> "Case | None":
        """With the turns that are `known` marked, and none after the last that is to be measured."""
        lengths = self.conversation.lengths(self.request.n_predict)
        turns = [
            replace(turn, measured=key_of(as_read(self.asked(plan, turn, length))) in known)
            for turn, length in zip(self.conversation.turns, lengths, strict=True)
        ]
        while turns and turns[-1].measured:
            turns.pop()
        return replace(self, conversation=replace(self.conversation, turns=tuple(turns))) if turns else None

    def asked(self, plan: JobPlan, turn: Turn, n_prompt: int = 0) -> Record:
        """The columns that say what is asked of a turn. `n_prompt`: as it will be; without it the generation tells."""
        settings = self.variant.settings
        row = experiment_columns(plan, self.request, settings, turn.name, turn.digest, self.repetition)
        return row | {"prompt_n": n_prompt}


def group_of(options: RunOptions, policies: Sequence[Policy], sweep: Sweep, hosts: Sequence[Host]) -> Group[Case]:
    """What is measured of some policies on what they share, a generation at a time."""
    info, tokenizer = open_models(options.model, options.drafts_in_use)
    conversations = [conversation_of(prompt, tokenizer, sweep.cut) for prompt in sweep.prompts]
    n_predict = max(sweep.predicts)
    longest = replace(options, predict=n_predict)
    n_prompt = _longest_prompt(options.ctx_size, n_predict, info, conversations)
    request = make_request(longest, info, tokenizer, conversations[0].turns[0].tokens, n_prompt)
    plan = deploy(options, hosts, info, request.n_ctx, n_prompt)
    measured = variants_of(options, policies, sweep.ablations, info.layers.rewinds)
    cases = tuple(
        Case(
            chosen,
            replace(request, prompt=conversation.turns[0].tokens, n_predict=n),
            conversation,
            repetition,
        )
        for repetition in range(1, sweep.repetitions + 1)
        for conversation in conversations
        for n in sweep.predicts
        for chosen in measured
    )
    return Group(plan, cases)


def _longest_prompt(ctx_size: int, n_predict: int, info: ModelInfo, conversations: Sequence[Conversation]) -> int:
    """Tokens of the longest prompt. Raises UserError when only first turns fit into the context."""
    lengths = [conversation.lengths(n_predict) for conversation in conversations]
    first, longest = max(turns[0] for turns in lengths), max(map(max, lengths))
    if longest > first:
        fit_context(ctx_size, n_predict, info, first)
        try:
            fit_context(ctx_size, n_predict, info, longest)
        except UserError as error:
            raise UserError(f"with the answers before its last turn {error}, or take fewer --turns") from None
    return longest


class Bench(SweepHead[Case]):
    """Rank 0's part of a sweep."""

    def run(self) -> int:
        """Returns the exit code."""
        n_left = sum(case.n_left for group in self.groups for case in group.cases)
        return self.run_all(f"{n_left} generations to measure", n_left, print_summary)

    def measure(self, session: Session, group: Group[Case]) -> None:
        for case in [*[_warm_up(group.cases[0])] * self.sweep.warm_up, *group.cases]:
            self._measure(session, case)

    def _measure(self, session: Session, case: Case) -> None:
        """One turn after another; each one's prompt needs the answers before it."""
        said: Sequence[int] = ()
        session.unlearn()  # no case gains by those before it
        settings = case.variant.settings
        policy = settings.policy.fresh()
        for turn in case.conversation.turns:
            if self.crew.flag.reason:
                return
            self.progress.update(self.task, description=describe(settings, case.repetition, *_about(case, turn)))
            request = replace(case.request, prompt=case.conversation.prompt(said, turn), policy=policy)
            generation = session.generate(request, lambda tokens: None, settings=case.variant.engine)
            said = generation.request.tokens
            if case.repetition and not turn.measured and not self.crew.flag.reason:
                self._keep(session.plan, case, turn, generation)

    def _keep(self, plan: JobPlan, case: Case, turn: Turn, generation: Generation) -> None:
        asked = case.asked(plan, turn)
        row = self.keep(result_row(make_result("", generation, plan, asked), asked))
        self.progress.advance(self.task)
        about = describe(case.variant.settings, case.repetition, *_about(case, turn))
        if self.progress.disable:
            speed, accepted = number(row["predicted_per_second"]), number(row["acceptance_rate"])
            figures = f"{speed} tokens/s" + ("" if accepted == "-" else f", acceptance {accepted}")
            self.console.print(f"[{len(self.rows)}] {about}: {figures}", markup=False)
        name = about.rpartition(", ")[0]  # whichever repetition
        self.notice(name, [f"{name}: {notice}" for notice in generation.metrics.notices])


def _warm_up(case: Case) -> Case:
    """A short generation like this case's first, that no row is kept of."""
    request = replace(case.request, n_predict=min(WARM_UP_TOKENS, case.request.n_predict))
    return replace(
        case, request=request, conversation=replace(case.conversation, turns=case.conversation.turns[:1]), repetition=0
    )


def _about(case: Case, turn: Turn) -> list[str]:
    again = ["again, for its answer"] if case.repetition and turn.measured else []
    return [turn.name, f"n {case.request.n_predict}", *again]
