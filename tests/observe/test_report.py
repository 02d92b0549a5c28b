"""What rank 0 prints: everything is there, however narrow the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipeinfer.observe.report import show_table

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
