"""What `simulate` measures: generations and loads on a cluster, their columns, policies side by side."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.observe.columns import SAMPLING, Record, digest, model_columns, settings_text, variant_text
from pipeinfer.observe.figures import Result
from pipeinfer.observe.table import LOADS, RESULTS
from pipeinfer.text import json_text, markdown_table, number
from pipeinfer.virtual.choices import Choices, RecordedChoices, n_predicted, ranks_for, ranks_text, synthetic_team
from pipeinfer.virtual.costs import Profile
from pipeinfer.virtual.simulation import Load, Simulated, simulate, simulate_load, synthetic_texts

DEFAULT_ACCEPTANCE = 0.7
COLUMNS = (
    *"policy,settings,tokens/s,over iterative,of the limit,TTFT ms,ITL ms p50 / p95 / p99".split(","),
    *"rows a token,hit rate,busiest stage".split(","),
)
LIMIT = "limit"
Sample = tuple[Simulated, Result]


@dataclass(frozen=True, slots=True)
class Study:
    """Settings of simulations. `lay_out`: the costs with drafts, or without; raises UserError if there is no such
    cluster. `by_rank`: for each draft, the smallest first, how often its first, second, … guess is right; empty: as
    published. `ageing`: as in SyntheticChoices. `texts`: recorded ones of the file `source`, not synthetic ones.
    `target`: what says the same of target and cluster on any number of nodes, and is hashed in rows; None: the costs
    of the profile. `options`: what was changed there, as in results.csv."""

    lay_out: Callable[[bool], Profile]
    predict: int
    prompt_tokens: int
    by_rank: Sequence[Sequence[float]] = ()
    cancel: bool = True
    partitions: bool = True
    ageing: Sequence[float] = ()
    texts: Sequence[RecordedChoices] = ()
    source: str = ""
    target: object = None
    options: str = ""

    def generate(self, policy: Policy, seed: int = 0, repetition: int = 1) -> Sample:
        """Simulate a generation. `seed`: or the number of a recorded text. Raises UserError if it is impossible."""
        profile = self.lay_out(policy.drafts)
        first, *larger = [self.texts[seed]] if self.texts else self._synthetic(profile, seed)
        n_predict, larger = n_predicted(first, self.predict), larger if profile.drafts else []
        ablated: dict[str, Any] = {"cancel": self.cancel, "partitions": self.partitions}
        simulated = simulate(profile, first, policy.begin(), n_predict, larger=larger, **ablated)
        request, prompt = simulated.request, tuple(simulated.request.prompt)
        experiment = self._experiment(profile, policy, seed, repetition) | {
            "variant": variant_text(policy, self.cancel, self.partitions),
            "prompt": self.texts[seed].name if self.texts else f"pp{len(prompt)}",
            "prompt_hash": digest(prompt),
            "prompt_n": len(prompt),
            "predicted_n": request.n_predict,
        }
        return simulated, simulated.result(experiment)

    def run_load(self, policy: Policy, load: Load, results: Path | None = None) -> dict[str, Any]:
        """Simulate a load: its columns, and its figures. Raises UserError if it is impossible."""
        profile = self.lay_out(policy.drafts)
        if len(profile.drafts) > 1:
            raise UserError(f"{profile.name} has {len(profile.drafts)} drafts; --requests takes pairs with one")
        if self.texts:
            texts: Sequence[Choices] = [self.texts[index % len(self.texts)] for index in range(load.n_requests)]
        else:
            texts = synthetic_texts(load, self._ranks(profile)[0], self.ageing)
        columns = self._experiment(profile, policy, load.seed, 1) | {
            "profile": profile.name,
            "prompt": self.source or f"pp{load.prompt_tokens}",
            "prompt_hash": digest([tuple(text.prompt) for text in texts]),
            **asdict(load),
        }
        for name in ("rate", "max_delay_s"):  # JSON has no infinity
            columns[name] = None if math.isinf(columns[name]) else columns[name]
        columns |= simulate_load(profile, policy, load, texts)
        if "notice" in columns:
            print(f"pipeinfer: {columns['notice']}", file=sys.stderr)
        if results:
            LOADS.append(results, columns)
        return columns

    def generate_all(
        self, policies: Sequence[Policy], seeds: Sequence[int], results: Path | None, as_json: bool
    ) -> Iterator[Sample]:
        """Simulate every policy with every seed, append rows to `results` and print JSON objects, if `as_json`."""
        for repetition, seed in enumerate(seeds, start=1):
            for policy in policies:
                simulated, result = self.generate(policy, seed, 1 if self.texts else repetition)
                if results:
                    RESULTS.append(results, result.columns())
                if as_json:
                    print(json_text(result.data))
                yield simulated, result

    def _experiment(self, profile: Profile, policy: Policy, seed: int, repetition: int) -> Record:
        """The columns known before, except those of prompt and text."""
        choices, virtual = self._choices_text(profile), {"bytes": 0, "quantisation": "simulated"}
        model = {"name": profile.cluster, "hash": digest(self.target or profile)} | virtual
        draft = {"name": "+".join(["draft"] * len(profile.drafts)), "hash": digest(choices)} | virtual
        return model_columns(model, draft if profile.drafts else None) | {
            "policy": policy.name,
            "settings": settings_text(policy),
            "options": self.options,
            "ranks": profile.n_ranks,
            "layers": [cost.layers for cost in profile.stages],
            "threads": [1] * profile.n_ranks,
            **dict.fromkeys(SAMPLING, ""),
            "seed": seed,
            "temp": 0.0,
            "numerics": "virtual",
            "pace": "",
            "pace_hash": "",
            "choices": choices,
            "repetition": repetition,
        }

    def _choices_text(self, profile: Profile) -> str:
        """The column `choices`. Raises UserError if recorded texts have fewer drafts than the profile."""
        if self.texts and len(profile.drafts) > 1:
            raise UserError(f"{profile.name} has {len(profile.drafts)} drafts, recorded texts are of one; give --pair")
        aged = f", ageing {','.join(f'{factor:g}' for factor in self.ageing)}" if self.ageing else ""
        return self.source or "; ".join(map(ranks_text, self._ranks(profile))) + aged

    def _synthetic(self, profile: Profile, seed: int) -> Sequence[Choices]:
        """The choices of each draft. Raises UserError if their number is not that of the drafts."""
        n_drafts = len(profile.drafts)
        team = synthetic_team(self._ranks(profile), seed, self.prompt_tokens, self.ageing)
        if n_drafts and len(team) != n_drafts:
            drafts = f"{n_drafts} draft{'s' * (n_drafts > 1)}, and --acceptance or --ranks is given for {len(team)}"
            raise UserError(f"{profile.name} has {drafts}; give it once for each")
        return team

    def _ranks(self, profile: Profile) -> Sequence[Sequence[float]]:
        """For each draft, how often its first, second, … guess is right."""
        published = profile.acceptance or (DEFAULT_ACCEPTANCE,) * max(1, len(profile.drafts))
        return self.by_rank or [ranks_for(share) for share in published]


# -- policies side by side


def side_by_side(generations: Sequence[Sample]) -> list[str]:
    """A Markdown table: for each policy means, with the deviation of its speed between texts; last the limit by the
    stages of the profile, with the draft in its place."""
    return markdown_table(COLUMNS, list(_rows(generations)), right_aligned=COLUMNS[2:])


def _rows(generations: Sequence[Sample]) -> Iterator[tuple[str, ...]]:
    by_policy: dict[str, list[Sample]] = {}
    for generation in generations:
        by_policy.setdefault(generation[1].data["policy"], []).append(generation)
    speeds = {policy: fmean(_timings(samples, "predicted_per_second")) for policy, samples in by_policy.items()}
    plain = speeds.get("iterative", math.nan)
    # with a draft there may be one stage less
    limit = min(
        fmean(each.profile.limit_per_s(len(each.request.prompt)) for each, _ in samples)
        for samples in by_policy.values()
    )
    for policy, samples in by_policy.items():
        metrics = [simulated.metrics for simulated, _ in samples]
        spread = f" ± {number(stdev(_timings(samples, 'predicted_per_second')))}" if len(samples) > 1 else ""
        itl_s = (fmean(_timings(samples, f"itl_p{rank}_s")) for rank in (50, 95, 99))
        yield (
            policy,
            str(samples[0][1].data["settings"]),
            number(speeds[policy]) + spread,
            number(speeds[policy] / plain),
            number(speeds[policy] / limit),
            number(1e3 * fmean(_timings(samples, "ttft_s")), 1),
            " / ".join(number(1e3 * mean_s, 1) for mean_s in itl_s),
            number(fmean((each.n_root_runs + each.n_sent) / len(each.token_s) for each in metrics), 1),
            number(fmean(result.data["speculation"]["hit_rate"] for _, result in samples)),
            f"{100 * fmean(map(_busiest, samples)):.0f}%",
        )
    rate = "a token whenever the slowest stage has done a row"
    yield (LIMIT, rate, number(limit), number(limit / plain), "1.00", *["-"] * 5)


def _timings(samples: Sequence[Sample], name: str) -> Iterable[float]:
    return (result.data["timings"][name] for _, result in samples)


def _busiest(generation: Sample) -> float:
    """The share of the time that the busiest stage worked on runs that counted."""
    shares = [rank["busy_s"] / rank["wall_s"] for rank in generation[1].data["ranks"] if rank["layers"]]
    return max(shares, default=math.nan)
