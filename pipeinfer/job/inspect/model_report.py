"""The report of `models info`: what a file is, whether it can be cut, the memory of stages. Loads no weights."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeinfer.cluster.assignment import assign
from pipeinfer.core.kv.blocks import rows_in_blocks
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_CTX
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.capacity import capacity_of
from pipeinfer.job.placement.devices import DevicePlan, RankDevices
from pipeinfer.job.placement.job_plan import sizes_of
from pipeinfer.job.placement.memory import MemoryNeeds
from pipeinfer.job.placement.numerics import numerics_of
from pipeinfer.job.requests.request import DEFAULT_CTX
from pipeinfer.models.gguf.header import Header, Value
from pipeinfer.models.gguf.model_info import ModelInfo, check_is_model, layer_of, model_of, read_parts
from pipeinfer.models.heads.header import describe_head, is_head
from pipeinfer.models.heads.own_head import own_head
from pipeinfer.models.text.chat_template import named_templates, template_of
from pipeinfer.models.text.vocabulary_info import read_vocabulary_info

MAX_STAGES = 64


def describe_file(path: Path, ctx_size: int, numerics: str) -> dict[str, Any]:
    """As plain data, bytes as stored in the file. `ctx_size` 0: what the model was trained for, DEFAULT_CTX at most.

    A file that cannot be cut into stages is told so, with the reason; of it less is known. Raises UserError for what is
    no GGUF file, or a damaged one, or a part of a model.
    """
    headers = read_parts(path)
    header, metadata = headers[0], headers[0].metadata
    check_is_model(path, metadata)
    try:
        info, reason = model_of(headers), ""
    except UserError as error:
        info, reason = None, str(error)
    return {
        "path": str(path),
        **(_of_model(info) if info else _of_header(header)),
        "vocabulary": _vocabulary(path, metadata),
        "head": _head(header, info),
        "template": template_of(metadata),
        "named_templates": named_templates(metadata),
        "sliceable": info is not None,
        "reason": reason,
        "exact": info is not None and info.layers.exact,
        "numerics": numerics,
        **(_stages(info, ctx_size, numerics) if info else {"n_ctx": None, "stages": []}),
    }


OF_MODEL = ("name", "architecture", "quantisation", "n_params", "n_bytes", "n_layer", "n_embd", "n_ctx_train", "tied",
            "layer_bytes", "input_bytes", "output_bytes")  # fmt: skip


def _of_model(info: ModelInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in OF_MODEL} | {"kv_bytes_per_token": sum(info.kv_bytes_per_cell)}


def _of_header(header: Header) -> dict[str, Any]:
    """The same of a model that cannot be cut, as far as its header says; null for the rest."""
    architecture = _value(header.metadata, "general.architecture")
    sizes: dict[int, int] = {}
    for tensor in header.tensors:
        if (layer := layer_of(tensor.name)) is not None:
            sizes[layer] = sizes.get(layer, 0) + tensor.n_bytes
    tables = [tensor.n_bytes for tensor in header.tensors if tensor.name == "token_embd.weight"]
    return {
        **dict.fromkeys((*OF_MODEL, "kv_bytes_per_token")),
        "name": _value(header.metadata, "general.name"),
        "architecture": architecture,
        "n_params": sum(tensor.n_elements for tensor in header.tensors),
        "n_bytes": header.state.n_bytes,
        "n_layer": _value(header.metadata, f"{architecture}.block_count"),
        "n_embd": _value(header.metadata, f"{architecture}.embedding_length"),
        "n_ctx_train": _value(header.metadata, f"{architecture}.context_length"),
        "layer_bytes": [size for _, size in sorted(sizes.items())],
        "input_bytes": next(iter(tables), None),
    }


def _head(header: Header, info: ModelInfo | None) -> dict[str, Any] | None:
    """Of a draft that reads its target's states, or of the head in a model's own file; None for others, and for one
    that cannot be used."""
    try:
        found = describe_head(header) if is_head(header) else own_head(info) if info else None
    except UserError:
        return None
    return asdict(found.head) if found and found.head else None


def _value(metadata: dict[str, Value], key: str) -> Any:
    return metadata[key].value if key in metadata else None


def _vocabulary(path: Path, metadata: dict[str, Value]) -> dict[str, Any]:
    """`error`: why it cannot be told."""
    try:
        return asdict(read_vocabulary_info(path, metadata)) | {"error": ""}
    except UserError as error:
        return {"error": str(error)}


def _stages(info: ModelInfo, ctx_size: int, numerics: str) -> dict[str, Any]:
    """Of the heaviest stage, for 1, 2, 4, … stages, each on a host of its own with a prompt that fills the context."""
    n_ctx = ctx_size or min(info.n_ctx_train, DEFAULT_CTX)
    if n_ctx > MAX_CTX:
        raise UserError(f"-c {n_ctx} is more than the {MAX_CTX} tokens that a context holds; give fewer")
    options, on_cpus = RunOptions(model=info.path, numerics=numerics), [RankDevices(DevicePlan(), DevicePlan())]
    n_in_blocks = rows_in_blocks(n_ctx) if numerics == "exact" and info.layers.known.flash else 0
    capacity, plain = capacity_of(options, n_ctx, info.layers.rewinds), numerics_of(options, (), n_in_blocks > 0)
    needs = MemoryNeeds(info, (), capacity, plain, on_cpus * MAX_STAGES, n_in_blocks)
    rows = []
    for n_stages in (1 << power for power in range(MAX_STAGES.bit_length())):
        try:
            assignment = assign(n_stages, [], sizes_of(info))
        except UserError:  # it has not so many layers, or not so many places to cut
            break
        memory = needs.of_ranks(assignment)
        rank = max(range(n_stages), key=lambda rank: memory[rank].total)
        rows.append(
            {
                "n_stages": n_stages,
                "layers": [assignment.stages[rank].first, assignment.stages[rank].last],
                "weight_bytes": memory[rank].weights + memory[rank].mapped,
                "kv_bytes": memory[rank].kv,
                "memory_bytes": memory[rank].total,
            }
        )
    return {"n_ctx": n_ctx, "stages": rows}
