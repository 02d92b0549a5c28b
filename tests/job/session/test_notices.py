"""What policies say while many requests are open comes once a change, and few times an hour."""

from __future__ import annotations

import pytest

from pipeinfer.job.session.session import MOST_LINES, PERIOD_S, Notices
from pipeinfer.policies import Auto
from tests.job.session.test_head_memory import Clients, serve, toy_service

REST, GO_ON = "guesses cost time here: 1.2 tokens/s", "guesses save time again: speculation goes on"


def test_a_change_is_said_once_and_lines_are_few_an_hour() -> None:
    now_s, said = [0.0], list[str]()
    notices = Notices(said.append, lambda: now_s[0])
    notices.hear(REST)
    notices.hear(REST.replace("1.2", "3.4"))
    assert said == [REST], "other figures are no change"
    for _ in range(50):
        now_s[0] += 1
        notices.hear(GO_ON)
        notices.hear(REST)
    notices.hear(GO_ON)
    assert len(said) == MOST_LINES and said[-1] == GO_ON
    notices.hear(REST)
    now_s[0] += PERIOD_S
    assert len(said) == MOST_LINES
    notices.pass_on()
    notices.pass_on()
    assert len(said) == MOST_LINES + 1 and said[-1] == REST, "what is so by now is said when it may be"


def test_a_change_that_did_not_last_is_not_said_late() -> None:
    now_s, said = [0.0], list[str]()
    notices = Notices(said.append, lambda: now_s[0])
    for line in [REST, GO_ON] * (MOST_LINES // 2) + [REST, GO_ON]:
        notices.hear(line)
    now_s[0] += PERIOD_S
    notices.pass_on()
    assert len(said) == MOST_LINES and said[-1] == GO_ON


def test_a_service_says_what_policies_say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every request meets the same."""
    monkeypatch.setattr(Auto, "settled", lambda policy, settled, context: REST)
    serve(toy_service(Clients(20)))
    assert [line for line in capsys.readouterr().err.splitlines() if "guesses" in line] == [f"pipeinfer: {REST}"]
