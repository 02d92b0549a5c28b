"""What a benchmark measures: every combination of models, policies, splits, prompts and lengths, grouped by what must
be loaded together. Plans and checks; runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.plan import draft_widths, parse_split, stage_ranks
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deployment import Deployment, deploy
from pipeinfer.job.placement.model_files import open_models
from pipeinfer.job.requests.asked import asked_of
from pipeinfer.job.requests.conversation import Conversation, Prompt, Turn, conversation_of
from pipeinfer.job.requests.request import GenerationRequest, fit_context, make_request
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.observe.results import Record, as_read, key_of
from pipeinfer.policies.registry import POLICIES, ablations_of

Key = tuple[object, ...]
G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Lists of what to combine. `base` has everything that all measurements share."""

    base: RunOptions
    pairs: tuple[tuple[Path, tuple[Path, ...]], ...]
    policies: tuple[Policy, ...]
    splits: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    predicts: tuple[int, ...]
    ablations: tuple[str, ...]
    repetitions: int
    cut: int  # longest prompt in tokens; 0: as they are


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation to measure: one generation a turn, each from an empty cache."""

    options: RunOptions
    request: GenerationRequest  # its prompt is the first turn's
    conversation: Conversation
    repetition: int

    @property
    def n_left(self) -> int:
        """Generations to measure."""
        return sum(not turn.measured for turn in self.conversation.turns)

    def without(self, deployment: Deployment, known: Set[Key]) -> Case:
        """The same with the turns that are `known` marked, and none after the last that is to be measured."""
        lengths = self.conversation.lengths(self.request.n_predict)
        turns = [
            replace(turn, measured=key_of(as_read(self.asked(deployment, turn, length))) in known)
            for turn, length in zip(self.conversation.turns, lengths, strict=True)
        ]
        while turns and turns[-1].measured:
            turns.pop()
        return replace(self, conversation=replace(self.conversation, turns=tuple(turns)))

    def asked(self, deployment: Deployment, turn: Turn, n_prompt: int = 0) -> Record:
        """The columns that say what is asked of a turn. `n_prompt`: as it will be; without it the generation tells."""
        row = asked_of(deployment, self.request, self.options, turn.name, turn.digest, self.repetition)
        return row | {"prompt_n": n_prompt}


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that share the loaded models. `options` and `deployment` say what to load, on every rank."""

    options: RunOptions
    deployment: Deployment
    cases: tuple[Case, ...]

    def without(self, known: Set[Key]) -> Group:
        """The same with the cases in which something is left to be measured."""
        left = [case.without(self.deployment, known) for case in self.cases]
        return replace(self, cases=tuple(case for case in left if case.n_left))


MakeGroup = Callable[[RunOptions, Sequence[Policy], Sweep, Sequence[Host]], G]
"""Of what is loaded, the policies that are measured on it, the sweep and the hosts."""


def check_ablations(sweep: Sweep) -> None:
    """Raises UserError when what is to be switched off is part of no policy that is measured."""
    for name in sweep.ablations:
        if not any(name in ablations_of(type(policy)) for policy in sweep.policies):
            having = " or ".join(policy for policy, kind in POLICIES.items() if name in ablations_of(kind))
            raise UserError(
                f"--ablate {name} is about {having}, which --policy does not name; name it too, or leave {name} out"
            )


def loads_of(sweep: Sweep) -> Iterator[tuple[RunOptions, tuple[Policy, ...]]]:
    """What is loaded at a time, but for the split, and the policies that are measured on it."""
    for model, drafts in sweep.pairs:
        for policies in _loaded_alike(sweep.policies):
            needs_most = max(policies, key=lambda policy: policy.n_seq)
            cut = sweep.base.draft_split if len(drafts) == 1 + len(sweep.base.draft_split) else ()
            yield replace(sweep.base, model=model, drafts=drafts, policy=needs_most, draft_split=cut), policies


def plan_groups(sweep: Sweep, hosts_of: Sequence[Sequence[Host]], group_of: MakeGroup[G]) -> list[G]:
    """Groups in the order of the models, then of the policies. `hosts_of`: of each of `loads_of`. Raises UserError for
    whatever cannot be measured."""
    check_ablations(sweep)
    groups: list[G] = []
    unused, draft_split = set(sweep.splits), sweep.base.draft_split
    most = max(len(drafts) for _, drafts in sweep.pairs)
    if all(len(drafts) != 1 + len(draft_split) for _, drafts in sweep.pairs):
        draft_widths(most, draft_split)
    for (options, policies), hosts in zip(loads_of(sweep), hosts_of, strict=True):
        widths = draft_widths(len(options.drafts), options.draft_split) if policies[0].drafts else ()
        n_stages = len(stage_ranks(len(hosts), widths))
        fitting = [split for split in sweep.splits if len(parse_split(split)) == n_stages]
        unused -= set(fitting)
        by_split = [replace(options, layer_split=split) for split in fitting] or [options]
        groups += [group_of(chosen, policies, sweep, hosts) for chosen in by_split]
    if unused:
        split = min(unused)
        raise UserError(
            f"--layer-split {split} has {len(parse_split(split))} parts, and no policy here has as many stages on "
            f"{len(hosts_of[0])} ranks; a draft takes one rank of them, or as many as --draft-split says"
        )
    return groups


def _loaded_alike(policies: Sequence[Policy]) -> Iterator[tuple[Policy, ...]]:
    """Who needs no draft and so gives the target one rank more: it is loaded by itself, in its turn."""
    together: tuple[Policy, ...] = ()
    for policy in policies:
        if together and policy.drafts != together[0].drafts:
            yield together
            together = ()
        together += (policy,)
    if together:
        yield together


def group_of(options: RunOptions, policies: Sequence[Policy], sweep: Sweep, hosts: Sequence[Host]) -> Group:
    """What is measured of some policies on what they share, a generation at a time."""
    info, tokenizer = open_models(options)
    conversations = [conversation_of(prompt, tokenizer, sweep.cut) for prompt in sweep.prompts]
    n_predict = max(sweep.predicts)
    longest = replace(options, predict=n_predict)
    n_prompt = _longest_prompt(longest, info, conversations)
    request = make_request(longest, info, tokenizer, conversations[0].turns[0].tokens, n_prompt)
    deployment = deploy(options, hosts, info, request.n_ctx, n_prompt)
    measured = variants_of(options, policies, sweep.ablations)
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
    return Group(options, deployment, cases)


def _longest_prompt(options: RunOptions, info: ModelInfo, conversations: Sequence[Conversation]) -> int:
    """Tokens of the longest prompt. Raises UserError when only first turns fit into the context."""
    lengths = [conversation.lengths(options.predict) for conversation in conversations]
    first, longest = max(turns[0] for turns in lengths), max(map(max, lengths))
    if longest > first:
        fit_context(options, info, first)
        try:
            fit_context(options, info, longest)
        except UserError as error:
            raise UserError(f"with the answers before its last turn {error}, or take fewer --turns") from None
    return longest


def variants_of(options: RunOptions, policies: Sequence[Policy], ablations: Sequence[str]) -> list[RunOptions]:
    """Every policy, whole and without each of these that it has."""
    return [variant for policy in policies for variant in _variants(replace(options, policy=policy), ablations)]


def _variants(options: RunOptions, ablations: Sequence[str]) -> Iterator[RunOptions]:
    """The whole policy, then without each of these that is part of it."""
    yield options
    for name in (name for name in ablations if name in ablations_of(type(options.policy))):
        if name in options.policy.uses:
            yield replace(options, **{name: False})  # type: ignore[arg-type]
        else:
            yield replace(options, policy=replace(options.policy, **{name: False}))
