"""The reports of `models info`: what a file is, whether it can be cut, the memory of stages; of an adapter (LoRA) which
tensors it changes. Loads no weights."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeinfer.cluster.assignment import assign
from pipeinfer.core.blocks import rows_in_blocks
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_CTX
from pipeinfer.job.options.options import Speculation
from pipeinfer.job.options.sections import Numerics
from pipeinfer.job.options.text_sections import ContextOptions
from pipeinfer.job.placement.devices import DevicePlan, RankDevices
from pipeinfer.job.placement.job_plan import capacity_of, sizes_of
from pipeinfer.job.placement.memory import MemoryNeeds
from pipeinfer.job.placement.numerics import numerics_of
from pipeinfer.job.requests.request import DEFAULT_CTX
from pipeinfer.models.drafts.head_files import describe_eagle3, is_eagle3, mtp_head
from pipeinfer.models.gguf.adapter import Pair, read_adapter
from pipeinfer.models.gguf.header import Header, Value, read_header, value_of
from pipeinfer.models.gguf.model_info import ModelInfo, check_is_model, layer_of, model_of, read_parts
from pipeinfer.models.llama.ggml import type_name
from pipeinfer.models.text.chat_template import named_templates, template_of
from pipeinfer.models.text.tokenizer import describe_vocabulary
from pipeinfer.text import labelled, markdown_table, size_text

MAX_STAGES = 64
UNKNOWN = "unknown"
EXACT = "on CPUs: the same bits in every batch, split and tree; on GPUs the kernels see the batch"
WIDTH = 14  # of a label
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
SIZE_FIELDS = ("n_params", "n_bytes", "n_layer", "n_embd", "n_ctx_train", "tied")
MODEL_FIELDS = ("name", "architecture", "quantisation", *SIZE_FIELDS, "layer_bytes", "input_bytes", "output_bytes")


def describe_file(path: Path, ctx_size: int, numerics: str) -> dict[str, Any]:
    """Plain data; bytes are those of the file. `ctx_size` 0: the model's training context, DEFAULT_CTX at most. A file
    that cannot be cut into stages has a `reason`, and fewer fields. Raises UserError for a file that is no GGUF,
    damaged, or a later part."""
    headers = read_parts(path)
    header, metadata = headers[0], headers[0].metadata
    check_is_model(path, metadata)
    try:
        info, reason = model_of(headers), ""
        fields = {name: getattr(info, name) for name in MODEL_FIELDS}
        fields["kv_bytes_per_token"] = sum(info.kv_bytes_per_cell)
    except UserError as error:
        info, reason, fields = None, str(error), _header_fields(header)
    try:
        vocabulary = describe_vocabulary(path, metadata) | {"error": ""}
    except UserError as error:
        vocabulary = {"error": str(error)}
    return {
        "path": str(path),
        **fields,
        "vocabulary": vocabulary,
        "head": _head(header, info),
        "template": template_of(metadata),
        "named_templates": named_templates(metadata),
        "sliceable": info is not None,
        "reason": reason,
        "exact": info is not None and info.layers.exact,
        "numerics": numerics,
        **(_stages(info, ctx_size, numerics) if info else {"n_ctx": None, "stages": []}),
    }


def _header_fields(header: Header) -> dict[str, Any]:
    """The fields of a model that cannot be cut, as far as its header has them; None for the others."""
    architecture = _value(header.metadata, "general.architecture")
    sizes: dict[int, int] = {}
    for tensor in header.tensors:
        if (layer := layer_of(tensor.name)) is not None:
            sizes[layer] = sizes.get(layer, 0) + tensor.n_bytes
    tables = [tensor.n_bytes for tensor in header.tensors if tensor.name == "token_embd.weight"]
    return {
        **dict.fromkeys((*MODEL_FIELDS, "kv_bytes_per_token")),
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
    """The head of a draft that reads its target's states, or a model's own; None if none can be used."""
    try:
        draft = describe_eagle3(header) if is_eagle3(header) else mtp_head(info) if info else None
    except UserError:
        return None
    return asdict(draft.head) if draft and draft.head else None


def _value(metadata: dict[str, Value], key: str) -> Any:
    return metadata[key].value if key in metadata else None


def _stages(info: ModelInfo, ctx_size: int, numerics: str) -> dict[str, Any]:
    """The heaviest stage of 1, 2, 4, … stages, each on a host of its own with a prompt that fills the context."""
    n_ctx = ctx_size or min(info.n_ctx_train, DEFAULT_CTX)
    if n_ctx > MAX_CTX:
        raise UserError(f"-c {n_ctx} is more than the {MAX_CTX} tokens that a context holds; give fewer")
    on_cpus = [RankDevices(DevicePlan(), DevicePlan())]
    n_in_blocks = rows_in_blocks(n_ctx) if numerics == "exact" and info.layers.architecture.flash else 0
    capacity = capacity_of(Speculation(), 1, ContextOptions().batch_size, n_ctx, info.layers.rewinds)
    plain = numerics_of(Numerics(numerics=numerics), (), 0, n_in_blocks > 0)
    needs = MemoryNeeds(info, (), capacity, plain, on_cpus * MAX_STAGES, n_in_blocks)
    rows = []
    for n_stages in (1 << power for power in range(MAX_STAGES.bit_length())):
        try:
            assignment = assign(n_stages, [], sizes_of(info))
        except UserError:  # it has too few layers, or too few places to cut
            break
        memory = needs.of_ranks(assignment)
        rank = max(range(n_stages), key=lambda rank: memory[rank].total)
        stage, needed = assignment.stages[rank], memory[rank]
        place = {"n_stages": n_stages, "layers": [stage.first, stage.last]}
        sizes = {"weight_bytes": needed.weights + needed.mapped, "kv_bytes": needed.kv, "memory_bytes": needed.total}
        rows.append(place | sizes)
    return {"n_ctx": n_ctx, "stages": rows}


# -- text


def file_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `describe_file`'s report."""
    yield f"{report['path']}: {report['name'] or UNKNOWN}, {size_text(report['n_bytes'])}"
    yield from labelled(_rows(report), WIDTH)
    if report["sliceable"]:
        yield ""
        yield f"The heaviest stage for a context of {report['n_ctx']} tokens, --numerics {report['numerics']}:"
        yield ""
        columns = ["stages", "its layers", "weights", "KV", "memory"]
        rows = [
            [str(row["n_stages"]), f"{row['layers'][0]}-{row['layers'][1] - 1}"]
            + [size_text(row[f"{part}_bytes"]) for part in ("weight", "kv", "memory")]
            for row in report["stages"]
        ]
        yield from markdown_table(columns, rows, right_aligned=columns)


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "architecture", f"{report['architecture'] or UNKNOWN}, {_count(report['n_params'])} parameters"
    yield "quantisation", report["quantisation"] or UNKNOWN
    yield "layers", f"{_or_unknown(report['n_layer'])}, {_or_unknown(report['n_embd'])} wide: {_layers(report)}"
    if report["input_bytes"] is not None:
        tied = ", which is the output head too" if report["tied"] else ""
        output = report["output_bytes"]
        more = "" if output is None else f", output head and norms {size_text(output)}"
        yield "tables", f"token table {size_text(report['input_bytes'])}{tied}{more}"
    yield "context", f"trained for {_or_unknown(report['n_ctx_train'])} tokens"
    yield from _vocabulary_rows(report["vocabulary"])
    yield from _head_rows(report["head"])
    template, named = report["template"], report["named_templates"]
    length = f"{len(template)} characters (--json has them)" if template else "none"
    yield "template", length + (f"; further ones: {', '.join(named)}" if named else "")
    yield "sliceable", "yes" if report["sliceable"] else f"no: {report['reason']}"
    if report["sliceable"]:
        yield "exact", EXACT if report["exact"] else "no: rows depend on their batch, by rounding"


def _vocabulary_rows(vocabulary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if vocabulary["error"]:
        yield "vocabulary", vocabulary["error"]
        return
    preset = f", {vocabulary['preset']}" if vocabulary["preset"] else ""
    yield "vocabulary", f"{vocabulary['n_tokens']} tokens, {vocabulary['kind'] or UNKNOWN}{preset}"
    special = ", ".join(f"{use} {_token(token)}" for use, token in vocabulary["special"].items())
    added = [name for name in ("bos", "eos") if vocabulary[f"adds_{name}"]]
    yield "special", f"{special or 'none'}; added to texts: {' and '.join(added) or 'none'}"
    yield "ends", ", ".join(map(_token, vocabulary["ends"])) or "none: a text goes on until -n"


def _head_rows(head: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if head and head["is_mtp"]:
        yield "head", "of its own (MTP): -md mtp guesses with it"
    elif head:
        layers, lacks = ", ".join(map(str, head["target_layers"])), head["lacks"]
        missing = f"; {' and '.join(lacks)} {'are' if len(lacks) > 1 else 'is'} the target's" if lacks else ""
        yield "head", f"reads the inputs of layers {layers} of a target that is {head['n_embd_target']} wide"
        yield "guesses", f"{head['n_tokens']} tokens{missing}"


def _layers(report: Mapping[str, Any]) -> str:
    """`0-30 1.2 MB each, 31 1.4 MB`."""
    parts, first = [], 0
    for size, alike in groupby(report["layer_bytes"]):
        n = len(list(alike))
        parts.append(f"{first}-{first + n - 1} {size_text(size)} each" if n > 1 else f"{first} {size_text(size)}")
        first += n
    kv = report["kv_bytes_per_token"]
    return ", ".join(parts or [UNKNOWN]) + ("" if kv is None else f"; keys and values {size_text(kv)} a token")


def _token(token: Mapping[str, Any]) -> str:
    return f"{token['id']} {token['text']!r}"


def _or_unknown(value: object) -> str:
    return UNKNOWN if value is None else str(value)


def _count(n: float) -> str:
    return next((f"{n / size:.3g} {unit}" for size, unit in UNITS if n >= size), str(n))


def is_adapter(path: Path) -> bool:
    """Whether a GGUF file says so. Raises UserError for another file."""
    return value_of(read_header(path).metadata, "general.type", "") == "adapter"


def describe_adapter(path: Path) -> dict[str, Any]:
    """Plain data; `tensors` of layers by their name in a layer. Raises UserError for an adapter that cannot be used."""
    adapter = read_adapter(path)
    pairs = sorted(adapter.pairs, key=_name_of)
    return {
        "path": str(path),
        "kind": "adapter",
        "architecture": adapter.architecture,
        "alpha": adapter.alpha,
        "ranks": adapter.ranks,
        "n_bytes": path.stat().st_size,
        "n_passed_over": adapter.n_passed_over,
        "exact": all(pair.is_exact for pair in adapter.pairs),
        "tensors": [_describe(name, [*same]) for name, same in groupby(pairs, _name_of)],
    }


def _name_of(pair: Pair) -> str:
    return pair.base if layer_of(pair.base) is None else pair.base.split(".", 2)[2]


def _describe(name: str, pairs: list[Pair]) -> dict[str, Any]:
    return {
        "name": name,
        "layers": [layer for pair in pairs if (layer := layer_of(pair.base)) is not None],
        "ranks": sorted({pair.rank for pair in pairs}),
        "types": sorted({type_name(each.type) for pair in pairs for each in (pair.a, pair.b)}),
        "n_bytes": sum(pair.a.n_bytes + pair.b.n_bytes for pair in pairs),
    }


def adapter_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `describe_adapter`'s report."""
    yield f"{report['path']}: a LoRA adapter, {size_text(report['n_bytes'])}"
    alpha = f"{report['alpha']:g}" if report["alpha"] else "none"
    rows = [
        ("target", f"models of architecture {report['architecture']}; --lora gives it to one"),
        ("rank", f"{_listed(report['ranks'])}, alpha {alpha}"),
        ("exact", "on CPUs" if report["exact"] else "no: of types with which a row has other bits beside others"),
    ]
    if report["n_passed_over"]:
        rows.append(("passed over", f"{report['n_passed_over']} norms, which libllama does not change"))
    yield from labelled(rows, WIDTH)
    yield ""
    columns = ["tensor", "layers", "rank", "type", "size"]
    cells = [
        [name, str(len(layers)), _listed(ranks), _listed(types), size_text(n_bytes)]
        for name, layers, ranks, types, n_bytes in (each.values() for each in report["tensors"])
    ]
    yield from markdown_table(columns, cells, right_aligned=["layers", "rank", "size"])


def _listed(values: list[Any]) -> str:
    return ", ".join(map(str, values)) or "none"
