"""The server's line of a text says what the end of a run says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from pipeinfer.observe.figures import service_timings, speculation
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.observe.report import guessed_text
from pipeinfer.server.choices import Choice
from pipeinfer.server.request_log import _figures


def test_guesses_are_counted_as_at_the_end_of_a_run() -> None:
    """Guesses that got a verdict are many more than tokens, where trees branch."""
    metrics = RequestMetrics(submitted_s=0.0, begun_s=0.0, n_prompt=4, n_drafted=300, n_judged=273, n_matched=94)
    metrics.n_contested, metrics.token_s = 113, [1.0, 2.0]
    figures = _figures(cast(Choice, SimpleNamespace(timings=service_timings(metrics), n_tokens=2)))
    assert "guessed ahead 94 of 113" in figures and guessed_text(speculation(metrics)).removeprefix("; ") in figures
