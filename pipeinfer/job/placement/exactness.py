"""How exact numerics lay out prompts and weights, so that a row's bits depend neither on the split nor on other rows.
Knows hosts and models' headers; loads nothing."""

import re
from collections.abc import Sequence

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.draft_rank import target_ranks
from pipeinfer.job.placement.memory import gpu_layers
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.llama.params import MANY, LlamaParams, TypeRows, in_groups, worth_repacking

IN_GROUPS = re.compile(r"\.x\d")
"""What the names of numerics have whose rows come in groups; see pipeinfer.job.placement.numerics."""


def in_blocks(options: RunOptions, info: ModelInfo, n_ranks: int, n_drafts: int) -> bool:
    """Whether prompts are: drafts may be on GPUs, the target's layers may not."""
    return info.layers.known.flash and _is_exact_on_cpus(options, n_ranks, n_drafts)


def repacked_alike(options: RunOptions, hosts: Sequence[Host], info: ModelInfo, n_drafts: int) -> tuple[TypeRows, ...]:
    """Types of the target's weights that are repacked, and how rows of each are computed; none where that is no faster.
    A layer must have the same bits on every rank: all hosts must repack the same types with the same results. Rows come
    in groups where a job is opened for many requests; one that goes on keeps what it began with."""
    alike = len({host.repacked for host in hosts}) == 1
    if not (options.repack and alike and _is_exact_on_cpus(options, len(hosts), n_drafts)):
        return ()
    in_parts = worth_repacking(info, LlamaParams(0), tuple(TypeRows(*each[:2]) for each in hosts[0].repacked))
    if len({host.grouped for host in hosts}) > 1:
        return in_parts
    n_requests = options.parallel
    if options.kept_numerics:
        n_requests = MANY if IN_GROUPS.search(options.kept_numerics) else 1
    return in_groups(info, in_parts, [type for type, _ in hosts[0].grouped], n_requests) or in_parts


def _is_exact_on_cpus(options: RunOptions, n_ranks: int, n_drafts: int) -> bool:
    """Whether CPUs compute all of the target with exact numerics."""
    on_cpus = all(gpu_layers(options, rank) == 0 for rank in target_ranks(options, n_ranks, n_drafts))
    return options.numerics == "exact" and on_cpus
