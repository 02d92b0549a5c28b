"""What was found out about model files, in lines for people. Knows plain data; reads no file."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from pipeinfer.observe.texts.markdown import markdown_table
from pipeinfer.sizes import size_text

UNKNOWN = "unknown"
EXACT = "on CPUs: the same bits in every batch, split and tree; on GPUs the kernels see the batch"
N_DIFFERENCES = 20
"""So many are shown; --json has them all."""


def info_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Of `describe_file`'s report."""
    size = found["n_bytes"]
    yield f"{found['path']}: {found['name'] or UNKNOWN}, {size_text(size)}"
    yield f"architecture  {found['architecture'] or UNKNOWN}, {_count(found['n_params'])} parameters"
    yield f"quantisation  {found['quantisation'] or UNKNOWN}"
    yield f"layers        {_or_unknown(found['n_layer'])}, {_or_unknown(found['n_embd'])} wide: {_layers(found)}"
    if found["input_bytes"] is not None:
        tied = ", which is the output head too" if found["tied"] else ""
        yield f"tables        token table {size_text(found['input_bytes'])}{tied}" + (
            "" if found["output_bytes"] is None else f", output head and norms {size_text(found['output_bytes'])}"
        )
    yield f"context       trained for {_or_unknown(found['n_ctx_train'])} tokens"
    yield from _vocabulary(found["vocabulary"])
    head = found["head"]
    if head and head["own"]:
        yield "head          of its own (MTP): -md mtp guesses with it"
    elif head:
        layers, lacks = ", ".join(map(str, head["target_layers"])), head["lacks"]
        missing = f"; {' and '.join(lacks)} {'are' if len(lacks) > 1 else 'is'} the target's" if lacks else ""
        yield f"head          reads the inputs of layers {layers} of a target that is {head['n_embd_target']} wide"
        yield f"guesses       {head['n_tokens']} tokens{missing}"
    yield from _template(found)
    yield f"sliceable     {'yes' if found['sliceable'] else 'no: ' + found['reason']}"
    if found["sliceable"]:
        yield f"exact         {EXACT if found['exact'] else 'no: rows depend on their batch, by rounding'}"
        yield from _stages(found)


def check_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Of `check_pair`'s report."""
    differences = found["differences"]
    if not differences:
        yield f"vocabularies  match: {found['draft']} can draft for {found['target']}"
    else:
        n = len(differences)
        result = "can draft, its tokens translated," if found["can_draft"] else "cannot draft"
        points = f"{n} point{'s' if n > 1 else ''}"
        yield f"vocabularies  differ in {points}: {found['draft']} {result} for {found['target']}"
        yield from (f"  {each['what']}" for each in differences[:N_DIFFERENCES])
        if n > N_DIFFERENCES:
            yield f"  and {n - N_DIFFERENCES} more, which --json lists"
        if found["can_draft"]:
            yield f"translated    {found['translated_n']} of {found['n_vocab'][0]} tokens can be guessed"
        else:
            yield f"refused       {found['reason']}"
    if found["acceptance_rate"] is not None:
        n = found["texts"]
        texts = f"{n} texts" if n > 1 else "the text"
        yield f"acceptance    {found['acceptance_rate']:.3f} of {found['predicted_n']} greedy tokens after {texts}"


def list_lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of models in the hub's cache."""
    if not found:
        yield "no models of the hub are in its cache; -hf USER/MODEL downloads one"
        return
    rows = [
        [each["repo"], each["quant"] or UNKNOWN, size_text(each["n_bytes"]) + ("" if each["is_whole"] else ", in part"),
         each["path"]]
        for each in found
    ]  # fmt: skip
    yield from markdown_table(["model", "quant", "size", "path"], rows, right_aligned=["size"])


def _vocabulary(found: Mapping[str, Any]) -> Iterator[str]:
    if found["error"]:
        yield f"vocabulary    {found['error']}"
        return
    preset = f", {found['preset']}" if found["preset"] else ""
    yield f"vocabulary    {found['n_tokens']} tokens, {found['kind'] or UNKNOWN}{preset}"
    special = ", ".join(f"{use} {_token(token)}" for use, token in found["special"].items())
    added = [name for name in ("bos", "eos") if found[f"adds_{name}"]]
    yield f"special       {special or 'none'}; added to texts: {' and '.join(added) or 'none'}"
    yield f"ends          {', '.join(map(_token, found['ends'])) or 'none: a text goes on until -n'}"


def _template(found: Mapping[str, Any]) -> Iterator[str]:
    text = found["template"]
    further = f"; further ones: {', '.join(found['named_templates'])}" if found["named_templates"] else ""
    shown = f"{len(text)} characters (--json has them)" if text else "none"
    yield f"template      {shown}{further}"


def _stages(found: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield f"The heaviest stage for a context of {found['n_ctx']} tokens, --numerics {found['numerics']}:"
    yield ""
    rows = [
        [str(row["n_stages"]), f"{row['layers'][0]}-{row['layers'][1] - 1}",
         *(size_text(row[f"{part}_bytes"]) for part in ("weight", "kv", "memory"))]
        for row in found["stages"]
    ]  # fmt: skip
    columns = ["stages", "its layers", "weights", "KV", "memory"]
    yield from markdown_table(columns, rows, right_aligned=columns)


def _layers(found: Mapping[str, Any]) -> str:
    """`0-30 1.2 MB each, 31 1.4 MB`."""
    parts, at = [], 0
    for size, same in groupby(found["layer_bytes"]):
        n = len(list(same))
        parts.append(f"{at}-{at + n - 1} {size_text(size)} each" if n > 1 else f"{at} {size_text(size)}")
        at += n
    kv = found["kv_bytes_per_token"]
    return ", ".join(parts or [UNKNOWN]) + ("" if kv is None else f"; keys and values {size_text(kv)} a token")


def _token(token: Mapping[str, Any]) -> str:
    return f"{token['id']} {token['text']!r}"


def _or_unknown(value: object) -> str:
    return UNKNOWN if value is None else str(value)


def _count(n: float) -> str:
    steps: Sequence[tuple[float, str]] = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    return next((f"{n / size:.3g} {unit}" for size, unit in steps if n >= size), str(n))
