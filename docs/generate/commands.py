"""The options of every command, with the groups and texts of `--help`, and llama.cpp's options beside ours."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import click

from docs.generate.tables import code, table
from pipeinfer.cli.commands import COMMANDS, cli
from pipeinfer.cli.options.llama_cpp import ANY, ARGUMENTS, HARMLESS, INSTEAD, OF_COMMAND, OPTIONAL
from pipeinfer.cli.run import chat_command, run
from pipeinfer.cli.serve import serve_command

WIDTH = 10_000  # characters: no text of an option is wrapped

Rows = list[tuple[str, str]]


# -- options.md


class Sections(click.HelpFormatter):
    """Collects the rows below each heading of a command's `--help`."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, max_width=WIDTH)
        self.sections: dict[str, Rows] = {}

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.sections.setdefault(name, [])
        yield

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        self.sections[next(reversed(self.sections))].extend(row for row in rows if not row[0].endswith("--help"))


def options() -> str:
    parent = click.Context(cli, info_name="pipeinfer", **cli.context_settings)
    of_run = _sections("run", cli.get_command(parent, "run"), parent)
    shared = {row for rows in of_run.values() for row in rows}
    names = ["run", *sorted(set(COMMANDS) - {"run"})]
    return "\n".join(part for name in names for part in _command(name, cli.get_command(parent, name), parent, shared))


def _command(
    name: str, command: click.Command | None, parent: click.Context, shared: set[tuple[str, str]]
) -> Iterator[str]:
    assert command
    context = click.Context(command, info_name=name, parent=parent)
    arguments = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
    yield f"## {context.command_path} {arguments}".rstrip() + "\n"
    yield " ".join((command.help or "").partition("\n\n")[0].split()) + "\n"
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            yield from _command(each, command.get_command(context, each), context, shared)
        return
    sections = _sections(name, command, parent)
    if context.command_path != "pipeinfer run":
        same = [row[0] for rows in sections.values() for row in rows if row in shared]
        if same:
            yield f"As `run` has them: {code(names.split(',')[0].split(' ')[0] for names in same)}.\n"
        sections = {title: [row for row in rows if row not in shared] for title, rows in sections.items()}
    for title, rows in sections.items():
        if rows and title != "Commands":
            if len(sections) > 1:
                yield f"### {title}\n"
            yield table(["option", "meaning"], [[f"`{option}`", meaning] for option, meaning in rows])


def _sections(name: str, command: click.Command | None, parent: click.Context) -> dict[str, Rows]:
    assert command
    formatter = Sections()
    command.format_options(click.Context(command, info_name=name, parent=parent), formatter)
    return formatter.sections


# -- llama-cpp.md

LIKE_LLAMA_CPP = (serve_command, run, chat_command)


def own_options() -> dict[str, click.Parameter]:
    """Flag -> the option of the commands that are named like llama.cpp's programs."""
    names = {name for param in (*run.params, *chat_command.params) for name in param.opts}
    served = [param for param in serve_command.params if not names & {*param.opts}]
    params = [
        *map(_marked, (*served, *run.params, *chat_command.params)),
        click.Option(["-h", "--help"], help="Say this, for each command."),
        click.Option(["--version"], help="Of `pipeinfer` itself: its version, llama.cpp's and those of what it uses."),
    ]
    return {name: param for param in params for name in _flags(param)}


def _marked(param: click.Parameter) -> click.Parameter:
    """An option whose help names the commands that have it, unless all have."""
    names = [str(each.name) for each in LIKE_LLAMA_CPP if param.opts in [other.opts for other in each.params]]
    if len(names) == len(LIKE_LLAMA_CPP):
        return param
    shown = copy.copy(param)
    assert isinstance(shown, click.Option) and shown.help
    shown.help = f"({', '.join(names)}) {shown.help}"
    return shown


def llama_cpp() -> str:
    ours = own_options()
    shared: list[list[str]] = []
    missing: dict[str, list[str]] = {}
    harmless: list[list[str]] = []
    for variable, flags in ARGUMENTS:
        if same := [flag for flag in flags if flag in ours]:
            is_read = variable and variable in (ours[same[0]].envvar or ())
            shared.append([_spelled(same), f"`{variable}`" if is_read else "", _help(ours[same[0]])])
        others = [flag for flag in flags if flag not in ours]
        if accepted := [flag for flag in others if flag in HARMLESS]:
            values = [value for value in HARMLESS[accepted[0]] or () if value != OPTIONAL]
            harmless.append([_spelled(accepted), "any" if ANY in values else ", ".join(values)])
        for flag in filter(INSTEAD.get, others):
            missing.setdefault(INSTEAD[flag], []).append(flag)
    otherwise: dict[tuple[str, str, str], list[str]] = {}
    for command, (harmless_there, instead) in OF_COMMAND.items():
        for flag in {**harmless_there, **instead}:
            values_there = ", ".join(harmless_there.get(flag) or ())
            otherwise.setdefault((command, values_there, instead.get(flag, "it is so anyway")), []).append(flag)
    theirs = {flag for _, flags in ARGUMENTS for flag in flags}
    further = {id(param): param for param in ours.values() if not theirs.intersection(_flags(param))}
    parts = {
        "Here, with the same name": table(["option", "variable", "here"], shared),
        "Taken, without effect: it is so anyway": table(["option", "values"], harmless),
        "Not here": table(["option", "instead"], [[_spelled(flags), hint] for hint, flags in missing.items()]),
        "Otherwise by command": table(
            ["command", "option", "values taken", "why, or instead"],
            [[command, _spelled(flags), values, why] for (command, values, why), flags in otherwise.items()],
        ),
        "Here, and not in llama.cpp": table(
            ["option", "what it does"], [[_spelled(_flags(param)), _help(param)] for param in further.values()]
        ),
    }
    return "\n".join(f"## {title}\n\n{rows}" for title, rows in parts.items())


def _flags(param: click.Parameter) -> list[str]:
    return [*param.opts, *param.secondary_opts]


def _spelled(flags: Iterable[str]) -> str:
    return code(flag for flag in dict.fromkeys(flags) if flag.startswith("-"))


def _help(param: click.Parameter) -> str:
    return (getattr(param, "help", "") or "").split("  [")[0].split(" [default")[0]
