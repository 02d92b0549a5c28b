"""The papers' own measures, where they can be worked out by hand."""

import math

import pytest

from pipeinfer.core.policy import Policy
from pipeinfer.observe.figures import speculation, speeds, ttft_after_prompt_s
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.policies import Iterative, PipeDec, Speculative
from pipeinfer.virtual.choices import SyntheticChoices
from pipeinfer.virtual.costs import HeadCost, LinkCost, ModelCost, Profile, Work
from pipeinfer.virtual.simulation import simulate

STAGE, DRAFT = ModelCost("stage", 1, Work((1.0,), (0.01,))), ModelCost("draft", 1, Work((1.0,), (1e-6,)))
PROFILE = Profile("four", 8, (STAGE,) * 4, (DRAFT,), LinkCost(1e-9, 1e15), HeadCost())


def measure(policy: Policy, acceptance: float, n: int = 2000) -> RequestMetrics:
    choices = SyntheticChoices((acceptance, 0.0005), n_prompt=2)
    return simulate(PROFILE, choices, policy.begin(), n).metrics


def test_a_chain_of_four_is_accepted_less_often_than_its_first_guess() -> None:
    """0.8 + 0.8² + 0.8³ + 0.8⁴ of 4 guesses, and a token of the target's own; a round takes 4 turns."""
    found = measure(Speculative(n_draft=4, width=1), 0.8)
    accepted = 0.8 + 0.64 + 0.512 + 0.4096
    assert speculation(found)["top1_rate"] == pytest.approx(0.8, abs=0.02)
    assert speculation(found)["sent_acceptance"] == pytest.approx(accepted / 4, abs=0.02)
    assert speculation(found)["tokens_per_round"] == pytest.approx(1 + accepted, abs=0.1)
    assert speculation(found)["tokens_per_turn"] == pytest.approx((1 + accepted) / 4, abs=0.03)


def test_without_guesses_each_token_is_a_round() -> None:
    found = measure(Iterative(), 0.8, 50)
    assert speculation(found)["tokens_per_round"] == 1 and speculation(found)["tokens_per_turn"] == pytest.approx(0.25)
    assert math.isnan(speculation(found)["sent_acceptance"]) and math.isnan(speculation(found)["top1_rate"])


def test_guesses_that_are_right_keep_a_round_going() -> None:
    found = measure(PipeDec(), 0.999, 200)
    assert speculation(found)["tokens_per_turn"] == pytest.approx(1.0, abs=0.02) and found.n_rounds <= 2


def test_the_time_to_the_first_token_may_leave_the_prompt_out() -> None:
    found = RequestMetrics(submitted_s=1.0, token_s=[3.0, 3.0, 3.5, 4.0])
    assert speeds(found)["ttft_s"] == 2.0 and speeds(found)["ttft_after_prompt_s"] == 0.5
    assert math.isnan(ttft_after_prompt_s(RequestMetrics(submitted_s=1.0, token_s=[3.0])))
