"""The profiles that are shipped, for the reference page profiles.md."""

from __future__ import annotations

from docs.generate.markdown import table as markdown_table
from pipeinfer.virtual.profile import load_profile, shipped_profiles


def table() -> str:
    heads = ["profile", "machines", "Gbit/s", "latency (µs)", "model pairs"]
    return markdown_table(heads, map(_row, shipped_profiles()))


def _row(name: str) -> list[str]:
    top = load_profile(name).top.values
    machines = ", ".join(f"{each.get('count', 1)} × {each['node']}" for each in top["cluster"])
    link = top["link"]
    pairs = ", ".join(f"`{pair}`" for pair in top["pairs"])
    return [f"`{name}`", machines, f"{link['gbit_per_s']}", f"{link['latency_us']}", pairs]
