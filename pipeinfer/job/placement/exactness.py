"""How exact numerics lay out prompts and weights, so that a row's bits depend neither on the split nor on other rows;
whether the types of caches asked for are possible. Knows hosts and models' headers; loads nothing."""

from collections.abc import Sequence

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions, backend_of
from pipeinfer.job.placement.draft_rank import target_ranks
from pipeinfer.job.placement.memory import gpu_layers
from pipeinfer.models.gguf.cache_types import F16_CACHE, block_length
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


AS_IT_IS = "leave them out, or give f16"


def check_cache_types(options: RunOptions, n_ranks: int, info: ModelInfo, drafts: Sequence[ModelInfo]) -> None:
    """Raises UserError when types are asked for that the numerics, a backend or a model does not have."""
    if options.numerics == "exact" and options.cache != F16_CACHE:
        raise UserError(
            f"--cache-type-k {options.cache.k} --cache-type-v {options.cache.v}: --numerics exact needs types of its "
            f"own, 16 bits a number; give --numerics fast, or {AS_IT_IS}"
        )
    asked = options.cache, options.draft_cache
    if any(types != F16_CACHE for types in asked):
        for rank in range(n_ranks):
            if backend_of(options, rank).is_torch:
                raise UserError(
                    f"--cache-type-k and -v are for layers that libllama computes, and rank {rank} has --backend "
                    f"{backend_of(options, rank)}, whose caches are as its weights; {AS_IT_IS}"
                )
    for model, types, end in ((info, asked[0], ""), *((draft, asked[1], "-draft") for draft in drafts)):
        for letter, name, lengths in (
            ("k", types.k, {shape.key for shape in model.kv_shapes}),
            ("v", types.v, {shape.value for shape in model.kv_shapes}),
        ):
            if wrong := sorted(length for length in lengths if length % block_length(name)):
                raise UserError(
                    f"--cache-type-{letter}{end} {name} takes {block_length(name)} numbers together, and a head of "
                    f"{model.path.name} has {wrong[0]}; give f16, bf16 or f32"
                )
