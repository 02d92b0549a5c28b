"""llama.cpp's options and environment variables (LLAMA_ARG_*): a command reads them, accepts them without effect, or
refuses them with a hint. `llama_cpp.txt` has the data."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click

PREFIX = "LLAMA_ARG_"
NEGATION = f"{PREFIX}NO_"
ARGUMENTS: list[tuple[str, list[str]]] = []  # (variable, or -, and spellings) of the options of the pinned llama.cpp

HARMLESS: dict[str, tuple[str, ...] | None] = {}
"""Flag -> the values with which it is accepted, without effect; None: it takes no value."""

INSTEAD: dict[str, str] = {}  # flag -> the nearest option that there is, or why there is none
HINTS: dict[str, str] = {}  # the texts of `INSTEAD` by name
OF_RUN: dict[str, str] = {}  # flags of `run` -> a hint for other commands
IMPLIED: dict[str, list[str]] = {}  # command -> flags for what it does in any case
ANY, OPTIONAL = "*", "?"  # among values of a harmless flag: any value; the value may be left out


def _read_data() -> None:
    names: dict[str, str] = {}
    for line in Path(__file__).with_name("llama_cpp.txt").read_text().splitlines():
        first, _, rest = line.partition(" ")
        rest, _, name = rest.partition(" : ")
        words, is_harmless, values = rest.partition(" =")
        flags = words.split()
        if first.endswith(":"):
            HINTS[first[:-1]] = line.partition(" ")[2]
        elif first == "run":
            OF_RUN.update(dict.fromkeys(flags, name))
        elif first.islower():
            IMPLIED[first] = flags
        elif first not in ("", "#"):
            names |= dict.fromkeys(flags, name) if name else {}
            HARMLESS.update(dict.fromkeys(flags, tuple(values.split()) or None) if is_harmless else {})
            if first == "+":
                ARGUMENTS[-1][1].extend(flags)
            elif first != "*":
                ARGUMENTS.append((first, flags))
    INSTEAD.update({flag: HINTS[name] for flag, name in names.items()})
    OF_RUN.update({flag: HINTS[name] for flag, name in OF_RUN.items()})


_read_data()

RANKS, NODES = "-np", "--nodes"
"""The launcher's option for ranks, which llama.cpp has for texts at a time; the option of commands that count nodes."""

VARIABLES: Mapping[str, str] = {
    f"{PREFIX}MODEL_DRAFT": "-md",
    f"{PREFIX}MLOCK": "--mlock",
    f"{PREFIX}MMAP": "--mmap",
    **{name: flags[0] for name, flags in ARGUMENTS if name.startswith(PREFIX)},
}
"""Variable -> its flag."""

GUESSING = frozenset(("--draft", "--spec-draft-n-max", "--spec-draft-p-split", "--spec-draft-p-min"))
"""Options that only some policies have: they are read from the command line alone."""

OFF = ("off", "0", "false", "disabled", "auto", "-1")


def read_variables(option: click.Parameter) -> None:
    """Let variables give an option, too; the command line comes first."""
    flags = {*option.opts, *option.secondary_opts} - GUESSING
    option.envvar = [name for name, flag in VARIABLES.items() if flag in flags] or None


def ignored_variables(command: click.Command, environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that is set to request something, and has no effect on the command."""
    read = {name for option in command.params for name in _listed(option.envvar)}
    of_server = (HINTS["server"], HINTS["no-server"]) if command.name != "serve" else ()
    for name, value in sorted(environment.items()):
        is_ignored = name.startswith(PREFIX) and name not in read and value
        if is_ignored and INSTEAD.get(VARIABLES.get(name, "")) not in of_server and (line := _ignored(name, value)):
            yield line


def _ignored(name: str, value: str) -> str:
    """Why a variable has no effect; empty if no effect is expected."""
    flag = VARIABLES.get(name, "")
    if not flag:
        is_negation = name.replace(NEGATION, PREFIX, 1) in VARIABLES  # it switches off what is not there anyway
        return "" if is_negation else f"{name} is set, which is not known here"
    if flag in GUESSING:
        return f"{name} is set and not read: which options guesses have depends on --policy; give {flag}"
    values = HARMLESS.get(flag, OFF)  # a missing option is switched off
    if not values or ANY in values or value in values:
        return ""
    return f"{name} is set and not read: {INSTEAD.get(flag, f'{flag} {value} cannot be had here')}"


def _listed(names: str | Iterable[str] | None) -> Iterable[str]:
    return (names,) if isinstance(names, str) else names or ()
