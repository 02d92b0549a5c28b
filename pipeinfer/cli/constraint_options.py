"""Options that say of single tokens or of the whole text what may come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from pipeinfer.cli.values import LogitBias
from pipeinfer.core.logit_bias import bias_text, read_one

Command = TypeVar("Command", bound=Callable[..., Any])

CONSTRAINT_NAMES = ("biases",)


def constraint_options(command: Command) -> Command:
    """Add them; `take_biases` collects what they gave."""
    return click.option(
        "-l",
        "--logit-bias",
        "biases",
        type=LogitBias(),
        multiple=True,
        help="Add this to the logit of a token, as in 15043+1.5, 22-3 or 22-inf (never); may be given several times.",
    )(command)


def take_biases(given: dict[str, Any]) -> str:
    """Move the option's values out of a command's keyword arguments. Raises click.UsageError for too many."""
    try:
        return bias_text(map(read_one, given.pop("biases", ())))
    except ValueError as error:
        raise click.UsageError(f"--logit-bias {error}") from None
