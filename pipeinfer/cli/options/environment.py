"""llama.cpp's environment variables, LLAMA_ARG_*: options that exist here read theirs, others are reported.

`llama_arguments.txt` has a line for each option of the pinned llama.cpp: its variable or -, then its spellings.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click

from pipeinfer.cli.options.llama_flags import HARMLESS, INSTEAD, NOT_SERVED, OFF, SERVER

PREFIX = "LLAMA_ARG_"
NEGATION = f"{PREFIX}NO_"


def arguments() -> Iterator[tuple[str, list[str]]]:
    """(variable, or -, and spellings) of each option of the pinned llama.cpp."""
    for line in Path(__file__).with_name("llama_arguments.txt").read_text().splitlines():
        variable, *flags = line.split()
        yield variable, flags


VARIABLES: Mapping[str, str] = {
    f"{PREFIX}MODEL_DRAFT": "-md", f"{PREFIX}MLOCK": "--mlock", f"{PREFIX}MMAP": "--mmap",
    **{name: flags[0] for name, flags in arguments() if name.startswith(PREFIX)},
}  # fmt: skip
"""Variable -> the flag that it stands for."""

GUESSING = frozenset(("--draft", "--spec-draft-n-max", "--spec-draft-p-split", "--spec-draft-p-min"))
"""Options that only some policies have: the command line alone gives them."""


def read_variables(option: click.Parameter) -> None:
    """Let an option be given by these variables too; what the command line says comes first."""
    flags = {*option.opts, *option.secondary_opts} - GUESSING
    option.envvar = [name for name, flag in VARIABLES.items() if flag in flags] or None


def ignored_variables(command: click.Command, environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that is set and has no effect on the command, though it asks for something."""
    known = {name for option in command.params for name in _listed(option.envvar)}
    for name, value in sorted(environment.items()):
        of_others = command.name != "serve" and INSTEAD.get(VARIABLES.get(name, "")) in (SERVER, NOT_SERVED)
        is_unread = name.startswith(PREFIX) and name not in known and value and not of_others
        if is_unread and (line := _why(name, value)):
            yield line


def _why(name: str, value: str) -> str:
    """Why a variable has no effect; empty where nobody would expect one."""
    flag = VARIABLES.get(name, "")
    if not flag:
        is_negation = name.replace(NEGATION, PREFIX, 1) in VARIABLES  # what it switches off is not there anyway
        return "" if is_negation else f"{name} is set, which is not known here"
    if flag in GUESSING:
        return f"{name} is set and not read: which options guesses have depends on --policy; give {flag}"
    values = HARMLESS.get(flag, OFF)  # an option that is not there is as if it was switched off
    if not values or value in values:
        return ""
    return f"{name} is set and not read: {INSTEAD.get(flag, f'{flag} {value} cannot be had here')}"


def _listed(names: str | Iterable[str] | None) -> Iterable[str]:
    return (names,) if isinstance(names, str) else names or ()
