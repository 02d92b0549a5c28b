"""docs/llama-cpp.md, made from our options and the names of the pinned llama.cpp's: `python -m tests.llama_table`
writes it. `llama_arguments.txt` has a line for each of llama.cpp's: its variable or -, then its spellings."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import click

from pipeinfer.cli.chat import chat_command
from pipeinfer.cli.llama_flags import HARMLESS, INSTEAD
from pipeinfer.cli.run import run
from pipeinfer.cli.serve import serve_command

PATH = Path(__file__).parent.parent / "docs" / "llama-cpp.md"
HEAD = """# llama.cpp's options here

`pipeinfer run`, `chat` and `serve` take the options of llama.cpp's programs that there is something to do for, under
their names and with their meanings; their environment variables too, where llama.cpp has one (the command line comes
first). What is not there is refused with a line that says what to use instead; of a variable a line says that it is not
read. The table is made from the options themselves, and a test compares it with the names of the pinned llama.cpp.

What differs where the name is the same:

* `-c 0` is as much as the prompt and `-n` need, in a chat 4096 tokens at most; a full one is not shifted.
* `-b` is the prompt tokens of a run through the pipeline.
* `-t` may have a value for each rank.
* `--device` and `-ngl` may have a value for each rank; several devices of one are joined with +. A lone process takes
  llama.cpp's commas.
* `--numa isolate` gives the ranks of a host each its own nodes; a host's only rank keeps all.
* `-md` may come several times: of several drafts the smallest guesses, larger ones refine.
* `-r` is not printed; `--stop` is another name for it.
* `-cnv` is not the default for models with a template: `run` continues a text as it stands, `run --chat` asks once.
* `--draft`, `--draft-p-min` and the like are options of some policies.
* `-t -1`, `--temp` below 0, `--repeat-last-n -1` and an empty `-sys` are refused: leave them out, or give a number.

"""


def arguments() -> Iterator[tuple[str, list[str]]]:
    """(variable or empty, spellings) of each option of llama.cpp."""
    for line in Path(__file__).with_name("llama_arguments.txt").read_text().splitlines():
        variable, *flags = line.split()
        yield ("" if variable == "-" else variable), flags


def own_options() -> dict[str, click.Parameter]:
    known = {name for param in (*run.params, *chat_command.params) for name in param.opts}
    served = [_served(param) for param in serve_command.params if not known & {*param.opts}]
    params = [
        *served,
        *run.params,
        *chat_command.params,
        click.Option(["-h", "--help"], help="Say this, for each command."),
    ]
    params.append(click.Option(["--version"], help="Of `pipeinfer` itself: its version and llama.cpp's."))
    return {name: param for param in params for name in (*param.opts, *param.secondary_opts)}


def _served(param: click.Parameter) -> click.Parameter:
    """An option of the server alone, which says so."""
    shown = copy.copy(param)
    assert isinstance(shown, click.Option) and shown.help
    shown.help = f"(serve) {shown.help}"
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
            harmless.append([_spelled(accepted), ", ".join(values) if values else ""])
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


if __name__ == "__main__":
    PATH.write_text(HEAD + table())
