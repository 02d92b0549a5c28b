"""What is asked of a cluster in virtual time, in every combination, and the rows that answer it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pipeinfer.cluster.messages.activations import WireType
from pipeinfer.cluster.timing.costs import Profile
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.observe.experiment import settings_text, variant_text
from pipeinfer.observe.results import Record, append_result, as_read, result_row
from pipeinfer.observe.texts.json_text import json_text
from pipeinfer.virtual.choices import Choices, RecordedChoices, ranks_for, synthetic_team
from pipeinfer.virtual.load import Load, simulate_load
from pipeinfer.virtual.outcome import make_result, simulated_columns
from pipeinfer.virtual.simulation import Simulated, simulate

DEFAULT_ACCEPTANCE = 0.7


class Layouts(Protocol):
    """A cluster with models, as `ProfileFile` describes one."""

    def lay_out(self, n_nodes: int = 0, pair: str = "", has_draft: bool = True) -> Profile:
        """What everything costs there. Raises UserError when that cannot be."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """What to simulate, in every combination of policies and seeds. `by_rank`, `known` (choices from files): one for
    each draft, the smallest first; empty if the profile's acceptance is to be taken."""

    file: Layouts
    nodes: int
    pair: str
    gbit: float | None
    policies: Sequence[Policy]
    predict: int
    prompt_tokens: int
    by_rank: Sequence[Sequence[float]]
    known: Sequence[RecordedChoices]
    cancel: bool
    partitions: bool
    samplers: int = 0
    ahead: bool = True
    posted: bool = True
    wire_type: WireType = WireType.F32

    def answer(self, policy: Policy, seed: int, repetition: int) -> tuple[Simulated, dict[str, Any], Record]:
        """One generation, its result object and row. Raises UserError when it cannot be simulated."""
        profile = self._lay_out(policy.drafts)
        first, *larger = self._choices(profile, seed)
        simulated = simulate(
            profile, first, policy.begin(), self.predict, cancel=self.cancel,
            partitions=self.partitions, larger=larger if profile.drafts else [],
        )  # fmt: skip
        asked = simulated_columns(simulated, self._guessed(profile), seed, repetition) | {
            "policy": policy.name,
            "settings": settings_text(policy),
            "variant": variant_text(policy, self.cancel, self.partitions),
        }
        result = make_result(simulated, asked)
        return simulated, result, result_row(result, asked)

    def carry(self, policy: Policy, load: Load) -> dict[str, Any]:
        """What becomes of many requests. Raises UserError when it cannot be simulated."""
        profile = self._lay_out(policy.drafts)
        if len(profile.drafts) > 1:
            raise UserError(f"{profile.name} has {len(profile.drafts)} drafts; --requests takes pairs with one")
        asked = {"policy": policy.name, "settings": settings_text(policy), "profile": profile.name, **asdict(load)}
        asked["rate"] = None if math.isinf(load.rate) else load.rate
        found = simulate_load(profile, policy, load, self._ranks(profile)[0])
        if "notice" in found:
            print(f"pipeinfer: {found['notice']}", file=sys.stderr)
        return asked | found

    def _lay_out(self, has_draft: bool) -> Profile:
        profile = self.file.lay_out(self.nodes, self.pair, has_draft)
        host = replace(profile.host, samplers=self.samplers, ahead=self.ahead, posted=self.posted)
        profile = replace(profile, host=host, wire_type=self.wire_type)
        if self.gbit is None:
            return profile
        return replace(profile, link=replace(profile.link, bytes_per_s=self.gbit * 1e9 / 8))

    def _choices(self, profile: Profile, seed: int) -> Sequence[Choices]:
        """Of each draft. Raises UserError when there are not as many as drafts."""
        n_drafts = len(profile.drafts)
        found = self.known or synthetic_team(self._ranks(profile), seed, self.prompt_tokens)
        if n_drafts and len(found) != n_drafts:
            raise UserError(
                f"{profile.name} has {n_drafts} drafts; give --acceptance, --ranks or --choices {n_drafts} times"
            )
        return found

    def _ranks(self, profile: Profile) -> Sequence[Sequence[float]]:
        """How often each draft's first, second, … guess is right."""
        published = profile.acceptance or (DEFAULT_ACCEPTANCE,) * len(profile.drafts) or (DEFAULT_ACCEPTANCE,)
        return self.by_rank or [ranks_for(share) for share in published]

    def _guessed(self, profile: Profile) -> Sequence[object]:
        """What says what each draft guesses."""
        return [(known.prompt, known.tokens, known.about) for known in self.known] or self._ranks(profile)


def ask(
    question: Question, seeds: Sequence[int], results: Path | None, as_json: bool
) -> Iterator[tuple[Simulated, dict[str, Any], Record]]:
    """Simulate everything: each generation, its result object, and its row as it is read from results.csv."""
    for repetition, seed in enumerate(seeds, start=1):
        for policy in question.policies:
            simulated, result, row = question.answer(policy, seed, repetition)
            if results:
                append_result(results, row)
            if as_json:
                print(json_text(result))
            yield simulated, result, as_read(row)


def ask_loads(question: Question, loads: Sequence[Load]) -> Iterator[dict[str, Any]]:
    """Simulate every load under every policy."""
    return (question.carry(policy, load) for load in loads for policy in question.policies)
