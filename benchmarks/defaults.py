"""Are the default options of policy pipeinfer good? `python benchmarks/defaults.py [--pair NAME] [--evaluations 250]`.

In virtual time, with synthetic choices of several acceptance rates: the speed with default options over that of the
speculative policy, with its best tree and with a tree of 4; what a search over pipeinfer's own options finds beyond
the defaults (random settings, then coordinate descent from the defaults and from the best of them), judged on seeds
that the search has not seen, for each acceptance rate and for all of them at once; and what single options give.
Deterministic. The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent.parent))

from pipeinfer.cluster.costs import Profile
from pipeinfer.core.policy import Policy
from pipeinfer.policies import PipeInfer, Speculative
from pipeinfer.virtual.choices import SyntheticChoices, ranks_for
from pipeinfer.virtual.profile import load_profile
from pipeinfer.virtual.simulation import simulate

DEFAULT = PipeInfer()
BARS = {0.52: (1.4, 1.6), 0.66: (1.5, 1.6), 0.79: (1.6, 1.7), 0.9: (2.0, 2.15)}
"""Acceptance -> what is wanted over speculation with its best tree, and over a tree of 4."""

WITHIN = 0.05  # of the best setting found
N_PROMPT = 128
TREE_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
TREE_WIDTHS = (1, 2, 3, 4)
FIXED_SIZE = 4  # as a chain or a tree, whichever is faster
SPACE: dict[str, tuple[float, ...]] = {
    "microbatch": (0, 1, 2, 3, 4, 6, 8),
    "width": (1, 2, 3, 4, 6, 8),
    "accept_cutoff": (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
    "split_cutoff": (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 1.0),
    "recovery": (0.0, 0.005, 0.01, 0.02, 0.05, 0.1),
    "decay": (0.0, 0.005, 0.01, 0.02, 0.05, 0.1),
    "inflight": (0, 2, 3, 4, 5, 6, 7, 9, 10, 12, 16, 32),
}
N_FINALISTS = 8
Score = Callable[[PipeInfer], float]


@dataclass(frozen=True, slots=True)
class Texts:
    """What is generated to measure a speed."""

    seeds: tuple[int, ...]
    n_tokens: int


@click.command(help=__doc__)
@click.option("--profile", default="pipeinfer-c", show_default=True)
@click.option("--pair", default="", help="Models of the profile. [default: its first pair]")
@click.option("--nodes", default=8, show_default=True)
@click.option("--acceptance", default=",".join(map(str, BARS)), show_default=True)
@click.option("--parts", default="trees,search,alone", show_default=True)
@click.option("--evaluations", default=250, show_default=True, help="Settings that a search tries.")
@click.option("--search-seeds", default=4, show_default=True)
@click.option("--seeds", default=12, show_default=True, help="Texts on which settings are judged.")
@click.option("--tokens", default=512, show_default=True, help="Of a text that judges; a search's have half as many.")
def main(
    profile: str, pair: str, nodes: int, acceptance: str, parts: str, evaluations: int, search_seeds: int, seeds: int,
    tokens: int,
) -> None:  # fmt: skip
    rates = [float(part) for part in acceptance.split(",")]
    laid_out = load_profile(profile).lay_out(nodes, pair)
    judged = Texts(tuple(range(1000, 1000 + seeds)), tokens)
    print(f"{laid_out.name}; {seeds} texts of {tokens} tokens; tokens a second", flush=True)
    passed: list[bool] = []
    if "trees" in parts:
        passed += [compare(laid_out, rate, judged) for rate in rates]
    if "search" in parts:
        searched = Texts(tuple(range(search_seeds)), tokens // 2)
        print(f"\nsearches of {evaluations} settings each, on {search_seeds} other texts of {tokens // 2} tokens")
        for sought in [[rate] for rate in rates] + ([rates] if len(rates) > 1 else []):
            passed.append(search(laid_out, sought, evaluations, searched, judged))
    if "alone" in parts:
        alone(laid_out, rates, Texts(judged.seeds[:search_seeds], tokens // 2))
    sys.exit(not all(passed))


@cache
def speed(profile: Profile, rate: float, policy: Policy, texts: Texts) -> float:
    """Tokens a second after the first one, the mean over the texts."""
    return statistics.fmean(_speed(profile, rate, policy, seed, texts.n_tokens) for seed in texts.seeds)


def _speed(profile: Profile, rate: float, policy: Policy, seed: int, n_tokens: int) -> float:
    choices = SyntheticChoices(ranks_for(rate), seed, N_PROMPT)
    token_s = simulate(profile, choices, policy.begin(), n_tokens).metrics.token_s
    return (n_tokens - 1) / (token_s[-1] - token_s[0])


# -- against the speculative policy


def compare(profile: Profile, rate: float, texts: Texts) -> bool:
    """Print a line; whether the default options reach both bars for this acceptance rate."""
    trees = [Speculative(n_draft=size, width=width) for size in TREE_SIZES for width in TREE_WIDTHS if width <= size]
    speeds = {options: speed(profile, rate, options, texts) for options in trees}
    best = max(trees, key=lambda options: speeds[options])
    ours = speed(profile, rate, DEFAULT, texts)
    over_best = ours / speeds[best]
    over_fixed = ours / max(speeds[options] for options in trees if options.n_draft == FIXED_SIZE)
    wanted = BARS.get(rate, (0.0, 0.0))
    enough = over_best >= wanted[0] and over_fixed >= wanted[1]
    print(
        f"acceptance {rate:.2f}: pipeinfer {ours:6.2f}, {over_best:.2f} (wanted {wanted[0]:.2f}) times the best tree "
        f"(draft {best.n_draft}, width {best.width}), {over_fixed:.2f} (wanted {wanted[1]:.2f}) times a tree of 4: "
        f"{'enough' if enough else 'NOT ENOUGH'}",
        flush=True,
    )
    return enough


# -- against its own other settings


def search(profile: Profile, rates: Sequence[float], n_evaluations: int, searched: Texts, judged: Texts) -> bool:
    """Print the best setting found for these acceptance rates; whether the default is near enough."""
    tried = explore(gain(profile, rates, searched), n_evaluations, random.Random(0))
    finalists = sorted(tried, key=lambda options: -tried[options])[:N_FINALISTS]
    # the best of them by the judging texts: that flatters them, not the default
    judge = gain(profile, rates, judged)
    best = max([DEFAULT, *finalists], key=judge)
    near = judge(best) <= 1 + WITHIN
    each = ", ".join(f"{gain(profile, [rate], judged)(best) - 1:+.1%}" for rate in rates)
    print(
        f"acceptance {', '.join(f'{rate:.2f}' for rate in rates)}: the best of {len(tried)} is {describe(best)}: {each}"
        f" ({tried[best] - 1:+.1%} where it was searched): {'near enough' if near else 'NOT NEAR ENOUGH'}",
        flush=True,
    )
    return near


def gain(profile: Profile, rates: Sequence[float], texts: Texts) -> Score:
    """How many times as fast as the default a setting is, the geometric mean over the acceptance rates."""
    return lambda options: statistics.geometric_mean(
        speed(profile, rate, options, texts) / speed(profile, rate, DEFAULT, texts) for rate in rates
    )


def explore(score: Score, n_evaluations: int, rng: random.Random) -> dict[PipeInfer, float]:
    """Every setting that was tried and its score: half of them at random, the others by coordinate descent."""
    tried = {DEFAULT: score(DEFAULT)}
    for _ in range(n_evaluations // 2):
        options = with_values({name: rng.choice(values) for name, values in SPACE.items()})
        tried.setdefault(options, score(options))
    for start in (DEFAULT, max(tried, key=lambda options: tried[options])):
        descend(start, tried, score, n_evaluations, rng)
    while len(tried) < n_evaluations:
        # from elsewhere, so that the descent does not end in the same place
        start = rng.choice(sorted(tried, key=lambda options: -tried[options])[:20])
        values = {name: getattr(start, name) for name in SPACE} | {
            name: rng.choice(SPACE[name]) for name in rng.sample(list(SPACE), 2)
        }
        tried.setdefault(PipeInfer(**values), score(PipeInfer(**values)))
    return tried


def descend(
    start: PipeInfer, tried: dict[PipeInfer, float], score: Score, n_evaluations: int, rng: random.Random
) -> None:
    """Follow one option after the other to its best value, until none is left to improve or enough was tried."""
    best, improved = start, True
    while improved:
        improved = False
        for name in rng.sample(list(SPACE), len(SPACE)):
            for options in variations(best, name):
                if len(tried) >= n_evaluations:
                    return
                tried.setdefault(options, score(options))
                if tried[options] > tried[best]:
                    best, improved = options, True


def variations(options: PipeInfer, name: str) -> Iterator[PipeInfer]:
    for value in SPACE[name]:
        yield replace(options, **{name: value})  # type: ignore[arg-type]


def with_values(values: dict[str, float]) -> PipeInfer:
    return replace(DEFAULT, **values)  # type: ignore[arg-type]


def alone(profile: Profile, rates: Sequence[float], texts: Texts) -> None:
    """Print, for every option, the other value that does best, all other options being as by default."""
    print("\none option at a time, against the default")
    score = gain(profile, rates, texts)
    for name in SPACE:
        default = getattr(DEFAULT, name)
        best = max((options for options in variations(DEFAULT, name) if getattr(options, name) != default), key=score)
        each = ", ".join(f"{gain(profile, [rate], texts)(best) - 1:+.1%}" for rate in rates)
        print(f"{name:14} {default:g} -> {getattr(best, name):g}: {each}", flush=True)


def describe(options: PipeInfer) -> str:
    changed = [name for name in SPACE if getattr(options, name) != getattr(DEFAULT, name)]
    return ", ".join(f"{name} {getattr(options, name):g}" for name in changed) or "the default"


if __name__ == "__main__":
    main()
