"""The option of all commands that have many requests at a time: how long these may hold each other up."""

from __future__ import annotations

import click

from pipeinfer.cli.values import Number

max_delay_option = click.option(
    "--max-delay", "max_delay_s", type=Number(0, 1e6, above=True),
    help="Seconds that the tokens of a text may come later because prompts of others are read meanwhile: these are cut "
    "into chunks that take all stages together so long. [default: chunks are as long as is good for the prompt]",
)  # fmt: skip
