"""Whether a draft guesses sooner by what computes the target's layers, or by libllama on the CPU. Timed where that is
left to the plan, and kept for the next time. On every rank, before there is a plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeinfer import __version__
from pipeinfer.cluster.cores import Host
from pipeinfer.cluster.plan import Sizes
from pipeinfer.cluster.timed_layers import time_layers
from pipeinfer.errors import UserError
from pipeinfer.job.launch.context import forget_peak
from pipeinfer.job.loading.stages import place_text
from pipeinfer.job.options.options import RunOptions, backend_of
from pipeinfer.job.placement.deployment import sizes_of
from pipeinfer.job.placement.draft_place import has_choice, on_cpu
from pipeinfer.job.placement.draft_rank import may_choose
from pipeinfer.job.placement.fetch import fetch_files
from pipeinfer.job.profiling.layer_times import is_time, load_blank, take_skeleton_of
from pipeinfer.job.profiling.timed_ranks import Span, kinds_of, planned_threads, ranks_there, timed_span
from pipeinfer.kept import user_kept
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.gguf.skeleton import Skeleton
from pipeinfer.models.llama.build import describe_build

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.job.launch.start import Crew


@dataclass(frozen=True, slots=True)
class _Asked:
    """Layers of the draft that are to be timed."""

    fingerprint: str
    sizes: Sizes
    span: Span


def with_draft_times(crew: Crew, hosts: Sequence[Host], options: RunOptions) -> Sequence[Host]:
    """The hosts, with how fast a draft would be on each rank that may have it; as they are where there is no choice, or
    it cannot be timed. Collective."""
    if not has_choice(options):
        return hosts
    link, kept = crew.link, user_kept()
    info = _read_draft(options) if link.rank == 0 else None
    asked: _Asked | None = link.broadcast(_ask(info) if info else None)
    if asked is None:
        return hosts
    leaders = _leaders(options, hosts)
    name = _name(asked, hosts, options, link.rank)
    found = link.all_gather(_read(kept.get(name)))
    if not all(found[rank] for rank in set(leaders.values())):
        found = link.all_gather(_time(crew, hosts, options, asked, info, sorted(set(leaders.values()))))
        if own := found[link.rank]:
            kept.put(name, {"asked_s": own[0], "cpu_s": own[1]})
    return [replace(host, draft_s=found[leaders[rank]] if rank in leaders else None) for rank, host in enumerate(hosts)]


def _read_draft(options: RunOptions) -> ModelInfo | None:
    """None where it cannot be had, which who plans will say."""
    try:
        return read_model_info(*fetch_files([*options.drafts_in_use], options.offline))
    except UserError:
        return None


def _ask(info: ModelInfo) -> _Asked | None:
    """None where the draft cannot be timed."""
    span = timed_span(sizes := sizes_of(info), 1, is_last=True)
    return _Asked(info.fingerprint, sizes, span) if span else None


def _leaders(options: RunOptions, hosts: Sequence[Host]) -> dict[int, int]:
    """Of each rank that may have the draft, the first of its host that is like it: that is timed."""
    if not may_choose(options):
        first = options.draft_rank or 0
        return {first: first}
    kinds = kinds_of(options, hosts)
    alike = [(host.name, host.gpus_given, kind) for host, kind in zip(hosts, kinds, strict=True)]
    return {rank: alike.index(each) for rank, each in enumerate(alike)}


def _name(asked: _Asked, hosts: Sequence[Host], options: RunOptions, rank: int) -> str:
    """Under which it is kept: all that it depends on."""
    host, threads = hosts[rank], planned_threads(options, hosts)
    beside = [str(threads[other]) for other in ranks_there(hosts, rank)]
    return (
        f"draft: {asked.fingerprint}, {' '.join(options.draft_cache)}, {host.processor}, "
        f"{place_text(options, host, threads[rank], rank)} or the CPU, threads there {' '.join(beside)}, "
        f"pipeinfer {__version__}, {describe_build()}"
    )


def _read(value: Any) -> tuple[float, float] | None:
    """What was kept; None when it is anything else."""
    if not isinstance(value, dict) or value.keys() != {"asked_s", "cpu_s"} or not all(map(is_time, value.values())):
        return None
    return value["asked_s"], value["cpu_s"]


def _time(
    crew: Crew, hosts: Sequence[Host], options: RunOptions, asked: _Asked, info: ModelInfo | None, ranks: Sequence[int]
) -> tuple[float, float] | None:
    """This rank's, if it is one of `ranks`, which take turns; None where the layers cannot be loaded in both ways.
    `info`: rank 0's. Collective."""
    link, found = crew.link, None
    skeleton: Skeleton | None = link.broadcast(take_skeleton_of(info) if info else None)
    for rank in ranks if skeleton else ():
        if rank == link.rank and skeleton:
            crew.watch.describe("timing the draft")
            drafting = replace(
                options, numerics="fast", cache_type_k=options.cache_type_k_draft,
                cache_type_v=options.cache_type_v_draft,
            )  # fmt: skip
            ways = drafting, on_cpu(drafting, len(hosts), rank)
            try:
                asked_s, cpu_s = (_row_s(skeleton, asked, hosts, each, rank) for each in ways)
                found = asked_s, cpu_s
            except UserError:
                pass  # what is asked for is loaded, or refused, when its turn comes
            forget_peak()  # it is no part of what the job holds
            crew.watch.describe("")
        link.all_gather(None)
    return found


def _row_s(skeleton: Skeleton, asked: _Asked, hosts: Sequence[Host], options: RunOptions, rank: int) -> float:
    """Seconds of a row of the whole draft. Raises UserError where its layers cannot be loaded."""
    model = load_blank(skeleton, asked.span, hosts, options, rank)
    sizes, asks = asked.sizes, not backend_of(options, rank).is_torch
    speed = time_layers(model, sizes.layer_bytes[slice(*asked.span)], sizes.output_bytes, time.monotonic, asks)
    model.close()
    return sum(speed.seconds(sizes.layer_bytes, sizes.output_bytes))
