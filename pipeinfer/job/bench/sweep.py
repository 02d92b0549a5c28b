"""What a benchmark measures: every combination, grouped by what is loaded together. Runs nothing."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pipeinfer.cluster.assignment import draft_widths, parse_split, stage_ranks
from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.job.options.loads import Loads
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.capacity import EngineSettings, engine_settings
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.requests.conversation import Prompt
from pipeinfer.job.requests.experiment import ExperimentSettings
from pipeinfer.policies.registry import POLICIES, ablations_of

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Lists of what to combine. `base`: what all measurements share. `warm_up`: generations before those that count.
    `output`: how the summary is printed. `resume`: whether what --results has is left out."""

    base: RunOptions
    pairs: tuple[tuple[Path, tuple[Path, ...]], ...]
    policies: tuple[Policy, ...]
    splits: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    predicts: tuple[int, ...]
    ablations: tuple[str, ...]
    repetitions: int
    cut: int = 0  # longest prompt in tokens; 0: as they are
    loads: Loads | None = None
    warm_up: int = 0
    output: str = "md"
    resume: bool = False


class Measured(Protocol):
    """A case of a sweep: what is measured as one."""

    def without(self: "M", plan: JobPlan, known: Set[Key]) -> "M | None":
        """What is left of it; None if all of it is `known`."""
        ...


M = TypeVar("M", bound=Measured)


@dataclass(frozen=True, slots=True)
class Group(Generic[M]):
    """Cases that share the models that are loaded by a plan."""

    plan: JobPlan
    cases: tuple[M, ...]

    def without(self, known: Set[Key]) -> "Group[M]":
        """The same with the cases in which something is left to be measured."""
        left = [case.without(self.plan, known) for case in self.cases]
        return replace(self, cases=tuple(case for case in left if case))


MakeGroup = Callable[[RunOptions, Sequence[Policy], Sweep, Sequence[Host]], Group[M]]
"""Of what is loaded, the policies that are measured on it, the sweep and the hosts."""


def check_ablations(sweep: Sweep) -> None:
    """Raises UserError when what is to be switched off is part of no policy that is measured."""
    for name in sweep.ablations:
        if not any(name in ablations_of(type(policy)) for policy in sweep.policies):
            having = " or ".join(policy for policy, kind in POLICIES.items() if name in ablations_of(kind))
            raise UserError(
                f"--ablate {name} is about {having}, which --policy does not name; name it too, or leave {name} out"
            )


def loaded_together(sweep: Sweep) -> Iterator[tuple[RunOptions, tuple[Policy, ...]]]:
    """What is loaded at a time, but for the split, and the policies that are measured on it."""
    for model, drafts in sweep.pairs:
        for policies in _loaded_alike(sweep.policies):
            cut = sweep.base.draft_split if len(drafts) == 1 + len(sweep.base.draft_split) else ()
            yield (
                replace(sweep.base, model=model, drafts=drafts, policy=policies[0], also=policies[1:], draft_split=cut),
                policies,
            )


def plan_groups(sweep: Sweep, hosts_of: Sequence[Sequence[Host]], group_of: MakeGroup[M]) -> list[Group[M]]:
    """Groups by model, then by policy. `hosts_of`: of each of `loaded_together`. Raises UserError for a wrong
    combination."""
    check_ablations(sweep)
    groups: list[Group[M]] = []
    unused, draft_split = set(sweep.splits), sweep.base.draft_split
    most = max(len(drafts) for _, drafts in sweep.pairs)
    if all(len(drafts) != 1 + len(draft_split) for _, drafts in sweep.pairs):
        draft_widths(most, draft_split)
    for (options, policies), hosts in zip(loaded_together(sweep), hosts_of, strict=True):
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


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy as it is measured, whole or without a part, and what the engine is set to for it."""

    settings: ExperimentSettings
    engine: EngineSettings


def variants_of(
    options: RunOptions, policies: Sequence[Policy], ablations: Sequence[str], rewinds: bool
) -> list[Variant]:
    """Every policy, whole and without each of these that it has. `rewinds`: as in `engine_settings`."""
    variants = (replace(options, **change) for policy in policies for change in _changes(policy, ablations))
    return [Variant(ExperimentSettings.of(variant), engine_settings(variant, rewinds)) for variant in variants]


def _changes(policy: Policy, ablations: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Of options: for the whole policy, then without each of these that is part of it."""
    yield {"policy": policy}
    for name in (name for name in ablations if name in ablations_of(type(policy))):
        if getattr(policy, name, None) is False:
            continue  # the preset has it off
        yield {"policy": policy, name: False} if name in policy.uses else {"policy": replace(policy, **{name: False})}


def describe(settings: ExperimentSettings, repetition: int, *about: str) -> str:
    """A case in words; repetition 0: a warm-up."""
    number = f"repetition {repetition}" if repetition else "warm-up"
    return ", ".join(filter(None, (settings.policy.name, settings.variant, *about, number)))
