"""Which ranks are timed, at which layers, and when. Pure functions; times nothing."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import mean

from pipeinfer.cluster.assignment import Sizes
from pipeinfer.cluster.hosts.cores import Host, ranks_there, spare_cores
from pipeinfer.cluster.hosts.layer_speed import LayerSpeed
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions, check_draft_rank
from pipeinfer.job.placement.devices import RankDevices, plan_devices
from pipeinfer.job.placement.lay_out import threads_of_ranks

TIMED_BYTES = 128 << 20
"""Weights that are timed: more than caches hold, so that they come from where a stage's will."""

ALIKE = 1.1
"""Times of ranks of a kind may differ by this factor without saying more than that they were taken twice."""

Span = tuple[int, int]
"""Layers [first, last)."""

Kind = tuple[object, ...]
"""Processor, cores, threads and what computes: all that is known of a rank's speed before it is timed."""


def ranks_to_time(options: RunOptions, hosts: Sequence[Host]) -> list[int]:
    """The ranks that get layers of the target, or may get some, if they are not alike and the split is free; else
    none. None where options are wrong, which planning says."""
    n_ranks = len(hosts)
    if options.layer_split or options.pace:
        return []
    try:
        kinds = kinds_of(hosts, all_threads(options.threads, hosts), plan_devices(options, hosts))
        check_draft_rank(options, n_ranks)
        ranks = options.target_ranks(n_ranks)
    except UserError:
        return []
    if options.may_choose_draft_rank and n_ranks > 1:
        ranks = list(range(n_ranks))
    return ranks if len({(hosts[rank].name, kinds[rank]) for rank in ranks}) > 1 else []


def all_threads(threads: tuple[int, ...], hosts: Sequence[Host]) -> tuple[int, ...]:
    """Of each rank, all of which compute. `threads`: as given. Raises UserError for a wrong number of values."""
    return threads_of_ranks(threads, frozenset(range(len(hosts))), hosts)


def kinds_of(hosts: Sequence[Host], threads: Sequence[int], devices: Sequence[RankDevices]) -> list[Kind]:
    """Of every rank. Ranks of one kind should be equally fast."""
    return [_kind(hosts, threads, devices[rank], rank) for rank in range(len(hosts))]


def _kind(hosts: Sequence[Host], threads: Sequence[int], own: RankDevices, rank: int) -> Kind:
    host, beside = hosts[rank], sorted(threads[other] for other in ranks_there(hosts, rank))
    work = str(own.target.backend), own.target.n_gpu_layers, own.target.name
    return host.processor, host.n_cores, threads[rank], *work, tuple(beside)


def evened(speeds: Sequence[LayerSpeed | None], kinds: Sequence[Kind]) -> list[LayerSpeed | None]:
    """Average ranks of one kind whose times differ only by noise. None where all ranks are of one kind: sizes
    decide."""
    found, groups = list(speeds), _by_kind(speeds, kinds)
    for own in groups:
        if _are_alike(own):
            s_per_byte = mean(speed.s_per_byte for speed in own.values())
            for rank, speed in own.items():
                found[rank] = None if len(groups) == 1 else replace(speed, s_per_byte=s_per_byte)
    return found


def is_doubtful(speeds: Sequence[LayerSpeed | None], kinds: Sequence[Kind]) -> bool:
    """Whether ranks of a kind differ: one of them is slower, or was disturbed."""
    return not all(map(_are_alike, _by_kind(speeds, kinds)))


def _by_kind(speeds: Sequence[LayerSpeed | None], kinds: Sequence[Kind]) -> list[dict[int, LayerSpeed]]:
    """Of each kind the ranks that were timed."""
    timed = {rank: speed for rank, speed in enumerate(speeds) if speed}
    return [
        {rank: timed[rank] for rank in timed if kinds[rank] == kind}
        for kind in dict.fromkeys(kinds[rank] for rank in timed)
    ]


def _are_alike(own: Mapping[int, LayerSpeed]) -> bool:
    times = [speed.s_per_byte for speed in own.values()]
    return max(times) <= ALIKE * min(times)


def timed_span(sizes: Sizes, n_stages: int, is_last: bool) -> Span | None:
    """Layers to time for one of so many stages: an equal share, TIMED_BYTES at most, from the middle, or from the end
    with the output matrix; None if there are none."""
    n_layers = len(sizes.layer_bytes)
    most = min(n_layers // n_stages, TIMED_BYTES * n_layers // max(1, sum(sizes.layer_bytes)))
    counts = [*range(max(1, most), 0, -1), *range(max(1, most) + 1, n_layers)]
    for count in counts:
        middle = (n_layers - count + 1) // 2
        starts = [n_layers - count] if is_last else sorted(range(1, n_layers - count), key=lambda at: abs(at - middle))
        for first in starts:
            if first > 0 and (first, first + count) not in sizes.faults:
                return first, first + count
    return None if is_last else timed_span(sizes, n_stages, is_last=True)


def timing_turns(hosts: Sequence[Host], threads: Sequence[int], ranks: Collection[int]) -> dict[int, int]:
    """When each rank times. Ranks of a host compute at once, as in a full pipeline; where it lacks cores for all their
    threads they take turns, else the system's scheduler would be timed."""
    everyone, turns = frozenset(range(len(hosts))), {}
    for rank in sorted(ranks):
        before = sum(other < rank and other in ranks for other in ranks_there(hosts, rank))
        turns[rank] = before if spare_cores(hosts, everyone, threads, rank) < 0 else 0
    return turns
