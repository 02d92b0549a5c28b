"""Whether models, devices and numerics go together; and files of models, downloaded and opened. Loads no weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeinfer.cluster.assignment import Assignment, Stages
from pipeinfer.cluster.hosts import resources
from pipeinfer.cluster.hosts.host import Host, free_memory
from pipeinfer.core.blocks import LARGEST
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO_LAYERS
from pipeinfer.job.options.options import JobModels, RunOptions
from pipeinfer.job.options.sections import Numerics
from pipeinfer.job.placement.devices import RankDevices
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.placement.memory import Layers
from pipeinfer.job.process.streams import complain
from pipeinfer.models.drafts.head_files import has_mtp_head, read_drafts
from pipeinfer.models.drafts.translation import check_drafts
from pipeinfer.models.gguf.adapter import ScaledAdapter, check_cut, check_exact, check_fits, check_order, read_adapter
from pipeinfer.models.gguf.layers import F16_CACHE, block_length
from pipeinfer.models.gguf.model_info import LONG, OWN_HEAD, ModelInfo, layer_of, read_model_info
from pipeinfer.models.hub import fetch, name_of
from pipeinfer.models.llama.tensor_places import HOST, TensorPlace, TensorPlaces, check_names
from pipeinfer.models.text.tokenizer import Tokenizer

F16_WAY_OUT = "leave them out, or give f16"


def head_of(drafts: Sequence[ModelInfo]) -> ModelInfo | None:
    """The draft that reads the target's features (EAGLE-3)."""
    return next((draft for draft in drafts if draft.head), None)


def check_head(draft_rank: int | None, drafts: Sequence[ModelInfo]) -> None:
    """`draft_rank`: the option. Raises UserError for several heads, or one elsewhere than on rank 0."""
    head = head_of(drafts)
    if n_others := sum(draft.head is not None for draft in drafts[1:]):
        raise UserError(f"{drafts[0].path} is a head, and so are {n_others} of the other drafts; give one head")
    if head and draft_rank:
        why = f"{head.path} is a head, which drafts on rank 0, where features come"
        raise UserError(f"--draft-rank {draft_rank}: {why}; leave --draft-rank out")


def not_on_disk(info: ModelInfo, exact: bool) -> str:
    """Why --kv-disk does not keep this model's cells; empty: it does. `exact`: the numerics are; then no cell of a text
    is reused while it is open, even outside of its layers' window."""
    layers, name = info.layers, info.path.name
    if not layers.window:
        return ""
    if not (exact and layers.rewinds):
        return (
            f"layers of {name} have a sliding window, and {'others keep states' if exact else 'numerics are not exact'}"
        )
    # libllama's state of a block lacks cells outside of the window of the block's last one
    if layers.architecture.windows and layers.architecture.windows.chunks:
        return f"layers of {name} see chunks of the text"
    return f"layers of {name} have a sliding window of {layers.window}" if layers.window <= LARGEST else ""


def check_alone(info: ModelInfo, n_cells: int, n_rows: int) -> None:
    """Raises UserError when this host has no memory for a whole model in this process."""
    memory = Layers(info, 0, info.n_layer, n_cells, n_rows, n_rows, n_rows).memory
    resources.check_fits([Host("this host", frozenset(), 0, free_memory())], [memory], "use a smaller -n")


def check_features(assignment: Assignment, devices: Sequence[RankDevices], drafts: Sequence[ModelInfo]) -> None:
    """Raises UserError where torch computes layers that a head reads."""
    draft = head_of(drafts)
    if draft is None or draft.head is None:
        return
    layers = draft.head.layers_read
    for stage in assignment.stages:
        backend = devices[stage.rank].target.backend
        if backend.is_torch and any(stage.first <= layer < stage.last for layer in layers):
            shown = f"{', '.join(map(str, layers))}, some of which rank {stage.rank} computes"
            way_out = "give --backend llama, another draft, or -md none"
            reads = f"{draft.path} reads the outputs of layers {shown}"
            raise UserError(f"--backend {backend} gives no features: {reads}; {way_out}")


def check_cache_types(
    options: Numerics, devices: Sequence[RankDevices], info: ModelInfo, drafts: Sequence[ModelInfo]
) -> None:
    """Raises UserError for types that the numerics, a backend or a model does not allow."""
    target, draft = options.cache, options.draft_cache
    if (target, draft) != (F16_CACHE, F16_CACHE):
        for rank, device in enumerate(rank.target for rank in devices):
            if device.is_torch:
                torch = f"rank {rank} has --backend {device.backend}, whose caches are as its weights"
                options_are = "--cache-type-k and -v are for layers that libllama computes"
                raise UserError(f"{options_are}, and {torch}; {F16_WAY_OUT}")
    for model, types, end in ((info, target, ""), *((model, draft, "-draft") for model in drafts)):
        keys, values = {shape.key for shape in model.kv_shapes}, {shape.value for shape in model.kv_shapes}
        for letter, name, lengths in (("k", types.k, keys), ("v", types.v, values)):
            if wrong := sorted(length for length in lengths if length % block_length(name)):
                needs = f"takes {block_length(name)} numbers together, and a head of {model.path.name} has {wrong[0]}"
                raise UserError(f"--cache-type-{letter}{end} {name} {needs}; give f16, bf16 or f32")


def check_exact_cache(options: Numerics, is_on_gpus: bool) -> None:
    """Raises UserError for a target's types that exact numerics do not have. `is_on_gpus`: some of its layers are."""
    if options.cache != F16_CACHE and not is_on_gpus:
        types_are = f"--cache-type-k {options.cache.k} --cache-type-v {options.cache.v}"
        needed = "types of its own, 16 bits a number"
        raise UserError(f"{types_are}: --numerics exact needs {needed}; give --numerics fast, or {F16_WAY_OUT}")


def check_adapters(
    adapters: Sequence[ScaledAdapter],
    info: ModelInfo,
    devices: Sequence[RankDevices],
    ranks: Sequence[int],
    is_exact: bool,
) -> None:
    """`ranks`: of the target's stages. Raises UserError where torch computes one, slices have a changed tensor in
    another form, or exact numerics do not hold."""
    for adapter, _ in adapters:
        for rank in ranks:
            if (backend := devices[rank].target.backend).is_torch:
                torch = f"is for layers that libllama computes, and rank {rank} has --backend {backend}"
                way_out = "give --backend llama, or merge it into the model's file"
                raise UserError(f"--lora {adapter.path} {torch}; {way_out}")
        if len(ranks) > 1:
            check_cut(adapter, info)
        if is_exact:
            check_exact(adapter)


def check_tensor_places(
    by_name: tuple[TensorPlace, ...],
    info: ModelInfo,
    stages: Stages,
    devices: Sequence[RankDevices],
    hosts: Sequence[Host],
) -> None:
    """`by_name`: of -ot; `stages`: the target's. Raises UserError for a pattern that is in no tensor's name, and where
    a rank lacks the device of one of its tensors."""
    check_names(info, by_name)
    places = TensorPlaces(by_name)
    for rank, first, last in ((stage.rank, stage.first, stage.last) for stage in stages if by_name):
        device, of_stage = devices[rank].target, [*range(first, last), *[None] * (last == info.n_layer)]
        present = (device.devices or hosts[rank].gpu_names) if device.uses_gpus else ()
        for tensor in info.tensors if present or not device.uses_gpus else ():  # else they are not known
            name = places.tensor_device(tensor.name)
            if layer_of(tensor.name) in of_stage and name and name not in (HOST, *present):
                shown = (
                    f"{tensor.name} for {name}, and rank {rank}, which has it, computes on {'+'.join(present) or HOST}"
                )
                raise UserError(
                    f"-ot has {shown} (-ngl, --device); write layers into the pattern, as blk.[0-3].ffn_up_exps"
                )


def check_draft_gpu_layers(n_gpu_layers: int, devices: Sequence[RankDevices], ranks: Sequence[int]) -> None:
    """`n_gpu_layers`: -ngld; `ranks`: those with drafts. Raises UserError where torch computes such a draft."""
    if n_gpu_layers in (ALL_LAYERS, AUTO_LAYERS, 0):
        return
    for rank in ranks:
        if (backend := devices[rank].target.backend).is_torch:
            torch = f"is for a draft that libllama computes, and rank {rank} has --backend {backend}"
            way_out = "give all, 0 (by libllama on the CPU), or a --backend for each rank"
            raise UserError(f"-ngld {n_gpu_layers} {torch}; {way_out}")


def check_one_backend(devices: Sequence[RankDevices], ranks: Sequence[int]) -> None:
    """Raises UserError if ranks of the target have several backends or types: exact numerics cannot hold then."""
    by_kernels: dict[str, list[int]] = {}
    for rank in ranks:
        by_kernels.setdefault(str(devices[rank].target.numeric_backend), []).append(rank)
    if len(by_kernels) > 1:
        shown = ", ".join(
            f"rank{'s' * (len(same) > 1)} {' '.join(map(str, same))} {kernels}"
            for kernels, same in sorted(by_kernels.items())
        )
        raise UserError(
            f"--numerics exact needs one --backend for all layers of the target, else the text depends on where it is "
            f"cut; here they have: {shown}; give one, or --numerics fast"
        )


def inexact_line(plan: JobPlan, gpus: Mapping[int, str]) -> str:
    """A warning if `--numerics exact` may not hold on the target's ranks; else empty. `gpus`: see `gpu_of`."""
    if not plan.numerics.exact or plan.numerics.at_once:
        return ""
    by_torch = {rank: gpu for rank, gpu in gpus.items() if plan.ranks[rank].target.is_torch}
    inexact = [rank for rank, gpu in gpus.items() if gpu and rank not in by_torch]
    if inexact:
        return (
            f"--numerics exact does not hold for the layers of {_ranks(inexact)}, on GPUs of llama.cpp's: "
            f"{_why_inexact(plan)}, so that tokens that are all but tied may differ between policies and splits; "
            "-ngl 0 and --backend torch are exact"
        )
    by_kind = {gpu: [rank for rank in by_torch if by_torch[rank] == gpu] for gpu in by_torch.values()}
    if len(by_kind) > 1:
        shown = ", ".join(f"{_ranks(ranks)} on {gpu or 'a CPU'}" for gpu, ranks in by_kind.items())
        return (
            f"--numerics exact wants devices of one kind for all layers of the target, here torch computes {shown}: "
            "tokens that are all but tied may differ between splits"
        )
    return ""


def _why_inexact(plan: JobPlan) -> str:
    """Of layers on GPUs."""
    if plan.adapters:
        return "rows with adapters (--lora) may have other bits beside others"
    differ = [rank for rank, host in enumerate(plan.hosts) if any(n_rows == 0 for n_rows, _ in host.exact_rows)]
    if differ or not any(host.exact_rows for host in plan.hosts):
        return f"rows have other bits beside others{f' on {_ranks(differ)}' if differ else ''}"
    return "devices of several kinds have other bits"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# -- files of models


def open_models(options: RunOptions) -> tuple[ModelInfo, list[ModelInfo], Tokenizer]:
    """The target's header, those of the drafts as `read_drafts` has them, and the target's vocabulary; with the rope
    factors for -c. Raises UserError when a model is unusable or a draft does not fit."""
    info, tokenizer = read_model_info(options.models.target), Tokenizer(options.models.target)
    drafts = read_drafts(options.drafts_in_use, info)
    check_drafts(drafts, info)
    name, long = options.required_numerics, partial(_takes_long, ctx_size=options.context.ctx_size)
    is_long = LONG in name.split("-") if name else long(info)
    return info.with_factors(is_long), [draft.with_factors(long(draft)) for draft in drafts], tokenizer


def _takes_long(info: ModelInfo, ctx_size: int | None) -> bool:
    """Whether a model with two sets of rope factors takes the long one: as in llama.cpp by -c, not by what else is
    asked. Without -c there is room for the short ones alone."""
    return (info.n_ctx_most if ctx_size == 0 else ctx_size or 0) > info.n_ctx_short


def read_adapters(models: JobModels, target: ModelInfo) -> tuple[ScaledAdapter, ...]:
    """Their headers. Raises UserError for a file that is no adapter of the target."""
    adapters = tuple(ScaledAdapter(read_adapter(each.path), each.scale) for each in models.adapters)
    for adapter, _ in adapters:
        check_fits(adapter, target)
    check_order(adapters)
    return adapters


def fetch_models(models: JobModels) -> JobModels:
    """With files for names, and the target's own head as the draft where that is wanted. Raises UserError."""
    target, *drafts = fetch_files([models.target, *models.drafts], models.offline, models.hf_token)
    if models.finds_head and has_mtp_head(read_model_info(target)):
        drafts = [OWN_HEAD]
    return replace(models, target=target, drafts=tuple(drafts))


def fetch_files(paths: Sequence[Path], offline: bool = False, token: str | None = None) -> list[Path]:
    """The same of single paths. `token`: for the hub; None: huggingface_hub finds it, as in HF_TOKEN."""
    return [fetch(name, offline, complain, token) if (name := name_of(path)) else path for path in paths]
