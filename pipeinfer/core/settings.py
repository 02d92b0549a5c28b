"""Settings: fields of a dataclass that a user may change, with all that a command line has to know of them.

A new setting is one line where it is used. Parses nothing and prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

KEY = "setting"
REQUIRED = MISSING
"""The default of a setting that must be given."""


@dataclass(frozen=True, slots=True)
class Setting:
    """`flags`: as on the command line, the long name first. `least`, `most`: of a number. `shown`: in tables also while
    it is as by default. `type`: what converts and checks a word; None: as the default's type says. `repeated`: may be
    given several times. `written`: the default as a word, where that is not its text. `first`: one of the options that
    most users need. `column`: where it is not as by default results.csv says so. `for_guesses`: without effect where
    there are no guesses. `aliases`: other names of it in a request."""

    flags: tuple[str, ...]
    help: str
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

    @property
    def flag(self) -> str:
        return self.flags[0]

    @property
    def given_as(self) -> str:
        """The shortest flag for a value other than the default."""
        return min((flag.rpartition("/")[2] for flag in self.flags), key=len)


def setting(default: Any, *flags: str, help: str, **more: Any) -> Any:
    """A dataclass field; `more`: fields of `Setting`. A default of True is an ablation, whose flags switch it off,
    unless they are written --on/--no-on."""
    return field(default=default, metadata={KEY: Setting(flags, help, **more)})


def settings_of(kind: type[Any]) -> Iterator[tuple[str, Any, Setting]]:
    """(name, default, setting) of every setting of a dataclass."""
    return ((each.name, each.default, each.metadata[KEY]) for each in fields(kind) if KEY in each.metadata)
