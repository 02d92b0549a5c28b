"""What a benchmark measures: every combination of models, policies, splits, prompts and lengths, grouped by what must
be loaded together. Plans and checks; runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from pipeinfer.cli.asked import asked_of
from pipeinfer.cli.conversation import Conversation, Prompt, Turn, conversation_of
from pipeinfer.cli.options import RunOptions
from pipeinfer.cli.setup import Host, Job, fit_context, make_job, open_models
from pipeinfer.cluster.plan import parse_split, stage_ranks
from pipeinfer.errors import UserError
from pipeinfer.models.model_info import ModelInfo
from pipeinfer.results import Row, as_read, key_of

ABLATIONS = ("cancel", "partitions", "continuous", "asynchronous")
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Lists of what to combine. `base` has everything that all measurements share."""

    base: RunOptions
    pairs: tuple[tuple[Path, tuple[Path, ...]], ...]
    policies: tuple[str, ...]
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
    job: Job  # its prompt is the first turn's
    conversation: Conversation
    repetition: int

    @property
    def n_left(self) -> int:
        """Generations to measure."""
        return sum(not turn.measured for turn in self.conversation.turns)

    def without(self, known: Set[Key]) -> Case:
        """The same with the turns that are `known` marked, and none after the last that is to be measured."""
        lengths = self.conversation.lengths(self.job.n_predict)
        turns = [
            replace(turn, measured=key_of(as_read(self.asked(turn, length))) in known)
            for turn, length in zip(self.conversation.turns, lengths, strict=True)
        ]
        while turns and turns[-1].measured:
            turns.pop()
        return replace(self, conversation=replace(self.conversation, turns=tuple(turns)))

    def asked(self, turn: Turn, n_prompt: int = 0) -> Row:
        """The columns that say what is asked of a turn. `n_prompt`: as it will be; without it the generation tells."""
        row = asked_of(self.job, self.options, turn.name, turn.digest, self.repetition)
        return row | {"prompt_n": n_prompt}


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that share the loaded models. `options` and `job` say what to load, on every rank."""

    options: RunOptions
    job: Job
    cases: tuple[Case, ...]


def plan_groups(sweep: Sweep, hosts: Sequence[Host]) -> list[Group]:
    """Groups in the order of the models, then of the policies. Raises UserError for whatever cannot be measured."""
    groups: list[Group] = []
    unused = set(sweep.splits)
    for model, drafts in sweep.pairs:
        for policies in _loaded_alike(sweep.policies):
            drafted = policies[0] != "iterative"
            options = replace(sweep.base, model=model, drafts=drafts, policy=policies[0])
            n_stages = len(stage_ranks(len(hosts), len(drafts) if drafted else 0))
            fitting = [split for split in sweep.splits if len(parse_split(split)) == n_stages]
            unused -= set(fitting)
            by_split = [replace(options, layer_split=split) for split in fitting] or [options]
            groups += [_group(chosen, policies, sweep, hosts) for chosen in by_split]
    if unused:
        split = min(unused)
        raise UserError(
            f"--layer-split {split} has {len(parse_split(split))} parts, and no policy here has as many stages on "
            f"{len(hosts)} ranks; a draft takes one rank of them"
        )
    return groups


def _loaded_alike(policies: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """`iterative` needs no draft and so gives the target one rank more: it is loaded by itself, in its turn."""
    together: tuple[str, ...] = ()
    for policy in policies:
        if together and (policy == "iterative") != (together[0] == "iterative"):
            yield together
            together = ()
        together += (policy,)
    if together:
        yield together


def _group(options: RunOptions, policies: Sequence[str], sweep: Sweep, hosts: Sequence[Host]) -> Group:
    info, tokenizer = open_models(options)
    conversations = [conversation_of(prompt, tokenizer, sweep.cut) for prompt in sweep.prompts]
    n_predict = max(sweep.predicts)
    longest = _longest(replace(options, predict=n_predict), info, conversations)
    job = make_job(replace(options, predict=n_predict), hosts, info, tokenizer, longest)
    measured = [
        variant
        for policy in policies
        for variant in _variants(replace(options, policy=policy), sweep.ablations if policy == "pipeinfer" else ())
    ]
    cases = tuple(
        Case(
            chosen,
            replace(job, prompt=conversation.turns[0].tokens, n_predict=n, n_seq=chosen.n_seq),
            conversation,
            repetition,
        )
        for repetition in range(1, sweep.repetitions + 1)
        for conversation in conversations
        for n in sweep.predicts
        for chosen in measured
    )
    return Group(options, job, cases)


def _ask(job: Job, conversation: Conversation, n_predict: int, options: RunOptions) -> Job:
    """The loaded job with what is asked of it now."""
    return replace(job, prompt=conversation.turns[0].tokens, n_predict=n_predict, n_seq=options.n_seq)


def _longest(options: RunOptions, info: ModelInfo, conversations: Sequence[Conversation]) -> list[int]:
    """As many tokens as the longest prompt has. Raises UserError when only first turns fit into the context."""
    lengths = [conversation.lengths(options.predict) for conversation in conversations]
    first, longest = max(turns[0] for turns in lengths), max(map(max, lengths))
    if longest > first:
        fit_context(options, info, first)
        try:
            fit_context(options, info, longest)
        except UserError as error:
            raise UserError(f"with the answers before its last turn {error}, or take fewer --turns") from None
    return [0] * longest


def _variants(options: RunOptions, ablations: Sequence[str]) -> Iterator[RunOptions]:
    yield options
    for name in ablations:
        if name in ("cancel", "partitions"):
            yield replace(options, **{name: False})  # type: ignore[arg-type]
        else:
            yield replace(options, speculation=replace(options.speculation, **{name: False}))
