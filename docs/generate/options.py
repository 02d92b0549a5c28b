"""The options of every command, for the reference page options.md. Groups and texts are those of `--help`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import click

from docs.generate.markdown import table
from pipeinfer.cli.commands import COMMANDS, cli

WIDTH = 10_000  # characters: no text of an option is wrapped

Rows = list[tuple[str, str]]


class Sections(click.HelpFormatter):
    """Keeps what a command writes below each heading of its `--help`."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, max_width=WIDTH)
        self.found: dict[str, Rows] = {}

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.found.setdefault(name, [])
        yield

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        self.found[next(reversed(self.found))].extend(row for row in rows if not row[0].endswith("--help"))


def tables() -> str:
    parent = click.Context(cli, info_name="pipeinfer", **cli.context_settings)
    run = _sections("run", cli.get_command(parent, "run"), parent)
    shared = {row for rows in run.values() for row in rows}
    names = ["run", *sorted(set(COMMANDS) - {"run"})]
    return "\n".join(part for name in names for part in _command(name, cli.get_command(parent, name), parent, shared))


def _command(
    name: str, command: click.Command | None, parent: click.Context, shared: set[tuple[str, str]]
) -> Iterator[str]:
    assert command
    context = click.Context(command, info_name=name, parent=parent)
    arguments = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
    yield f"## {context.command_path} {arguments}".rstrip() + "\n"
    yield f"{_paragraph(command)}\n"
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            yield from _command(each, command.get_command(context, each), context, shared)
        return
    sections = _sections(name, command, parent)
    if context.command_path != "pipeinfer run":
        same = [row[0] for rows in sections.values() for row in rows if row in shared]
        if same:
            yield "As `run` has them: " + ", ".join(f"`{_first(each)}`" for each in same) + ".\n"
        sections = {title: [row for row in rows if row not in shared] for title, rows in sections.items()}
    for title, rows in sections.items():
        if rows and title != "Commands":
            if len(sections) > 1:
                yield f"### {title}\n"
            yield table(["option", "meaning"], [[f"`{each}`", says] for each, says in rows])


def _paragraph(command: click.Command) -> str:
    return " ".join((command.help or "").partition("\n\n")[0].split())


def _sections(name: str, command: click.Command | None, parent: click.Context) -> dict[str, Rows]:
    assert command
    formatter = Sections()
    command.format_options(click.Context(command, info_name=name, parent=parent), formatter)
    return formatter.found


def _first(names: str) -> str:
    return names.split(",")[0].split(" ")[0]
