"""The cases of a benchmark: every combination of a sweep, grouped by what is loaded together. Measures nothing."""

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from pipeinfer.cluster.assignment import draft_widths, parse_split, stage_ranks
from pipeinfer.cluster.hosts.host import Host
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.text_sections import Loads
from pipeinfer.job.placement.checks import open_models
from pipeinfer.job.placement.job_plan import EngineSettings, JobPlan, engine_settings
from pipeinfer.job.planning.deploy import deploy
from pipeinfer.job.planning.prepare import make_request, with_trained_context
from pipeinfer.job.requests.bench_prompts import BenchPrompt, BenchTurn, Conversation, conversation_of, first_turns
from pipeinfer.job.requests.request import GenerationRequest, fit_context
from pipeinfer.job.session.result import ExperimentSettings, experiment_columns
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.observe.columns import Record, digest
from pipeinfer.observe.summary import arrival_text
from pipeinfer.observe.table import LOADS, RESULTS, Table
from pipeinfer.policies import POLICIES, ablations_of

WARM_UP_TOKENS = 16
SEED_END = 2**32
PLAN_COLUMNS = ("numerics_name", "plan_hash")
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Lists to combine. `base`: the options of all measurements. `warm_up`: generations before those that count.
    `output`: the format of the summary. `resume`: leave out what --results has."""

    base: RunOptions
    pairs: tuple[tuple[Path, tuple[Path, ...]], ...]
    policies: tuple[Policy, ...]
    splits: tuple[str, ...]
    prompts: tuple[BenchPrompt, ...]
    predicts: tuple[int, ...]
    ablations: tuple[str, ...]
    repetitions: int
    cut: int = 0  # longest prompt in tokens; 0: as they are
    loads: Loads | None = None
    warm_up: int = 0
    output: str = "md"
    resume: bool = False

    @property
    def table(self) -> Table:
        return LOADS if self.loads else RESULTS


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy, whole or without a part, and the settings of the engine for it."""

    settings: ExperimentSettings
    engine: EngineSettings


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. `repetition` 0: a warm-up."""

    variant: Variant
    repetition: int

    def text(self, *about: str) -> str:
        number = f"repetition {self.repetition}" if self.repetition else "warm-up"
        settings = self.variant.settings
        return ", ".join(filter(None, (settings.policy.name, settings.variant, *about, number)))


@dataclass(frozen=True, slots=True)
class GenerationCase(Case):
    """A conversation: a generation for each turn, each from an empty cache. `request`: of the first turn."""

    request: GenerationRequest
    conversation: Conversation

    @property
    def n_requests(self) -> int:
        return sum(not turn.measured for turn in self.conversation.turns)

    def without(self, plan: JobPlan, measured: Set[Key]) -> "GenerationCase | None":
        """The part that is not in `measured`; None if there is none."""
        lengths = self.conversation.lengths(self.request.n_predict)
        rows = map(self.columns, [plan] * len(lengths), self.conversation.turns, lengths)
        turns = [
            replace(turn, measured=RESULTS.key_of(RESULTS.as_read(row)) in measured)
            for turn, row in zip(self.conversation.turns, rows, strict=True)
        ]
        while turns and turns[-1].measured:
            turns.pop()
        return replace(self, conversation=replace(self.conversation, turns=tuple(turns))) if turns else None

    def warm_up(self) -> "GenerationCase":
        """A short case that begins like this one."""
        request = replace(self.request, n_predict=min(WARM_UP_TOKENS, self.request.n_predict))
        conversation = replace(self.conversation, turns=self.conversation.turns[:1])
        return replace(self, request=request, conversation=conversation, repetition=0)

    def columns(self, plan: JobPlan, turn: BenchTurn, n_prompt: int = 0) -> Record:
        """The columns known before a turn. `n_prompt`: the expected length of its prompt."""
        prompt = {"prompt": turn.name, "prompt_hash": turn.digest, "prompt_n": n_prompt}
        row = experiment_columns(plan, self.request, self.variant.settings)
        return row | prompt | {"repetition": self.repetition}

    def describe(self, turn: BenchTurn) -> str:
        repeated = ["again, for its answer"] if self.repetition and turn.measured else []
        return self.text(turn.name, f"n {self.request.n_predict}", *repeated)


@dataclass(frozen=True, slots=True)
class LoadCase(Case):
    """Many requests. `concurrency` 0: they come at a `rate`. `prompt`: their texts' name. `parallel`: open at most."""

    requests: tuple[GenerationRequest, ...]
    prompt: str
    concurrency: int
    rate: float
    parallel: int

    @property
    def n_requests(self) -> int:
        return len(self.requests)

    def without(self, plan: JobPlan, measured: Set[Key]) -> "LoadCase | None":
        return None if LOADS.key_of(LOADS.as_read(self.columns(plan))) in measured else self

    def warm_up(self) -> "LoadCase":
        first = self.requests[0]
        first = replace(first, n_predict=min(WARM_UP_TOKENS, first.n_predict))
        return replace(self, requests=(first,), concurrency=1, repetition=0)

    def columns(self, plan: JobPlan) -> Record:
        """The columns known before the load."""
        first = self.requests[0]
        row = experiment_columns(plan, first, self.variant.settings)
        return {name: value for name, value in row.items() if name in (*LOADS.key, *PLAN_COLUMNS)} | {
            "prompt": self.prompt,
            "prompt_hash": digest([request.prompt for request in self.requests]),
            "repetition": self.repetition,
            "n_requests": len(self.requests),
            "predict": first.n_predict,
            "concurrency": self.concurrency,
            "rate": math.nan if self.concurrency else self.rate,
            "parallel": plan.capacity.n_requests,
        }

    def describe(self) -> str:
        arrival = {"concurrency": self.concurrency, "rate": self.rate, "parallel": self.parallel}
        return self.text(arrival_text(arrival), f"n {self.requests[0].n_predict}")


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that share loaded models."""

    plan: JobPlan
    cases: Sequence[GenerationCase | LoadCase]

    def without(self, measured: Set[Key]) -> "Group":
        """The group without what is in `measured`."""
        cases = [case.without(self.plan, measured) for case in self.cases]
        return replace(self, cases=tuple(case for case in cases if case))


# -- groups


def check_ablations(sweep: Sweep) -> None:
    """Raises UserError if a part to switch off belongs to no policy of the sweep."""
    for name in sweep.ablations:
        if not any(name in ablations_of(type(policy)) for policy in sweep.policies):
            having = " or ".join(policy for policy, kind in POLICIES.items() if name in ablations_of(kind))
            raise UserError(
                f"--ablate {name} is about {having}, which --policy does not name; name it too, or leave {name} out"
            )


def parts_off(policy: Policy, ablations: Sequence[str]) -> list[str]:
    """What of `ablations` the policy's preset has off, so that nothing is left to switch off."""
    return [name for name in ablations if getattr(policy, name, None) is False]


def loaded_together(sweep: Sweep) -> Iterator[tuple[RunOptions, tuple[Policy, ...]]]:
    """Options of what is loaded together, without the split, and the policies measured on it."""
    base, draft_split = sweep.base, sweep.base.placement.draft_split
    for model, drafts in sweep.pairs:
        cut = draft_split if len(drafts) == 1 + len(draft_split) else ()
        of_models = base.changed(target=model, drafts=drafts, draft_split=cut)
        for policies in _loaded_alike(sweep.policies):
            yield of_models.changed(policy=policies[0], also=policies[1:]), policies


def plan_groups(sweep: Sweep, hosts_of: Sequence[Sequence[Host]]) -> list[Group]:
    """Groups by model, then policy. `hosts_of`: of `loaded_together`. Raises UserError for a wrong combination."""
    check_ablations(sweep)
    groups, make_group = list[Group](), load_group if sweep.loads else generation_group
    unused, draft_split = set(sweep.splits), sweep.base.placement.draft_split
    most = max(len(drafts) for _, drafts in sweep.pairs)
    if all(len(drafts) != 1 + len(draft_split) for _, drafts in sweep.pairs):
        draft_widths(most, draft_split)
    for (options, policies), hosts in zip(loaded_together(sweep), hosts_of, strict=True):
        widths = draft_widths(len(options.models.drafts), options.placement.draft_split) if policies[0].drafts else ()
        n_stages = len(stage_ranks(len(hosts), widths))
        fitting = [split for split in sweep.splits if len(parse_split(split)) == n_stages]
        unused -= set(fitting)
        by_split = [options.changed(layer_split=split) for split in fitting] or [options]
        groups += [make_group(chosen, policies, sweep, hosts) for chosen in by_split]
    if unused:
        split = min(unused)
        raise UserError(
            f"--layer-split {split} has {len(parse_split(split))} parts, and no policy here has as many stages on "
            f"{len(hosts_of[0])} ranks; a draft takes one rank of them, or as many as --draft-split says"
        )
    return groups


def _loaded_alike(policies: Sequence[Policy]) -> Iterator[tuple[Policy, ...]]:
    """Neighbouring policies with a draft, or without one: that leaves the target one rank more."""
    together: tuple[Policy, ...] = ()
    for policy in policies:
        if together and policy.drafts != together[0].drafts:
            yield together
            together = ()
        together += (policy,)
    if together:
        yield together


def variants_of(
    options: RunOptions, policies: Sequence[Policy], ablations: Sequence[str], rewinds: bool
) -> list[Variant]:
    """Every policy, whole and without each part of `ablations` that it has. `rewinds`: as in `engine_settings`."""
    variants = (options.changed(**change) for policy in policies for change in _changes(policy, ablations))
    n = options.traffic.parallel
    return [Variant(ExperimentSettings.of(each), engine_settings(each.speculation, n, rewinds)) for each in variants]


def _changes(policy: Policy, ablations: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Changed options: for the whole policy, then without each part of `ablations` that it has."""
    yield {"policy": policy}
    off = parts_off(policy, ablations)
    for name in (name for name in ablations if name in ablations_of(type(policy)) and name not in off):
        yield {"policy": policy, name: False} if name in policy.uses else {"policy": replace(policy, **{name: False})}


def generation_group(options: RunOptions, policies: Sequence[Policy], sweep: Sweep, hosts: Sequence[Host]) -> Group:
    """The cases of policies that share loaded models. Raises UserError for what does not fit."""
    info, drafts, tokenizer = open_models(options)
    options = with_trained_context(options, info)
    conversations = [conversation_of(prompt, tokenizer, sweep.cut) for prompt in sweep.prompts]
    n_predict = max(sweep.predicts)
    n_prompt = _longest_prompt(options.context.ctx_size, n_predict, info, conversations)
    first = conversations[0].turns[0].tokens
    request = make_request(options.changed(predict=n_predict), info, tokenizer, first, n_prompt)
    plan = deploy(options, hosts, info, drafts, request.n_ctx, n_prompt)
    variants = variants_of(options, policies, sweep.ablations, info.layers.rewinds)
    repetitions = range(1, sweep.repetitions + 1)
    return Group(
        plan,
        [
            GenerationCase(variant, repetition, replace(request, prompt=each.turns[0].tokens, n_predict=n), each)
            for repetition, each, n, variant in product(repetitions, conversations, sweep.predicts, variants)
        ],
    )


def _longest_prompt(
    ctx_size: int | None, n_predict: int, info: ModelInfo, conversations: Sequence[Conversation]
) -> int:
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


def n_requests(loads: Loads, n_prompts: int) -> int:
    """Requests of a load: --requests, or every prompt once, but at least twice the largest concurrency."""
    return loads.requests or max(n_prompts, 2 * loads.most_clients)


def load_group(options: RunOptions, policies: Sequence[Policy], sweep: Sweep, hosts: Sequence[Host]) -> Group:
    """The cases of loads of policies that share loaded models. Raises UserError for what does not fit."""
    info, drafts, tokenizer = open_models(options)
    options = with_trained_context(options, info)
    loads, ctx_size, parallel = sweep.loads or Loads(), options.context.ctx_size, options.traffic.parallel
    prompts = first_turns(sweep.prompts, n_requests(loads, len(sweep.prompts)), tokenizer, sweep.cut)
    n_predict, n_prompt = max(sweep.predicts), max(map(len, prompts))
    request = make_request(options.changed(predict=n_predict, ctx_size=None), info, tokenizer, prompts[0], n_prompt)
    n_ctx = ctx_size or min(len(prompts), parallel) * (n_prompt + n_predict)
    _check_room(ctx_size, n_ctx, n_prompt + n_predict, loads)
    plan = deploy(options, hosts, info, drafts, n_ctx, n_prompt)
    name = "+".join(dict.fromkeys(prompt.name.partition("/")[0] for prompt in sweep.prompts))
    points = [(count, math.nan) for count in loads.concurrencies] + [(0, rate) for rate in loads.rates]
    variants = variants_of(options, policies, sweep.ablations, info.layers.rewinds)
    repetitions = range(1, sweep.repetitions + 1)
    return Group(
        plan,
        [
            LoadCase(variant, repetition, _requests(request, prompts, n, repetition), name, *point, parallel)
            for repetition, n, point, variant in product(repetitions, sweep.predicts, points, variants)
        ],
    )


def _requests(
    like: GenerationRequest, prompts: Sequence[tuple[int, ...]], n_predict: int, repetition: int
) -> tuple[GenerationRequest, ...]:
    """A request for each prompt, with consecutive seeds, which differ between repetitions."""
    first = like.sampling.seed + (repetition - 1) * len(prompts)
    samplings = [replace(like.sampling, seed=(first + number) % SEED_END) for number in range(len(prompts))]
    return tuple(
        replace(like, prompt=prompt, n_predict=n_predict, n_ctx=len(prompt) + n_predict, sampling=sampling)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    )


def _check_room(ctx_size: int | None, n_ctx: int, longest: int, loads: Loads) -> None:
    """Raises UserError if the requests of all clients cannot be open at a time."""
    most = max(loads.concurrencies, default=1)
    if n_ctx < most * longest:
        clients = f"{most} requests of up to {longest} tokens" if most > 1 else f"a request of up to {longest} tokens"
        way_out = f"use -c {most * longest}, or leave it out"
        raise UserError(f"-c {ctx_size} has no room for {clients}, prompt and text; {way_out}")
