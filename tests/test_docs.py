"""Commands that README and docs show are commands: every word of them is read as the command line reads it."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import click
import pytest

from pipeinfer.cli.commands import COMMANDS, cli
from tests.jobs import ROOT

SHOWN = re.compile(rf"(?:^|\s|/|\))(?:pipeinfer\)?) ({'|'.join(COMMANDS)})\b(.*)")


def shown(path: Path) -> list[tuple[str, str]]:
    """(command, its words) of each indented line, without what follows # or a pipe."""
    found = []
    for line in path.read_text().splitlines():
        match = SHOWN.search(line) if line.startswith("    ") else None
        if match and "--help" not in line:
            found.append((match[1], re.split(r" #|\s\||`", match[2])[0]))
    return found


COMMANDS_SHOWN = [
    pytest.param(command, words, id=f"{name} {command} {words}"[:60])
    for name in ("README.md", "docs/clusters.md", "docs/server.md", "docs/gpu.md", "docs/load.md")
    for command, words in shown(ROOT / name)
]


@pytest.mark.parametrize(("command", "words"), COMMANDS_SHOWN)
def test_a_command_that_is_shown_can_be_given(command: str, words: str) -> None:
    parsed = shlex.split(words)
    # … stands for a value behind an option, else for further options
    read(cli, command, [word for before, word in pairwise(["", *parsed]) if word != "…" or before.startswith("-")])


def read(group: click.Group, name: str, words: list[str]) -> None:
    with click.Context(group) as parent:
        command = group.get_command(parent, name)
        assert command
        if isinstance(command, click.Group):
            read(command, words[0], words[1:])
        else:
            context = command.make_context(name, words, parent=parent)
            if name == "submit":
                first, *rest = context.params["words"]
                read(group, first, rest)


def test_the_documents_show_commands() -> None:
    assert len(COMMANDS_SHOWN) > 25
