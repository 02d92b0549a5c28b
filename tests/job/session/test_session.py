"""Which of several ranks' errors the user is told."""

from __future__ import annotations

from pipeinfer.job.session.session import first_error


def test_the_lowest_ranks_error_is_told() -> None:
    assert first_error({0: {"error": "own"}, 2: {"error": "other"}}) == "own"
    assert first_error({0: {"error": ""}, 2: {"error": "late"}, 1: {"error": "early"}}) == "early"
    assert first_error({0: {"error": ""}, 1: {"loaded_s": 1.0}}) == ""
