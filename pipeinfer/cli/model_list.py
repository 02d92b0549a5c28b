"""`pipeinfer models list`: its option. What is listed is what `models.hub` finds."""

from __future__ import annotations

import click

from pipeinfer.cli.options.command import Command


@click.command("list", cls=Command)
@click.option("--json", is_flag=True, help="Print one JSON object.")
def list_command(json: bool) -> None:
    """List the models in the hub's cache: what -hf takes without a network."""
    from dataclasses import asdict

    from pipeinfer.models.hub import cached_models
    from pipeinfer.observe.texts.json_text import json_text
    from pipeinfer.observe.texts.model_text import list_lines

    found = [asdict(model) | {"path": str(model.path)} for model in cached_models()]
    click.echo(json_text({"models": found}) if json else "\n".join(list_lines(found)))
