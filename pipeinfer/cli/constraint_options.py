"""Options that say of single tokens or of the whole text what may come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from pipeinfer.cli.values import File, LogitBias, Text
from pipeinfer.core.logit_bias import bias_text, read_one
from pipeinfer.job.options.options import GrammarOptions

Command = TypeVar("Command", bound=Callable[..., Any])

GRAMMAR_NAMES = ("grammar", "grammar_file", "schema", "schema_file")
CONSTRAINT_NAMES = ("biases", *GRAMMAR_NAMES)


def constraint_options(command: Command) -> Command:
    """Add them; `take_biases` and `take_grammar` collect what they gave."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = (
    click.option(
        "-l", "--logit-bias", "biases", type=LogitBias(), multiple=True,
        help="Add this to the logit of a token, as in 15043+1.5, 22-3 or 22-inf (never); may be given several times.",
    ),
    click.option(
        "--grammar", type=Text(), help="What the text must be, in llama.cpp's form (GBNF): 'root ::= \"yes\" | \"no\"'."
    ),
    click.option("--grammar-file", type=File(), help="The same, from a file."),
    click.option(
        "-j", "--json-schema", "schema", type=Text(),
        help="The text must be JSON that this schema describes; {}: any object.",
    ),
    click.option("-jf", "--json-schema-file", "schema_file", type=File(), help="The same, from a file."),
)  # fmt: skip


def take_biases(given: dict[str, Any]) -> str:
    """Move the option's values out of a command's keyword arguments. Raises click.UsageError for too many."""
    try:
        return bias_text(map(read_one, given.pop("biases", ())))
    except ValueError as error:
        raise click.UsageError(f"--logit-bias {error}") from None


def take_grammar(given: dict[str, Any]) -> GrammarOptions:
    """The same for the grammar. Raises click.UsageError for more than one."""
    found = {name: given.pop(name, None) for name in GRAMMAR_NAMES}
    if sum(value is not None for value in found.values()) > 1:
        raise click.UsageError(
            "--grammar, --grammar-file, --json-schema and --json-schema-file all say what the text must be; "
            "give one of them"
        )
    return GrammarOptions(**found)
