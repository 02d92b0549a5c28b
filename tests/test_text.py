"""Tables on a terminal: as many columns side by side as it is wide, with every number."""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import BinaryIO

import pytest

from pipeinfer.child import own_program
from pipeinfer.text import markdown_table, narrowed

COLUMNS = ("model", "policy", *(f"figure {number}" for number in range(9)))
ROWS = [["target Q8_0", policy, *(f"{policy[0]}{number}" for number in range(9))] for policy in ("iterative", "auto")]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line[1:-1].split("|")]


@pytest.mark.parametrize("width", [30, 47, 80, 119])
def test_a_narrow_terminal_gets_every_cell_and_the_column_that_tells_rows_apart(width: int) -> None:
    lines = list(narrowed(["before", "", *markdown_table(COLUMNS, ROWS, COLUMNS[2:]), "after " * 40], width))
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


@pytest.mark.parametrize("side", [(), ("settings",)])
def test_a_wide_cell_with_spaces_is_on_several_lines(side: tuple[str, ...]) -> None:
    rows = [["auto", ""], ["flowspec", "depth 5, tree_size 80, width 10"]]
    lines = list(narrowed(markdown_table(("policy", "settings"), rows, side), 32))
    assert {len(line) for line in lines} == {len(lines[0])} and len(lines[0]) <= 32
    shown = [cells(line) for line in lines]
    assert shown[0] == ["policy", "settings"] and set(shown[1][1]) <= {"-", ":"}
    assert shown[2:] == [rows[0], ["flowspec", "depth 5,"], ["", "tree_size 80,"], ["", "width 10"]]


def test_parts_begin_with_the_names_that_tell_rows_apart_not_with_figures() -> None:
    columns = ("model", "size", "policy", "test", "tokens/s", "TTFT ms")
    policies, tests = ("iterative", "auto"), ("program", "tale")
    cases = [(policy, test) for policy in policies for test in tests]
    rows = [["target", "9 MB", *case, f"{number}.5", f"{number}.25"] for number, case in enumerate(cases)]
    table = markdown_table(columns, rows, right_aligned=("size", "tokens/s", "TTFT ms"))
    for part in "\n".join(narrowed(table, 40)).split("\n\n"):
        heads, _, *shown = map(cells, part.split("\n"))
        assert heads[:2] == ["policy", "test"]
        assert [tuple(row[:2]) for row in shown] == cases


def everything(shown: BinaryIO) -> str:
    """What comes until nobody has the terminal any more."""
    text = b""
    with contextlib.suppress(OSError):
        while piece := shown.read(65536):
            text += piece
    return text.decode()


@pytest.mark.ranks
@pytest.mark.parametrize("columns", [0, 80])
def test_under_a_launcher_tables_fit_the_terminal_of_the_launcher(columns: int) -> None:
    """The launcher prints what comes through a pipe. A terminal whose size is not known gets them whole."""
    words = [own_program("mpirun"), "-np", "1", sys.executable, "-m", "pipeinfer", "plan"]
    head, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(head, "rb", 0) as shown:
        process = subprocess.Popen(words, stdout=terminal, stdin=subprocess.DEVNULL)
        os.close(terminal)
        text = everything(shown)
        assert process.wait() == 0
    widths = [len(line.rstrip("\r")) for line in text.split("\n") if line.startswith("|")]
    assert max(widths) > 80 if not columns else 0 < max(widths) <= columns


def test_plan_fits_the_terminal_and_a_pipe_gets_whole_tables() -> None:
    command = [sys.executable, "-m", "pipeinfer", "plan"]
    whole = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    head, terminal = pty.openpty()
    with os.fdopen(head, "rb", 0) as shown:
        process = subprocess.Popen(command, stdout=terminal, env=os.environ | {"COLUMNS": "80"})
        os.close(terminal)
        narrow = everything(shown)
        assert process.wait() == 0
    tables = [[line for line in text.splitlines() if line.startswith("|")] for text in (whole, narrow)]
    assert len(tables[0][0]) > 80 >= max(map(len, tables[1]))
    names = [{cell for line in table for cell in cells(line) if cell.isalpha()} for table in tables]
    assert names[0] == names[1]
