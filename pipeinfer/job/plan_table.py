"""The plan as rank 0 shows it before anything loads: who gets what."""

from __future__ import annotations

from rich.console import Console

from pipeinfer.job.deployment import Deployment
from pipeinfer.observe.report import show_table, size_text


def show_plan(console: Console, deployment: Deployment, about: str) -> None:
    """`about`: what is asked, in a line above the table."""
    rows = []
    for rank, host in enumerate(deployment.hosts):
        roles = deployment.plan.roles(rank)
        rows.append(
            [
                str(rank),
                host.name,
                " + ".join(name for name, _ in roles) or "head",
                " + ".join(span for _, span in roles if span) or "-",
                size_text(deployment.memory[rank].weights + deployment.memory[rank].mapped),
                size_text(deployment.memory[rank].kv),
                size_text(deployment.memory[rank].total),
                str(deployment.threads[rank]),
            ]
        )
    console.print(about)
    show_table(console, ["rank", "host", "role", "layers", "weights", "KV", "memory", "threads"], rows)
