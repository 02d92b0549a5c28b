"""Checks the types of KV caches. Loads nothing."""

from collections.abc import Sequence

from pipeinfer.errors import UserError
from pipeinfer.job.options.sections import Numerics
from pipeinfer.job.placement.devices import RankDevices
from pipeinfer.models.gguf.cache_types import F16_CACHE, block_length
from pipeinfer.models.gguf.model_info import ModelInfo

AS_IT_IS = "leave them out, or give f16"


def check_cache_types(
    options: Numerics, devices: Sequence[RankDevices], info: ModelInfo, drafts: Sequence[ModelInfo]
) -> None:
    """Raises UserError for types that the numerics, a backend or a model does not allow."""
    if options.numerics == "exact" and options.cache != F16_CACHE:
        raise UserError(
            f"--cache-type-k {options.cache.k} --cache-type-v {options.cache.v}: --numerics exact needs types of its "
            f"own, 16 bits a number; give --numerics fast, or {AS_IT_IS}"
        )
    asked = options.cache, options.draft_cache
    if any(types != F16_CACHE for types in asked):
        for rank, (own, _) in enumerate(devices):
            if own.is_torch:
                raise UserError(
                    f"--cache-type-k and -v are for layers that libllama computes, and rank {rank} has --backend "
                    f"{own.backend}, whose caches are as its weights; {AS_IT_IS}"
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
