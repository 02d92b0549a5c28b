"""`pipeinfer models split`: its options. What it writes is `job.split`'s."""

from __future__ import annotations

from pathlib import Path

import click

from pipeinfer.cli.options.command import Command
from pipeinfer.cluster.plan import parse_split
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_LAYERS
from pipeinfer.job.options.values import File, Folder, Listed, Split, Whole


@click.command("split", cls=Command)
@click.argument("target", type=File())
@click.option("-o", "--output", type=Folder(), required=True, help="The directory, which --slice-cache then names.")
@click.option("--layer-split", type=Split(), help="Layers a stage (4,4,8) or proportions (0.25,0.25,0.5), as in `run`.")
@click.option("--plan", type=File(), help="A plan as `pipeinfer plan --json` prints it: its stages.")
@click.option(
    "--stages", type=Whole(2, MAX_LAYERS), help="So many stages, by size, as `run` cuts for ranks that are alike."
)
@click.option(
    "--only", type=Listed(Whole(0, MAX_LAYERS - 1)), default=(),
    help="Slices of these stages alone, counted from 0 as in the plan: for a host with some of the ranks.",
)  # fmt: skip
def split_command(
    target: Path, output: Path, layer_split: str | None, plan: Path | None, stages: int | None, only: tuple[int, ...]
) -> None:
    """Write the slices of TARGET's layers into a directory: ranks of `run --slice-cache` read them and cut nothing.

    The directory may be copied to the ranks' hosts. Slices are verified before they are used: that they are whole, and
    of the file that rank 0, or the rank itself, has now. What is there already and right is left.
    """
    if sum(given is not None for given in (layer_split, plan, stages)) != 1:
        raise UserError("give one of --layer-split, --plan and --stages: which layers belong together")
    from pipeinfer.job.loading.split import split_of_plan, write_slices
    from pipeinfer.job.placement.fetch import fetch_files

    (path,) = fetch_files([target])
    split = parse_split(layer_split) if layer_split else split_of_plan(plan) if plan else None
    for each in write_slices(path, split, stages or 0, output, only):
        state = "written" if each.is_new else "is there"
        click.echo(f"{each.path}: {each.what}, {each.n_bytes / 1e6:.1f} MB, {state}")
