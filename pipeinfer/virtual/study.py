"""Questions about a cluster in virtual time, and the rows that answer them. Knows no file of a cluster."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeinfer.cluster.timing.costs import Profile
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.observe.experiment import digest, variant_text
from pipeinfer.observe.results import LOADS, Record, append_result, as_read, result_row
from pipeinfer.observe.texts.json_text import json_text
from pipeinfer.virtual.choices import Choices, n_predicted, ranks_for, ranks_text, synthetic_team
from pipeinfer.virtual.outcome import make_result, simulated_columns, text_columns
from pipeinfer.virtual.recorded import RecordedChoices
from pipeinfer.virtual.simulation import Simulated, simulate
from pipeinfer.virtual.traffic import Load, simulate_load, synthetic_texts

DEFAULT_ACCEPTANCE = 0.7


@dataclass(frozen=True, slots=True)
class Question:
    """What to simulate. `lay_out`: the costs with drafts, or without; raises UserError when there is no such cluster.
    `by_rank`: how often each draft's first, second, … guess is right, the smallest draft first; empty: as published.
    `ageing`: as SyntheticChoices has it. `texts`: recorded ones in place of synthetic ones, by the file `source`.
    `target`: the costs without drafts, by which rows tell targets apart, whatever a draft leaves them; None: any."""

    lay_out: Callable[[bool], Profile]
    predict: int
    prompt_tokens: int
    by_rank: Sequence[Sequence[float]] = ()
    cancel: bool = True
    partitions: bool = True
    ageing: Sequence[float] = ()
    texts: Sequence[RecordedChoices] = ()
    source: str = ""
    target: Profile | None = None

    def answer(self, policy: Policy, seed: int = 0, repetition: int = 1) -> tuple[Simulated, dict[str, Any], Record]:
        """One generation, its result object and row; `seed`: the number of a recorded text. Raises UserError when it
        cannot be simulated."""
        profile = self.lay_out(policy.drafts)
        first, *larger = [self.texts[seed]] if self.texts else self._synthetic(profile, seed)
        simulated = simulate(
            profile, first, policy.begin(), n_predicted(first, self.predict), cancel=self.cancel,
            partitions=self.partitions, larger=larger if profile.drafts else [],
        )  # fmt: skip
        name = self.texts[seed].name if self.texts else ""
        asked = simulated_columns(profile, self.target, policy, self._choices_text(profile), seed, repetition) | {
            "variant": variant_text(policy, self.cancel, self.partitions),
            **text_columns(simulated.request, name),
        }
        result = make_result(simulated, asked)
        return simulated, result, result_row(result, asked)

    def carry(self, policy: Policy, load: Load, results: Path | None = None) -> dict[str, Any]:
        """Figures of many requests, and the columns that say what was asked. Raises UserError when they cannot be
        simulated."""
        profile = self.lay_out(policy.drafts)
        if len(profile.drafts) > 1:
            raise UserError(f"{profile.name} has {len(profile.drafts)} drafts; --requests takes pairs with one")
        if self.texts:
            texts: Sequence[Choices] = [self.texts[number % len(self.texts)] for number in range(load.n_requests)]
        else:
            texts = synthetic_texts(load, self._ranks(profile)[0], self.ageing)
        asked: dict[str, Any] = simulated_columns(
            profile, self.target, policy, self._choices_text(profile), load.seed, 1
        ) | {
            "profile": profile.name,
            "prompt": self.source or f"pp{load.prompt_tokens}",
            "prompt_hash": digest([tuple(text.prompt) for text in texts]),
            **asdict(load),
        }
        for name in ("rate", "max_delay_s"):  # JSON has no infinity
            asked[name] = None if math.isinf(asked[name]) else asked[name]
        found = simulate_load(profile, policy, load, texts)
        if "notice" in found:
            print(f"pipeinfer: {found['notice']}", file=sys.stderr)
        if results:
            LOADS.append(results, asked | found)
        return asked | found

    def _choices_text(self, profile: Profile) -> str:
        """Of the column. Raises UserError when recorded texts are of fewer drafts than there are."""
        if self.texts and len(profile.drafts) > 1:
            raise UserError(f"{profile.name} has {len(profile.drafts)} drafts, recorded texts are of one; give --pair")
        aged = f", ageing {','.join(f'{kept:g}' for kept in self.ageing)}" if self.ageing else ""
        return self.source or "; ".join(map(ranks_text, self._ranks(profile))) + aged

    def _synthetic(self, profile: Profile, seed: int) -> Sequence[Choices]:
        """Of each draft. Raises UserError when there are not as many as drafts."""
        n_drafts = len(profile.drafts)
        found = synthetic_team(self._ranks(profile), seed, self.prompt_tokens, self.ageing)
        if n_drafts and len(found) != n_drafts:
            raise UserError(
                f"{profile.name} has {n_drafts} draft{'s' * (n_drafts > 1)}, and --acceptance or --ranks is given for "
                f"{len(found)}; give it once for each"
            )
        return found

    def _ranks(self, profile: Profile) -> Sequence[Sequence[float]]:
        """How often each draft's first, second, … guess is right."""
        published = profile.acceptance or (DEFAULT_ACCEPTANCE,) * max(1, len(profile.drafts))
        return self.by_rank or [ranks_for(share) for share in published]


def ask(
    question: Question, policies: Sequence[Policy], seeds: Sequence[int], results: Path | None, as_json: bool
) -> Iterator[tuple[Simulated, dict[str, Any], Record]]:
    """Simulate every policy with every seed: each generation, its result object, and its row as results.csv has it."""
    for repetition, seed in enumerate(seeds, start=1):
        for policy in policies:
            simulated, result, row = question.answer(policy, seed, 1 if question.texts else repetition)
            if results:
                append_result(results, row)
            if as_json:
                print(json_text(result))
            yield simulated, result, as_read(row)
