"""Settings: dataclass fields that a user may change, with what a command line has to know of them. Parses nothing."""

import math
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from inspect import getdoc
from typing import Any

KEY = "setting"
HELP = re.compile(r"^(\w+): (.*(?:\n {4}.*)*)", re.MULTILINE)
"""A setting's help in a docstring: further lines are indented."""

REQUIRED = MISSING  # the default of a setting that must be given
MAX_WIDTH, MAX_DEPTH, MAX_TREE = 16, 64, 1000
"""Limits of policies' settings: guesses after one token, after each other, and of one tree."""

N_DRAFT = ("--draft", "--draft-max", "--draft-n", "--spec-draft-n-max")
P_MIN = ("--accept-cutoff", "-pa", "--draft-p-min", "--spec-draft-p-min")
P_SPLIT = ("--split-cutoff", "-ps", "--draft-p-split", "--spec-draft-p-split")
"""Flags of settings that llama.cpp has too."""

MAX_RUN, MAX_RUNS = 128, 1000
"""Limits of policies' settings: guesses of a run, and runs in flight. Messages and buffers have room for that."""


@dataclass(frozen=True, slots=True)
class Setting:
    """`flags`: of the command line, the long one first. `least`, `most`: limits of a number. `shown`: tables have it
    even at its default. `type`: converts and checks a word; None: the default's type. `repeated`: may be given several
    times. `written`: the default as help writes it, if not as its text. `first`: among the options that most users
    need. `column`: results.csv has it if it is not at its default. `for_guesses`: has no effect without guesses.
    `aliases`: other names in a request. `choices`: words that it may be. `paper`: its value in the preset `paper`;
    None: the default."""

    flags: tuple[str, ...]
    help: str = ""
    least: float = 0
    most: float = math.inf
    shown: bool = False
    type: Any = None
    repeated: bool = False
    written: str | None = None
    first: bool = False
    column: bool = False
    for_guesses: bool = False
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    paper: Any = None

    @property
    def flag(self) -> str:
        return self.flags[0]

    def given_as(self, value: Any) -> str:
        """The shortest flag that gives this value, which is not the default."""
        return min((flag.split("/")[0 if value is True else -1] for flag in self.flags), key=len)


def setting(default: Any, *flags: str, **more: Any) -> Any:
    """A dataclass field; `more`: fields of `Setting`. Its help may stand in the docstring of the dataclass, as `name:
    text` after the first paragraph. A default of True is an ablation, whose flags switch it off, unless they are
    written --on/--no-on."""
    return field(default=default, metadata={KEY: Setting(flags, **more)})


def settings_of(kind: type[Any]) -> Sequence[tuple[str, Any, Setting]]:
    """(name, default, setting) of every setting of a dataclass."""
    settings = ((each.name, each.default, each.metadata[KEY]) for each in fields(kind) if KEY in each.metadata)
    docs = [getdoc(base) or "" for base in reversed(kind.__mro__)]
    helps = {name: " ".join(text.split()) for doc in docs for name, text in HELP.findall(doc)}
    return tuple(
        (name, default, setting if setting.help else replace(setting, help=helps.get(name, "")))
        for name, default, setting in settings
    )


def value_text(value: Any) -> str:
    """A setting's value in tables and help."""
    return value if isinstance(value, str) else f"{value:g}"


def paper_settings(kind: type[Any]) -> dict[str, Any]:
    """The settings whose values differ in the preset `paper`, and those values."""
    return {name: setting.paper for name, _, setting in settings_of(kind) if setting.paper is not None}
