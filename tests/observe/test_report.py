"""What rank 0 prints: everything is there, however narrow the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from pipeinfer.observe.report import advice_on, show_table

COLUMNS = ["rank", "host", "role", "layers", "weights", "KV", "threads"]
ROWS = [
    ["0", "a-host-with-a-name.example.org", "draft", "-", "1.2 GB", "-", "16"],
    ["1", "a-host-with-a-name.example.org", "draft 2 + stage 0", "0-31", "33.5 GB", "123.4 MB", "16"],
]


def shown(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    show_table(console, COLUMNS, ROWS)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_no_cell_of_the_plan_is_cut(width: int) -> None:
    lines = shown(width)
    assert all(len(line) <= width for line in lines)
    words = " ".join(lines).split()
    assert all(word in words or f"{word}," in words for row in ROWS for cell in row for word in cell.split())


def test_where_there_is_room_it_is_a_table() -> None:
    assert len(shown(100)) == 1 + len(ROWS)


def ended(policy: str, n_guesses: int, busy: tuple[float, ...] = (0.4, 0.4)) -> dict[str, Any]:
    ranks = [{"rank": rank, "layers": [0, 1], "busy_s": busy_s, "wall_s": 1.0} for rank, busy_s in enumerate(busy)]
    return {"policy": policy, "speculation": {"draft_n": n_guesses}, "ranks": ranks}


def test_no_advice_is_given_that_is_followed_already() -> None:
    uneven, nothing = (0.9, 0.1), "-v says more"
    plain = advice_on(ended("iterative", 0), has_draft=False, is_split=False)
    assert "--policy auto guesses what stood in the text before, -md FILE gives a draft" in plain
    named = advice_on(ended("iterative", 0), has_draft=True, is_split=False)
    assert "--policy auto lets the draft guess" in named and "-md" not in named
    looked_up = advice_on(ended("auto", 0), has_draft=False, is_split=False)
    assert "-md FILE gives a draft" in looked_up and "--policy" not in looked_up
    for policy in ("auto", "pipeinfer"):
        assert advice_on(ended(policy, 0), has_draft=True, is_split=False) == nothing
    assert "see --layer-split" in advice_on(ended("auto", 9, uneven), has_draft=True, is_split=False)
    assert "see" not in advice_on(ended("auto", 9, uneven), has_draft=True, is_split=True)
    for result in (ended("iterative", 0, (0.9,)), ended("auto", 9)):
        assert advice_on(result, has_draft=False, is_split=False) == nothing
