"""Memory of GPUs: what ranks put there, and a refusal with the numbers when it is more than is free.

Knows bytes, no model and no device.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeinfer.cluster.cores import Host
from pipeinfer.errors import UserError
from pipeinfer.sizes import size_text


def spare_on_gpus(hosts: Sequence[Host], needed: Sequence[int]) -> list[int | None]:
    """Bytes that are left on the devices of each rank once all ranks that share them have theirs; negative: so many are
    missing; None: it needs none, or nobody knows what is free. One entry a rank."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    for rank, host in enumerate(hosts):
        names = tuple(name for name, _ in host.gpus)
        groups.setdefault((host.name, host.gpus_given, names), []).append(rank)
    found: list[int | None] = [None] * len(hosts)
    for ranks in groups.values():
        free = [sum(n_bytes for _, n_bytes in hosts[rank].gpus) for rank in ranks]
        for rank in ranks:
            if needed[rank] and min(free):
                found[rank] = min(free) - sum(needed[other] for other in ranks)
    return found


def check_gpus(hosts: Sequence[Host], needed: Sequence[int], way_out: str) -> None:
    """Raises UserError where ranks' layers do not fit onto their GPUs. One entry a rank."""
    for rank, spare in enumerate(spare_on_gpus(hosts, needed)):
        if spare is None or spare >= 0:
            continue
        names = ", ".join(name for name, _ in hosts[rank].gpus)
        free = sum(n_bytes for _, n_bytes in hosts[rank].gpus)
        others = free - spare - needed[rank]
        beside = f" and ranks beside it {size_text(others)}" if others else ""
        raise UserError(
            f"rank {rank} on {hosts[rank].name} puts {size_text(needed[rank])} on {names}{beside}, where "
            f"{size_text(free)} are free; give it fewer layers there (-ngl, a value a rank), or {way_out}"
        )
