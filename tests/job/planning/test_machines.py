"""`run --machines`: speeds on machines like this one, timed here and simulated there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeinfer.cluster.hosts.host import FreeMemory
from pipeinfer.job.planning.machines import COLUMNS, TimedMachine, machine_speeds, speed_rows, summary
from pipeinfer.virtual.costs import ModelCost, Work
from tests.support.jobs import finish

LAYERS, LAYER_S, OUTPUT_S, RUN_S = 12, 10e-3, 20e-3, 1e-3
PROMPT, ONCE = list(range(40)), list(range(1000, 1100))


def machine(room_bytes: int = 100) -> TimedMachine:
    """A layer takes 10 ms and a byte, the output 20 ms and two, however many rows."""
    rows = (1.0, 32.0)
    target = ModelCost("all", LAYERS, Work(rows, (LAYER_S,) * 2), Work(rows, (OUTPUT_S,) * 2), RUN_S)
    plan: Any = SimpleNamespace(
        model=SimpleNamespace(n_embd=512, path=Path("x.gguf")),
        hosts=[SimpleNamespace(memory=FreeMemory(host=room_bytes))],
        numerics=SimpleNamespace(blocks=False, parked=False),
    )
    return TimedMachine(plan, target, [1.0] * (LAYERS - 1) + [3.0])


def test_machines_add_messages_without_guesses_and_speed_with_them() -> None:
    repeating = ONCE[:20] * 5
    speeds = machine_speeds(machine(), PROMPT, repeating, (1, 2, 4))
    token_s = LAYERS * LAYER_S + OUTPUT_S + RUN_S
    assert speeds[1][0] == pytest.approx(1 / token_s, rel=0.02)
    for n in (2, 4):
        plain, guessed = speeds[n][:2]
        assert plain and guessed and 1 / plain > token_s + (n - 1) * RUN_S, "all stages, and their messages"
        assert 1 / plain < 1.05 * (token_s + n * RUN_S)
        assert guessed > 1.5 * plain, "what repeats itself is looked up"
    assert summary(speeds).startswith("4 machines write this text ")


def test_no_speed_is_told_of_machines_into_which_the_model_does_not_fit() -> None:
    speeds = machine_speeds(machine(room_bytes=7), PROMPT, ONCE[:20], (1, 2))
    assert speeds[1][:2] == [None, None] and all(speeds[2][:2])
    assert speed_rows(speeds)[0][1:3] == ["-", "-"] and not summary(speeds)


def test_text_that_repeats_nothing_gains_nothing_and_that_is_said() -> None:
    speeds = machine_speeds(machine(), PROMPT, ONCE, (1, 2, 20))
    assert speeds[2][1] == pytest.approx(speeds[2][0], rel=0.01)
    assert summary(speeds) == "More than 1 machine adds no speed to this model."
    rows = speed_rows(speeds)
    assert rows[2][:3] == ["20", "-", "-"], "more machines than layers"
    assert rows[0][3:] == ["-", "-"], "a 70B model in the memory of one"
    assert len(rows[0]) == len(COLUMNS)
    assert not summary({2: speeds[2]})


def test_a_job_prints_the_table_after_its_text() -> None:
    done = finish(2, ["run", "-md", "none", "-p", "def f", "-n", "24", "--temp", "0", "--machines", "1,4"])
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.split()[:2] == ["machines", "this"])
    assert [line.split()[0] for line in lines[at + 1 : at + 3]] == ["1", "4"]
    assert all(len(line) <= 80 for line in lines[at - 3 :]), lines[at - 3 :]
    assert "simulated" in "".join(lines[at - 3 : at])
    assert "guessed ahead" in done.stderr, "auto is the default"
