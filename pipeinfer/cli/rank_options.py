"""Options of the ranks themselves: where they run, how they are watched. All commands that start a job have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from pipeinfer.cli.values import Devices, Listed, Number
from pipeinfer.cluster.numa import STRATEGIES
from pipeinfer.cluster.watch.limits import LEAST_S, MOST_S, Limits

Command = TypeVar("Command", bound=Callable[..., Any])

USUAL = Limits()

rank_timeout_option = click.option(
    "--rank-timeout", "rank_timeout_s", type=Number(LEAST_S, MOST_S),
    help=f"Seconds without a sign of a rank after which it is named and the job ends. [default: {USUAL.link_s:g} where "
    f"its host cannot be reached, {USUAL.silent_s:g} where its process stands still]",
)  # fmt: skip

OPTIONS = (
    click.option(
        "-dev", "--device", type=Listed(Devices()), default="auto", show_default=True,
        help="Devices of a rank's -ngl layers, by the names of `pipeinfer info`: CUDA0, or several, CUDA0+CUDA1; "
        "none: they stay on the CPU; auto: ranks of a host share its GPUs. One value, or one a rank: CUDA0,CUDA1,none.",
    ),
    click.option(
        "--numa", type=click.Choice(STRATEGIES),
        help="isolate: several ranks of a host share its NUMA nodes, each on the cores of its own ones; distribute: "
        "threads of a host's only rank go to its nodes in turns; numactl, as without: cores are as the launcher gives "
        "them. Ranks that it has bound stay where they are.",
    ),
    rank_timeout_option,
)  # fmt: skip


def rank_options(command: Command) -> Command:
    """Add them."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
