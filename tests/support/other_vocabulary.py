"""A model file with its vocabulary in another order, and with further tokens: it computes the same under other ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from tests.support.gguf_factory import CONTROL

TABLES = ("token_embd.weight", "output.weight", "output.bias")
ITEMS = ("tokens", "scores", "token_type")
NAMED = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")


def reorder(source: Path, path: Path, order: Sequence[int | bytes]) -> Path:
    """`order`: of each token of the new file which one of the old it is, or the spelling of a new control token."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    old = {item: reader.fields[f"tokenizer.ggml.{item}"].contents() for item in ITEMS}
    new = {item: [old[item][each] if isinstance(each, int) else None for each in order] for item in ITEMS}
    for index, each in enumerate(order):
        if isinstance(each, bytes):
            new["tokens"][index], new["scores"][index], new["token_type"][index] = each.decode(), 0.0, CONTROL
    for key, field in reader.fields.items():
        name = key.removeprefix("tokenizer.ggml.")
        if key.startswith("GGUF.") or key in ("general.architecture", f"{writer.arch}.vocab_size"):
            continue
        value = field.contents()
        if name in ITEMS:
            writer.add_array(key, new[name])
        elif name in NAMED:
            writer.add_uint32(key, list(order).index(value))
        else:
            kind = field.types[0]
            writer.add_key_value(key, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    rows = np.array([each if isinstance(each, int) else 0 for each in order])
    for tensor in reader.tensors:
        data = tensor.data[rows] if tensor.name in TABLES else tensor.data
        quantised = tensor.tensor_type not in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type if quantised else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
