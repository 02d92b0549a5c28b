"""Rates that papers report, and those of recorded texts."""

import pytest

from experiments.calibration import chain_rate, rate_after_miss, rate_at_depth, recorded_chain_rate, top1_of_chain
from experiments.cells import Setting, run
from pipeinfer.policies import Speculative
from pipeinfer.virtual.choices import RecordedChoices


def text_of(hits: str) -> RecordedChoices:
    """A text whose best guesses are right where there is a 1."""
    known = [[(7 if hit == "1" else 8, 0.5)] for hit in hits]
    return RecordedChoices("x/0", 2, [7] * len(hits), [*known, [(7, 0.5)]])


def test_the_rate_of_a_chain_gives_its_top1() -> None:
    assert chain_rate(0.5, 2) == pytest.approx((0.5 + 0.25) / 2)
    assert top1_of_chain(0.79) == pytest.approx(0.908, abs=0.001)
    assert top1_of_chain(chain_rate(0.6, 3), 3) == pytest.approx(0.6, abs=0.001)


def test_pipeinfers_baseline_has_the_rate_that_the_paper_reports() -> None:
    """79% of the guesses of trees of four accepted, with the published settings."""
    setting = Setting("pipeinfer-c", "dolphin-tinyllama", 8, acceptance=top1_of_chain(0.79))
    assert run(setting, Speculative.from_paper()).sent_acceptance == pytest.approx(0.79, abs=0.03)


def test_rates_of_recorded_texts_are_counted_from_every_token() -> None:
    text = text_of("1101")
    assert recorded_chain_rate([text], 2) == pytest.approx((2 + 1 + 0) / 6)
    assert rate_at_depth([text], 1) == 0.75 and rate_at_depth([text], 2) == pytest.approx(1 / 2)
    assert rate_after_miss([text]) == 1.0
