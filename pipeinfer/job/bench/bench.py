"""Measure generations, one at a time: conversations with each policy, on models that are loaded once."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.job.bench.sweep import (
    WARM_UP_TOKENS,
    Group,
    Key,
    Sweep,
    SweepHead,
    Variant,
    describe,
    start_sweep,
    variants_of,
)
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.placement.model_files import open_models
from pipeinfer.job.planning.deploy import deploy
from pipeinfer.job.planning.prepare import make_request
from pipeinfer.job.requests.conversation import BenchTurn, Conversation, conversation_of
from pipeinfer.job.requests.request import GenerationRequest, fit_context
from pipeinfer.job.session.result import experiment_columns, generation_result
from pipeinfer.job.session.session import Generation, Session
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.observe.columns import Record
from pipeinfer.observe.summary import print_summary
from pipeinfer.observe.table import RESULTS
from pipeinfer.text import number


def run_sweep(sweep: Sweep) -> int:
    """`pipeinfer bench`, on every rank; returns the exit code."""
    return start_sweep(sweep, RESULTS, group_of, Bench)


@dataclass(frozen=True, slots=True)
class GenerationCase:
    """A conversation to measure: a generation for each turn, each from an empty cache."""

    variant: Variant
    request: GenerationRequest  # with the prompt of the first turn
    conversation: Conversation
    repetition: int

    @property
    def n_generations(self) -> int:
        return sum(not turn.measured for turn in self.conversation.turns)

    def without(self, plan: JobPlan, measured: Set[Key]) -> "GenerationCase | None":
        lengths = self.conversation.lengths(self.request.n_predict)
        turns = [
            replace(turn, measured=RESULTS.key_of(RESULTS.as_read(self.columns(plan, turn, length))) in measured)
            for turn, length in zip(self.conversation.turns, lengths, strict=True)
        ]
        while turns and turns[-1].measured:
            turns.pop()
        return replace(self, conversation=replace(self.conversation, turns=tuple(turns))) if turns else None

    def warm_up(self) -> "GenerationCase":
        request = replace(self.request, n_predict=min(WARM_UP_TOKENS, self.request.n_predict))
        conversation = replace(self.conversation, turns=self.conversation.turns[:1])
        return replace(self, request=request, conversation=conversation, repetition=0)

    def columns(self, plan: JobPlan, turn: BenchTurn, n_prompt: int = 0) -> Record:
        """The columns known before a turn. `n_prompt`: the expected length of its prompt."""
        settings = self.variant.settings
        row = experiment_columns(plan, self.request, settings, turn.name, turn.digest, self.repetition)
        return row | {"prompt_n": n_prompt}

    def describe(self, turn: BenchTurn) -> str:
        repeated = ["again, for its answer"] if self.repetition and turn.measured else []
        length = f"n {self.request.n_predict}"
        return describe(self.variant.settings, self.repetition, turn.name, length, *repeated)


def group_of(
    options: RunOptions, policies: Sequence[Policy], sweep: Sweep, hosts: Sequence[Host]
) -> Group[GenerationCase]:
    """The cases of policies that share loaded models. Raises UserError for what does not fit."""
    info, tokenizer = open_models(options.models.target, options.drafts_in_use)
    conversations = [conversation_of(prompt, tokenizer, sweep.cut) for prompt in sweep.prompts]
    n_predict = max(sweep.predicts)
    longest = options.changed(predict=n_predict)
    n_prompt = _longest_prompt(options.context.ctx_size, n_predict, info, conversations)
    request = make_request(longest, info, tokenizer, conversations[0].turns[0].tokens, n_prompt)
    plan = deploy(options, hosts, info, request.n_ctx, n_prompt)
    variants = variants_of(options, policies, sweep.ablations, info.layers.rewinds)
    cases = tuple(
        GenerationCase(
            variant, replace(request, prompt=conversation.turns[0].tokens, n_predict=n), conversation, repetition
        )
        for repetition in range(1, sweep.repetitions + 1)
        for conversation in conversations
        for n in sweep.predicts
        for variant in variants
    )
    return Group(plan, cases)


def _longest_prompt(ctx_size: int, n_predict: int, info: ModelInfo, conversations: Sequence[Conversation]) -> int:
    """Tokens of the longest prompt. Raises UserError if only first turns fit into the context."""
    lengths = [conversation.lengths(n_predict) for conversation in conversations]
    first, longest = max(turns[0] for turns in lengths), max(map(max, lengths))
    if longest > first:
        fit_context(ctx_size, n_predict, info, first)
        try:
            fit_context(ctx_size, n_predict, info, longest)
        except UserError as error:
            raise UserError(f"with the answers before its last turn {error}, or take fewer --turns") from None
    return longest


class Bench(SweepHead[GenerationCase]):
    """The part of rank 0."""

    def run(self) -> int:
        n = sum(case.n_generations for group in self.groups for case in group.cases)
        return self.run_all(f"{n} generations to measure", n, print_summary)

    def measure_case(self, session: Session, case: GenerationCase) -> None:
        """One turn after another: the prompt of each has the answers before it."""
        tokens: Sequence[int] = ()
        session.configure(case.variant.engine)
        policy = case.variant.settings.policy.fresh()
        for turn in case.conversation.turns:
            if self.crew.flag.reason:
                return
            self.progress.update(self.task, description=case.describe(turn))
            request = replace(case.request, prompt=case.conversation.prompt(tokens, turn), policy=policy)
            generation = session.generate(request)
            tokens = generation.request.tokens
            if case.repetition and not turn.measured and not self.crew.flag.reason:
                self._keep(session.plan, case, turn, generation)

    def _keep(self, plan: JobPlan, case: GenerationCase, turn: BenchTurn, generation: Generation) -> None:
        row = self.keep(generation_result(generation, plan, case.columns(plan, turn)).columns())
        self.progress.advance(self.task)
        accepted = number(row["acceptance_rate"])
        figures = f"{number(row['predicted_per_second'])} tokens/s"
        self.report(case.describe(turn), figures if accepted == "-" else f"{figures}, acceptance {accepted}")
        self.notice_case(case.describe(turn), generation.metrics.notices)
