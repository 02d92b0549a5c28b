"""Settings: fields of a dataclass that a user may change, with all that a command line has to know of them.

A new setting is one line where it is used. Parses nothing and prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

KEY = "setting"


@dataclass(frozen=True, slots=True)
class Setting:
    """`flags`: as on the command line, the long name first. `least`, `most`: of a number. `shown`: in tables also while
    it is as by default."""

    flags: tuple[str, ...]
    help: str
    least: float = 0
    most: float = math.inf
    shown: bool = False

    @property
    def flag(self) -> str:
        return self.flags[0]


def setting(default: Any, *flags: str, help: str, least: float = 0, most: float = math.inf, shown: bool = False) -> Any:
    """A dataclass field. A default of True is an ablation: its flags switch it off."""
    return field(default=default, metadata={KEY: Setting(flags, help, least, most, shown)})


def settings_of(kind: type[Any]) -> Iterator[tuple[str, Any, Setting]]:
    """(name, default, setting) of every setting of a dataclass."""
    return ((each.name, each.default, each.metadata[KEY]) for each in fields(kind) if KEY in each.metadata)
