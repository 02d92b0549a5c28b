"""Tables on a terminal: as many columns side by side as it is wide, with every number."""

import os
import pty
import subprocess
import sys

import pytest

from pipeinfer.text import markdown_table, narrowed

COLUMNS = ("model", "policy", *(f"figure {number}" for number in range(9)))
ROWS = [["target Q8_0", policy, *(f"{policy[0]}{number}" for number in range(9))] for policy in ("iterative", "auto")]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line[1:-1].split("|")]


@pytest.mark.parametrize("width", [30, 47, 80, 119])
def test_a_narrow_terminal_gets_every_cell_and_the_column_that_tells_rows_apart(width: int) -> None:
    lines = list(narrowed(["before", "", *markdown_table(COLUMNS, ROWS), "after " * 40], width))
    table = lines[2:-1]
    assert (lines[:2], lines[-1]) == (["before", ""], "after " * 40)
    assert max(map(len, table)) <= width
    parts = [part.split("\n") for part in "\n".join(table).split("\n\n")]
    assert len(parts) > 1
    for number, row in enumerate(ROWS):
        shown = [cells(part[2 + number]) for part in parts]
        assert {part[0] for part in shown} == {row[1]}
        assert [cell for part in shown for cell in part[1:]] == [row[0], *row[2:]]


def test_a_table_that_fits_stays_and_a_wide_cell_is_not_cut() -> None:
    table = markdown_table(COLUMNS, ROWS)
    assert list(narrowed(table, len(table[0]))) == table
    wide = markdown_table(("policy", "settings"), [["auto", "x" * 100]])
    assert list(narrowed(wide, 80)) == wide
    alone = markdown_table(("settings",), [["x" * 100]])
    assert list(narrowed(alone, 80)) == alone


def test_plan_fits_the_terminal_and_a_pipe_gets_whole_tables() -> None:
    command = [sys.executable, "-m", "pipeinfer", "plan"]
    whole = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    head, terminal = pty.openpty()
    with os.fdopen(head, "rb", 0) as shown:
        subprocess.run(command, check=True, stdout=terminal, env=os.environ | {"COLUMNS": "80"})
        os.close(terminal)
        narrow = shown.read(65536).decode()
    tables = [[line for line in text.splitlines() if line.startswith("|")] for text in (whole, narrow)]
    assert len(tables[0][0]) > 80 >= max(map(len, tables[1]))
    names = [{cell for line in table for cell in cells(line) if cell.isalpha()} for table in tables]
    assert names[0] == names[1]
