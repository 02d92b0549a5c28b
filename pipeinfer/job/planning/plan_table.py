"""The plan as rank 0 shows it before anything loads: who gets what."""

from __future__ import annotations

from rich.console import Console

from pipeinfer.job.placement.deployment import Deployment
from pipeinfer.job.planning.plan_rows import plan_rows
from pipeinfer.observe.report import show_table
from pipeinfer.observe.texts.plan_text import ALWAYS, CELLS, plan_cells
from pipeinfer.virtual.nodes import Node

WHERE = ("NUMA", "backend", "device")
"""What is also shown on a narrow terminal, where a rank is told."""

ENOUGH = 130
"""Characters a line in which all columns have room."""


def show_plan(console: Console, deployment: Deployment, about: str) -> None:
    """`about`: what is asked, in a line above the table."""
    console.print(about)
    show_ranks_of_plan(console, deployment)


def show_ranks_of_plan(console: Console, deployment: Deployment) -> None:
    """A row a rank, whether it fits or not."""
    rows = plan_rows(deployment, list(map(Node, deployment.hosts)))
    show_table(console, *plan_cells(rows, tuple(CELLS) if console.width >= ENOUGH else (*ALWAYS, *WHERE)))
