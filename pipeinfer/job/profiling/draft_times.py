"""Times a draft with the target's backend and with libllama on the CPU, where the plan may choose. On every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.timing.timed_layers import time_layers
from pipeinfer.job.loading.stages import experiment_key
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.draft_place import has_choice, on_cpu
from pipeinfer.job.placement.draft_rank import may_choose
from pipeinfer.job.profiling.known_times import known, read_draft_times
from pipeinfer.job.profiling.probe import Part, part_of, probe, read_models, share_skeletons
from pipeinfer.job.profiling.schedule import kinds_of, one_at_a_time, planned_threads
from pipeinfer.models.gguf.model_info import ModelInfo

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.job.launch.start import Crew


def with_draft_times(crew: Crew, hosts: Sequence[Host], options: RunOptions) -> Sequence[Host]:
    """The hosts with the draft's times on each rank that may have it, if there is a choice. Collective."""
    if not has_choice(options):
        return hosts
    link = crew.link
    models = read_models(link, options.drafts_in_use, options)
    part: Part | None = link.broadcast(part_of(models, 0, 1, is_last=True) if models else None)
    if part is None:
        return hosts
    leaders = _leaders(options, hosts)
    ranks = sorted(set(leaders.values()))
    what = f"draft: {part.fingerprint}, {' '.join(options.draft_cache)}"
    key = experiment_key(what, options, hosts, planned_threads(options, hosts), link.rank, " or the CPU")
    found = known(
        link, key, read_draft_times,
        lambda: (_time(crew, hosts, options, part, models, ranks), ""), ranks,
        lambda times: {"asked_s": times[0], "cpu_s": times[1]},
    )  # fmt: skip
    return [
        replace(host, draft_s=found[leaders[rank]][0] if rank in leaders else None) for rank, host in enumerate(hosts)
    ]


def _leaders(options: RunOptions, hosts: Sequence[Host]) -> dict[int, int]:
    """Of each rank that may have the draft, the first of its host that is like it: that is timed."""
    if not may_choose(options):
        return {options.fixed_draft_rank: options.fixed_draft_rank}
    kinds = kinds_of(options, hosts)
    alike = [(host.name, host.gpus_given, kind) for host, kind in zip(hosts, kinds, strict=True)]
    return {rank: alike.index(each) for rank, each in enumerate(alike)}


def _time(
    crew: Crew, hosts: Sequence[Host], options: RunOptions, part: Part, models: Sequence[ModelInfo],
    ranks: Sequence[int],
) -> tuple[float, float] | None:  # fmt: skip
    """Seconds of a row of the whole draft on this rank, as asked for and on the CPU; None if both cannot be loaded.
    Collective."""
    link, row_s = crew.link, list[float]()
    drafting = replace(
        options, numerics="fast", cache_type_k=options.cache_type_k_draft, cache_type_v=options.cache_type_v_draft
    )
    skeletons = share_skeletons(link, models)
    for number, way in enumerate((drafting, on_cpu(drafting, len(hosts), link.rank)) if skeletons else ()):
        is_timed = link.rank in ranks and len(row_s) == number
        with probe(crew, hosts, way, skeletons, part if is_timed else None) as own:
            if speed := own.time(one_at_a_time(hosts, ranks), time_layers):
                row_s.append(sum(speed.seconds(part.sizes.layer_bytes, part.sizes.output_bytes)))
    return (row_s[0], row_s[1]) if len(row_s) == 2 else None
