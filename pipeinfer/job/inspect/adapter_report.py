"""The report of `models info` on a LoRA adapter: which tensors it changes, and how. Loads no weights."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeinfer.models.gguf.adapter import Pair, read_adapter
from pipeinfer.models.gguf.header import read_header, value_of
from pipeinfer.models.gguf.model_info import layer_of
from pipeinfer.models.llama.ggml import type_name
from pipeinfer.text import labelled, markdown_table, size_text

WIDTH = 14  # of a label


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
