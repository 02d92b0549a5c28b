"""The memory that ranks need on GPUs, and an error with the numbers when it is more than is free.

Knows bytes, no model and no device.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.errors import UserError
from pipeinfer.sizes import size_text


class _Shared(NamedTuple):
    """Ranks that share devices, the bytes free there, and the bytes that they need together."""

    ranks: list[int]
    free: int
    needed: int


def _shared(hosts: Sequence[Host], needed: Sequence[int]) -> Iterator[_Shared]:
    """Groups of ranks that share devices, if the free memory is known."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    for rank, host in enumerate(hosts):
        names = tuple(name for name, _ in host.gpus)
        groups.setdefault((host.name, host.gpus_given, names), []).append(rank)
    for ranks in groups.values():
        if free := min(sum(n_bytes for _, n_bytes in hosts[rank].gpus) for rank in ranks):
            yield _Shared(ranks, free, sum(needed[rank] for rank in ranks))


def spare_on_gpus(hosts: Sequence[Host], needed: Sequence[int]) -> list[int | None]:
    """Bytes left on each rank's devices once all ranks that share them have theirs; negative if too few; None if it
    needs none, or the free memory is unknown. One entry a rank."""
    found: list[int | None] = [None] * len(hosts)
    for ranks, free, together in _shared(hosts, needed):
        for rank in filter(needed.__getitem__, ranks):
            found[rank] = free - together
    return found


def left_on_gpus(
    hosts: Sequence[Host], ranks: Sequence[int], taken: Sequence[int]
) -> tuple[tuple[str, ...], dict[str, int]]:
    """A name for the devices of each of `ranks`, the same for all that share them, and the bytes that other ranks leave
    there. The name is empty if the free memory is unknown. `hosts`, `taken`: one entry a rank."""
    names, left = dict.fromkeys(ranks, ""), {}
    for here, free, _ in _shared(hosts, taken):
        name = f"GPUs of rank {here[0]}"
        names |= {rank: name for rank in here if rank in names}
        left[name] = free - sum(taken[rank] for rank in here if rank not in names)
    return tuple(names.values()), left


def check_gpus(hosts: Sequence[Host], needed: Sequence[int], way_out: str) -> None:
    """Raises UserError when ranks' layers do not fit into their GPUs' memory. One entry a rank."""
    short = [shared for shared in _shared(hosts, needed) if shared.needed > shared.free]
    for rank, free, together in sorted((min(filter(needed.__getitem__, each.ranks)), *each[1:]) for each in short):
        names, others = ", ".join(name for name, _ in hosts[rank].gpus), together - needed[rank]
        beside = f" and ranks beside it {size_text(others)}" if others else ""
        raise UserError(
            f"rank {rank} on {hosts[rank].name} puts {size_text(needed[rank])} on {names}{beside}, where "
            f"{size_text(free)} are free; give it fewer layers there (-ngl, a value a rank), or {way_out}"
        )
