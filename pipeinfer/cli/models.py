"""`pipeinfer models`: look at model files, compare them, and cut them."""

from __future__ import annotations

import click

from pipeinfer.cli.model_check import check_command
from pipeinfer.cli.model_info import info_command
from pipeinfer.cli.model_list import list_command
from pipeinfer.cli.model_split import split_command
from pipeinfer.cli.options.command import Group


@click.group(cls=Group)
def models() -> None:
    """Look at model files, and cut them into slices."""


models.add_command(info_command)
models.add_command(check_command)
models.add_command(list_command)
models.add_command(split_command)
