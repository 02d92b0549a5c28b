"""A policy on one of the papers' clusters, in virtual time: the means of some synthetic texts. Knows no table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache

from pipeinfer.core.policy import Policy
from pipeinfer.observe.figures import speculation, ttft_after_prompt_s
from pipeinfer.policies import Speculative
from pipeinfer.virtual.choices import RecordedChoices, ranks_for, synthetic_team
from pipeinfer.virtual.costs import Profile, Work
from pipeinfer.virtual.profile import load_profile
from pipeinfer.virtual.simulation import Simulated, simulate

SEEDS = range(10)
N_TOKENS = 96
N_PROMPT = 128
BASELINE = tuple(Speculative(n_draft=4, width=width) for width in (1, 4))
"""The speculative policy as in PipeInfer's experiments, 4 guesses: a chain, or a tree where that is faster."""

ANY_SIZE = (*BASELINE, *(Speculative(n_draft=n, width=width) for n in (1, 2, 3, 6, 8, 12) for width in (1, 4)))


@dataclass(frozen=True, slots=True)
class Setting:
    """A cell's cluster: profile, pair, nodes; `gbit` and `acceptance` in place of the profile's. `token_s`: the target
    is slowed down until a token takes so long. `ageing`: of the draft, as SyntheticChoices has it."""

    profile: str
    pair: str = ""
    nodes: int = 0
    gbit: float | None = None
    acceptance: float | None = None
    token_s: float | None = None
    ageing: tuple[float, ...] = ()

    def lay_out(self, has_draft: bool) -> Profile:
        profile = load_profile(self.profile).lay_out(self.nodes, self.pair, has_draft)
        if self.gbit is not None:
            profile = replace(profile, link=replace(profile.link, bytes_per_s=self.gbit * 1e9 / 8))
        if self.token_s is not None:
            profile = _slowed(profile, self.token_s / sum(stage.seconds(1, N_PROMPT) for stage in profile.stages))
        return profile if self.acceptance is None else replace(profile, acceptance=(self.acceptance,))


def _slowed(profile: Profile, times: float) -> Profile:
    return replace(
        profile,
        stages=tuple(
            replace(stage, layer=_longer(stage.layer, times), output=_longer(stage.output, times))
            for stage in profile.stages
        ),
    )


def _longer(work: Work, times: float) -> Work:
    return replace(work, seconds=tuple(times * seconds for seconds in work.seconds))


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the texts: tokens a second, the wait for the token after the prompt's first one, guesses accepted over
    sent, tokens a turn of the pipeline and a round of speculation. `speeds`: of each text."""

    speed: float
    first_s: float
    sent_acceptance: float
    per_turn: float
    per_round: float
    speeds: tuple[float, ...] = ()

    @property
    def foreseen(self) -> float:
        """The share of tokens that were in the tree when a verdict chose them: PipeDec's predictive accuracy."""
        return 1 - 1 / self.per_round


@cache
def run(setting: Setting, policy: Policy, cancel: bool = True) -> Figures:
    return _means([_figures(simulated) for simulated in _generations(setting, policy, cancel)])


def lengths(setting: Setting, policy: Policy) -> Counter[int]:
    """Tokens that a verdict of the target brought -> how often."""
    found = (simulated.metrics.accepted_lengths for simulated in _generations(setting, policy))
    return sum(found, Counter[int]())


def _generations(setting: Setting, policy: Policy, cancel: bool = True) -> Iterator[Simulated]:
    profile = setting.lay_out(policy.drafts)
    assert profile.acceptance, f"{profile.name} does not say how often the draft is right"
    policy = policy.fresh()  # it may be another cell's too
    for seed in SEEDS:
        ranks = [ranks_for(share) for share in profile.acceptance]
        choices, *larger = synthetic_team(ranks, seed, N_PROMPT, setting.ageing)
        larger = larger if profile.drafts else []
        yield simulate(profile, choices, policy.begin(), N_TOKENS, cancel=cancel, larger=larger)


def run_texts(setting: Setting, policy: Policy, texts: Sequence[RecordedChoices], cancel: bool = True) -> Figures:
    """The same of recorded texts, each up to its end."""
    profile, policy = setting.lay_out(policy.drafts), policy.fresh()
    return _means(
        [_figures(simulate(profile, text, policy.begin(), len(text.tokens), cancel=cancel)) for text in texts]
    )


def _figures(simulated: Simulated) -> Figures:
    metrics, rates = simulated.metrics, speculation(simulated.metrics)
    token_s = metrics.token_s
    return Figures(
        (len(token_s) - 1) / (token_s[-1] - token_s[0]),
        ttft_after_prompt_s(metrics),
        rates["sent_acceptance"],
        rates["tokens_per_turn"],
        len(token_s) / max(1, metrics.n_rounds),
    )


def _means(found: Sequence[Figures]) -> Figures:
    speeds = tuple(each.speed for each in found)
    values = zip(*(astuple(each)[:-1] for each in found), strict=True)
    speed, first_s, sent, per_turn, per_round = map(statistics.fmean, values)
    return Figures(speed, first_s, sent, per_turn, per_round, speeds)


def over(figures: Figures, other: Figures) -> str:
    """`**1.92** ± 0.08`: how many times as fast, and the deviation of that from text to text."""
    ratios = [speed / base for speed, base in zip(figures.speeds, other.speeds, strict=True)]
    return f"**{figures.speed / other.speed:.2f}** ± {statistics.pstdev(ratios):.2f}"


def baseline(setting: Setting, sizes: Sequence[Speculative] = BASELINE) -> Figures:
    """The fastest of some speculative policies."""
    return max((run(setting, policy) for policy in sizes), key=lambda figures: figures.speed)
