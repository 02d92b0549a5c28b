"""Which ranks are timed, at which layers, and when. Pure functions; times nothing."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import mean

from pipeinfer.cluster.hosts.cores import Host, ranks_there, spare_cores
from pipeinfer.cluster.hosts.layer_speed import LayerSpeed
from pipeinfer.cluster.plan import Sizes
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import (
    RunOptions,
    backend_of,
    check_by_rank,
    device_of,
    gpu_layers_asked,
)
from pipeinfer.job.placement.deployment import threads_of_ranks
from pipeinfer.job.placement.draft_rank import check_draft_rank, may_choose, target_ranks

TIMED_BYTES = 128 << 20
"""Weights that are timed: more than caches hold, so that they come from where a stage's will."""

ALIKE = 1.1
"""Times of ranks of a kind may differ by this factor without saying more than that they were taken twice."""

Span = tuple[int, int]
"""Layers [first, last)."""

Kind = tuple[object, ...]
"""Processor, cores, threads and what computes: all that is known of a rank's speed before it is timed."""


def ranks_to_time(options: RunOptions, hosts: Sequence[Host]) -> list[int]:
    """The ranks that get layers of the target, if they are not alike and the split is free; else none."""
    ranks = stages_of_target(options, hosts) if not options.layer_split and not options.pace else []
    kinds = kinds_of(options, hosts) if ranks else []
    return ranks if len({(hosts[rank].name, kinds[rank]) for rank in ranks}) > 1 else []


def stages_of_target(options: RunOptions, hosts: Sequence[Host]) -> list[int]:
    """The ranks that get, or may get, layers of the target; none where the options are wrong."""
    n_ranks, n_drafts = len(hosts), len(options.drafts_in_use)
    try:
        check_by_rank(options, n_ranks)
        planned_threads(options, hosts)
        check_draft_rank(options, n_ranks)
        ranks = target_ranks(options, n_ranks, n_drafts)
        return list(range(n_ranks)) if may_choose(options) and n_ranks > 1 else ranks
    except UserError:
        return []


def planned_threads(options: RunOptions, hosts: Sequence[Host]) -> tuple[int, ...]:
    """Of each rank: all of them compute. Raises UserError when there are too few or too many values."""
    return threads_of_ranks(options.threads, frozenset(range(len(hosts))), hosts)


def kinds_of(options: RunOptions, hosts: Sequence[Host]) -> list[Kind]:
    """Of every rank. Ranks of one kind should be equally fast. Raises UserError for a wrong number of threads."""
    threads = planned_threads(options, hosts)
    return [_kind(options, hosts, threads, rank) for rank in range(len(hosts))]


def _kind(options: RunOptions, hosts: Sequence[Host], threads: Sequence[int], rank: int) -> Kind:
    host, beside = hosts[rank], sorted(threads[other] for other in ranks_there(hosts, rank))
    work = str(backend_of(options, rank)), gpu_layers_asked(options, rank), device_of(options, rank)
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
