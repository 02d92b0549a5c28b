"""Options of the types that caches keep keys and values as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from pipeinfer.job.options.options import DEFAULT
from pipeinfer.models.gguf.cache_types import CACHE_TYPES

Command = TypeVar("Command", bound=Callable[..., Any])

TYPES = {  # option -> other names, what it is for
    "cache-type-k": (("-ctk",), "What the target's keys are kept as (with --numerics fast)."),
    "cache-type-v": (("-ctv",), "And its values."),
    "cache-type-k-draft": (("-ctkd", "--spec-draft-type-k"), "What a draft's keys are kept as."),
    "cache-type-v-draft": (("-ctvd", "--spec-draft-type-v"), "And its values."),
}


def cache_options(command: Command) -> Command:
    """Add them."""
    for option, ((short, *others), what) in reversed(TYPES.items()):
        name = option.replace("-", "_")
        command = click.option(
            short, f"--{option}", *others, name, type=click.Choice(CACHE_TYPES), default=getattr(DEFAULT, name),
            show_default=True, help=what,
        )(command)  # fmt: skip
    return command
