"""PipeSpec's hierarchy: who verifies what when, and its closed forms against the same in virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence

import pytest

from pipeinfer.core.runs import Guess, Run
from pipeinfer.policies import PipeSpec
from pipeinfer.virtual.choices import Branch
from pipeinfer.virtual.costs import HeadCost, LinkCost, ModelCost, Profile, Work
from pipeinfer.virtual.pipeline import SimPipeline
from pipeinfer.virtual.simulation import Simulated, simulate
from tests.support.pipespec_theory import next_rho, pipespec_tokens, speculative_speedup, steady_rho

Batches = list[tuple[float, list[int]]]


class Known:
    """A draft whose first guess for a position is wrong where it is told to be; the right token is the position."""

    prompt = (0,)

    def __init__(self, wrong: Collection[int] = (), name: int = 0, n_tokens: int = 1 << 20) -> None:
        self.wrong, self.name, self.n_tokens = frozenset(wrong), name, n_tokens

    def target(self, position: int) -> int:
        return position

    def guesses(self, start: int, branch: Branch, width: int, age: int = 0) -> list[Guess]:
        position = start + 1 + len(branch)
        missed = branch or position in self.wrong
        return [Guess(-100 * (self.name + 1) - position if missed else position, 0.5)]


def generate(policy: PipeSpec, drafts: Sequence[Known], target_s: float, draft_s: Sequence[float], n: int) -> Simulated:
    """`draft_s`: a step of each draft, the smallest first. Batches of all sizes take as long, messages nothing."""
    target, *models = (ModelCost(f"{second:g} s", 1, Work((1.0,), (second,))) for second in (target_s, *draft_s))
    profile = Profile("a hierarchy", 4, (target,), tuple(models), LinkCost(0.0, math.inf), HeadCost())
    found = simulate(profile, drafts[0], policy.begin(), n, larger=drafts[1:])
    assert found.request.tokens == list(range(n + 1))
    return found


def speed(found: Simulated, target_s: float) -> float:
    """Over a target by itself."""
    token_s = found.metrics.token_s
    return (len(token_s) - 1) * target_s / (token_s[-1] - token_s[0])


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Batches]:
    """When each model but the smallest got a batch, and its tokens; by the model's name."""
    found: dict[str, Batches] = {}
    submit = SimPipeline.submit

    def noted(pipeline: SimPipeline, run: Run) -> None:
        batch = (pipeline.clock.now, [row.token for row in run.rows])
        found.setdefault(pipeline.profile.stages[0].name, []).append(batch)
        submit(pipeline, run)

    monkeypatch.setattr(SimPipeline, "submit", noted)
    return found


def test_two_models_as_in_figure_2(batches: dict[str, Batches]) -> None:
    """Four tokens of the draft in a step of the target. After a rejection the target makes one token by itself, and
    the draft begins anew at once; of what was produced meanwhile the first tells whether the next step verifies."""
    generate(PipeSpec(), [Known({7, 15})], 4.0, [1.0], 20)
    assert batches["4 s"][:6] == [
        (0.0, [0]),
        (4.0, [1, 2, 3, 4]),
        (8.0, [5, 6, -107, -108]),
        (12.0, [7]),
        (16.0, [8, 9, 10, 11]),
        (20.0, [12, 13, 14, -115]),
    ]


def test_the_middle_of_three_models_filters(batches: dict[str, Batches]) -> None:
    """It takes all that the small one made meanwhile; what it refutes never gets to the target, and the small one goes
    on from its word at once. A rejection of the target rolls both back."""
    generate(PipeSpec(), [Known({3, 8}), Known({8}, name=1)], 8.0, [1.0, 2.0], 20)
    assert batches["2 s"][:5] == [(0.0, [0]), (2.0, [1, 2]), (4.0, [3]), (6.0, [4, 5]), (8.0, [6, 7])]
    assert batches["8 s"][:3] == [(0.0, [0]), (8.0, [1, 2, 3, 4, 5, 6]), (16.0, [7, -208, -209, -210, -211])]
    assert batches["8 s"][3] == (24.0, [8]) == next(batch for batch in batches["2 s"] if batch[0] >= 24)


def test_in_turns_as_the_papers_baseline(batches: dict[str, Batches]) -> None:
    """A draft rests once it has made its window; nobody works while a larger model verifies."""
    generate(PipeSpec(lookahead=3, asynchronous=False), [Known({7, 15})], 4.0, [1.0], 20)
    # the last guess is evaluated first if it was right: one step more
    assert batches["4 s"][:3] == [(3.0, [0, 1, 2, 3]), (11.0, [4, 5, 6, -107]), (18.0, [7, 8, 9, 10])]


def test_three_models_in_turns(batches: dict[str, Batches]) -> None:
    """The middle model verifies windows of the small one until it has made one itself."""
    policy = PipeSpec(lookahead=3, asynchronous=False)
    generate(policy, [Known({2}), Known({8}, name=1)], 8.0, [1.0, 2.0], 20)
    assert batches["2 s"][:2] == [(3.0, [0, 1, -102, -103]), (8.0, [2, 3, 4, 5])]
    assert batches["8 s"][0] == (10.0, [0, 1, 2, 3, 4, 5, 6])
    assert batches["8 s"][1][0] > 18.0


@pytest.mark.parametrize("window", [1, 6])
def test_a_window_is_waited_for(batches: dict[str, Batches], window: int) -> None:
    """Section 4.4: at least so many tokens stand to be verified, while more can come."""
    generate(PipeSpec(lookahead=window), [Known({7, 15})], 4.0, [1.0], 20)
    sizes = [(tokens[0], len(tokens) - 1) for _, tokens in batches["4 s"]]
    assert all(size >= min(window, 20 - 1 - root) for root, size in sizes), sizes
    assert batches["4 s"][0][0] == window


ALPHAS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)


def independent(alpha: float, n: int) -> Known:
    """Of `n` guesses just the share `alpha` is right, wherever."""
    return Known(random.Random(n).sample(range(1, n + 1), round(n * (1 - alpha))))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_equation_4_gives_the_speed(alpha: float) -> None:
    """Four tokens of the draft in a step of the target: a window of three beside the certain token."""
    found = speed(generate(PipeSpec(), [independent(alpha, 2000)], 4.0, [1.0], 2000), 4.0)
    assert found == pytest.approx(pipespec_tokens(alpha, 3), rel=0.03)


def test_with_the_ratio_for_a_window_equation_4_goes_beyond_what_the_draft_makes() -> None:
    found = speed(generate(PipeSpec(), [Known()], 8.0, [1.0], 400), 8.0)
    assert found == pytest.approx(pipespec_tokens(1, 7), rel=0.01) == 8
    assert pipespec_tokens(1, 8) == 9


@pytest.mark.parametrize("alpha", ALPHAS)
def test_equation_5_gives_the_speed_in_turns(alpha: float) -> None:
    """But for the step in which our draft evaluates the last of its own tokens, which the paper does not count."""
    policy = PipeSpec(lookahead=3, asynchronous=False)
    found = speed(generate(policy, [independent(alpha, 2000)], 4.0, [1.0], 2000), 4.0)
    assert found == pytest.approx(speculative_speedup(alpha, 3, 4, unseen=1), rel=0.03)
    assert found < speculative_speedup(alpha, 3, 4)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_equation_3_is_what_equation_2_comes_to(alpha: float) -> None:
    rho = alpha
    for _ in range(200):
        rho = next_rho(rho, alpha, 5)
    assert rho == pytest.approx(steady_rho(alpha, 5))
