"""The option of all commands that have many requests at a time: how long these may hold each other up."""

from __future__ import annotations

from typing import Any

import click

from pipeinfer.cli.values import Number
from pipeinfer.core.batch_planner import ONE_CHUNK

WORDS = {"chunk": ONE_CHUNK, "none": None}


class Delay(Number):
    """Seconds above 0, or a word: `chunk` is ONE_CHUNK, `none` no limit, which is None."""

    name = "delay"

    def __init__(self) -> None:
        super().__init__(0, 1e6, above=True)
        self.wanted += ", and neither chunk nor none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return WORDS[value] if value in WORDS else super().convert(value, param, ctx)


max_delay_option = click.option(
    "--max-delay", "max_delay_s", type=Delay(), default="none", show_default=True,
    help="Seconds that the tokens of a text may come later because prompts of others are read meanwhile: these are cut "
    "into chunks that take all stages together so long. chunk: what one of -b tokens takes; none: no limit.",
)  # fmt: skip
