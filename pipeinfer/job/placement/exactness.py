"""How exact numerics lay out prompts and weights, so that a row's bits depend neither on the split nor on other rows.
Knows hosts and models' headers; loads nothing."""

from collections.abc import Sequence

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.draft_rank import target_ranks
from pipeinfer.job.placement.memory import gpu_layers
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.llama.params import LlamaParams, worth_repacking


def in_blocks(options: RunOptions, info: ModelInfo, n_ranks: int, n_drafts: int) -> bool:
    """Whether prompts are: drafts may be on GPUs, the target's layers may not."""
    return info.layers.known.flash and _is_exact_on_cpus(options, n_ranks, n_drafts)


def repacked_alike(
    options: RunOptions, hosts: Sequence[Host], info: ModelInfo, n_drafts: int
) -> tuple[tuple[int, int], ...]:
    """Types of the target's weights that are repacked, and how many rows of each may be computed at once; none where
    that is no faster. A layer must have the same bits on every rank: all hosts must repack the same types with the same
    results."""
    alike = len({host.repacked for host in hosts}) == 1
    if not (options.repack and alike and _is_exact_on_cpus(options, len(hosts), n_drafts)):
        return ()
    known = tuple((type, n_rows) for type, n_rows, _ in hosts[0].repacked)
    return worth_repacking(info, LlamaParams(0), known)


def _is_exact_on_cpus(options: RunOptions, n_ranks: int, n_drafts: int) -> bool:
    """Whether CPUs compute all of the target with exact numerics."""
    on_cpus = all(gpu_layers(options, rank) == 0 for rank in target_ranks(options, n_ranks, n_drafts))
    return options.numerics == "exact" and on_cpus
