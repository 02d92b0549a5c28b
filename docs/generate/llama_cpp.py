"""llama.cpp's options beside ours, for the reference page llama-cpp.md."""

from __future__ import annotations

import copy

import click

from pipeinfer.cli.chat import chat_command
from pipeinfer.cli.options.environment import arguments
from pipeinfer.cli.options.llama_flags import ANY, HARMLESS, INSTEAD
from pipeinfer.cli.run import run
from pipeinfer.cli.serve import serve_command

COMMANDS = (serve_command, run, chat_command)


def own_options() -> dict[str, click.Parameter]:
    known = {name for param in (*run.params, *chat_command.params) for name in param.opts}
    served = [param for param in serve_command.params if not known & {*param.opts}]
    params = [
        *map(_marked, (*served, *run.params, *chat_command.params)),
        click.Option(["-h", "--help"], help="Say this, for each command."),
    ]
    params.append(
        click.Option(["--version"], help="Of `pipeinfer` itself: its version, llama.cpp's and those of what it uses.")
    )
    return {name: param for param in params for name in (*param.opts, *param.secondary_opts)}


def _marked(param: click.Parameter) -> click.Parameter:
    """An option that says which commands have it, unless all have."""
    names = [str(each.name) for each in COMMANDS if param.opts in [other.opts for other in each.params]]
    if len(names) == len(COMMANDS):
        return param
    shown = copy.copy(param)
    assert isinstance(shown, click.Option) and shown.help
    shown.help = f"({', '.join(names)}) {shown.help}"
    return shown


def table() -> str:
    ours, theirs = own_options(), list(arguments())
    shared: list[list[str]] = []
    missing: dict[str, list[str]] = {}
    harmless: list[list[str]] = []
    for variable, flags in theirs:
        known = [flag for flag in flags if flag in ours]
        if known:
            is_read = variable and variable in (ours[known[0]].envvar or ())
            shared.append([_spelled(known), f"`{variable}`" if is_read else "", _help(ours[known[0]])])
            continue
        accepted = [flag for flag in flags if flag in HARMLESS]
        if accepted:
            values = HARMLESS[accepted[0]]
            harmless.append([_spelled(accepted), "any" if values is ANY else ", ".join(values or ())])
        for flag in flags:
            if flag in INSTEAD:
                missing.setdefault(INSTEAD[flag], []).append(flag)
    names = {flag for _, flags in theirs for flag in flags}
    further = {id(param): param for name, param in ours.items() if not {*param.opts, *param.secondary_opts} & names}
    own = [[_spelled([*param.opts, *param.secondary_opts]), _help(param)] for param in further.values()]
    parts = [
        ("Here, with the same name", ["option", "variable", "here"], shared),
        ("Taken, without effect: it is so anyway", ["option", "values"], harmless),
        ("Not here", ["option", "instead"], [[_spelled(flags), says] for says, flags in missing.items()]),
        ("Here, and not in llama.cpp", ["option", "what it does"], own),
    ]
    return "\n".join(line for title, columns, rows in parts for line in _part(title, columns, rows)).rstrip("\n") + "\n"


def _part(title: str, columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [
        f"## {title}",
        "",
        *("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |" for cells in lines),
        "",
    ]


def _spelled(flags: list[str]) -> str:
    return ", ".join(f"`{flag}`" for flag in dict.fromkeys(flags) if flag.startswith("-"))


def _help(param: click.Parameter) -> str:
    return (getattr(param, "help", "") or "").split("  [")[0].split(" [default")[0]
