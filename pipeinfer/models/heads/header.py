"""Drafts that read a target's residual stream (EAGLE-3), from their headers. Loads nothing.

Keys and tensors are those of llama.cpp's conversion (architecture `eagle3`).
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.architecture import Architecture
from pipeinfer.models.gguf.head import Head
from pipeinfer.models.gguf.header import Header, Tensor, Value
from pipeinfer.models.gguf.layers import Layers
from pipeinfer.models.gguf.model_info import ModelInfo, describe, model_of, read_parts, whole_number
from pipeinfer.models.gguf.writer import tensor_data

EAGLE3 = "eagle3"
TABLE, OUTPUT, OWN_TOKENS = "token_embd.weight", "output.weight", "d2t"
I64 = 27
COPY_BYTES = 1 << 20
KNOWN = Architecture(layer_node="eagle3_prenorm")


def read_draft(path: Path) -> ModelInfo:
    """The header of a draft, a model or a head. Raises UserError when it cannot be used, with the way out."""
    return draft_in(read_parts(path))


def draft_in(headers: Sequence[Header]) -> ModelInfo:
    """The same of headers that were read."""
    return describe_head(headers[0]) if is_head(headers[0]) else model_of(headers)


def is_head(header: Header) -> bool:
    value = header.metadata.get("general.architecture")
    return value is not None and value.value == EAGLE3


def describe_head(header: Header) -> ModelInfo:
    """Raises UserError for a damaged one."""
    path, metadata = header.path, header.metadata
    n_embd = whole_number(path, metadata, f"{EAGLE3}.target_hidden_size", 1, 1 << 20)
    whole_number(path, metadata, f"{EAGLE3}.block_count", 1, 1)
    layers = Layers(EAGLE3, KNOWN, metadata, 1)
    by_name = {tensor.name: tensor for tensor in header.tensors}
    model = describe([header], layers, 1, layers.n_vocab, by_name.get(TABLE), by_name.get(OUTPUT))
    own = by_name.get(OWN_TOKENS)
    lacks = tuple(name for name in (TABLE, OUTPUT) if name not in by_name)
    head = Head(_target_layers(path, metadata), n_embd, own.shape[0] if own else layers.n_vocab, lacks)
    _check_tables(model, own)
    return replace(model, head=head)


def _target_layers(path: Path, metadata: dict[str, Value]) -> tuple[int, ...]:
    key = f"{EAGLE3}.target_layers"
    value = metadata[key].value if key in metadata else None
    found = tuple(each for each in value if isinstance(each, int)) if isinstance(value, tuple) else ()
    if len(set(found)) != 3:
        raise UserError(f"{path} is damaged: {key} is {value!r}, and three layers are wanted; convert it again")
    return found


def _check_tables(model: ModelInfo, own: Tensor | None) -> None:
    """Raises UserError where libllama would end the process: it looks tokens up by ids that it does not check."""
    table, output = model.tensor(TABLE), model.tensor(OUTPUT)
    n_said = model.n_vocab if own is None else own.shape[0]
    sound = 0 < n_said <= model.n_vocab
    sound = sound and (table is None or table.shape == (model.n_embd, model.n_vocab))
    sound = sound and (own is None if output is None else output.shape == (model.n_embd, n_said))
    if sound and own is not None:
        sound = own.type == I64 and len(own.shape) == 1
        ids = np.frombuffer(b"".join(map(bytes, tensor_data(own, COPY_BYTES))), np.int64) if sound else np.zeros(2)
        sound = sound and len(set(ids.tolist())) == len(ids) and 0 <= int(ids.min()) <= int(ids.max()) < model.n_vocab
    if not sound:
        raise UserError(f"{model.path} is damaged: its token table, output or {OWN_TOKENS} do not fit a vocabulary of "
                        f"{model.n_vocab} tokens; convert it again")  # fmt: skip


def fit(model: ModelInfo, target: ModelInfo) -> ModelInfo:
    """The draft for this target: a head with what it lacks from the target's file. Raises UserError for a head that was
    made for another one, with both one's numbers."""
    head = model.head
    if head is None:
        return model
    n_last = target.n_layer - 1
    reasons = {
        f"it reads states of {head.n_embd_target} values": head.n_embd_target != target.n_embd,
        f"it reads the inputs of layers {_listed(head.target_layers)}, and layers 1 to {n_last} have some that can be "
        "read": not all(1 <= layer <= n_last for layer in head.target_layers),
        f"it has {model.n_vocab} tokens": model.n_vocab != target.n_vocab,
        f"it has no {' and no '.join(head.lacks)} of its own, and {model.n_embd} values a token": bool(head.lacks)
        and model.n_embd != target.n_embd,
    }  # fmt: skip
    if reason := next((each for each, holds in reasons.items() if holds), ""):
        raise UserError(
            f"{model.path} is a head for another model than {target.path}: {reason}; the target has {target.n_layer} "
            f"layers, {target.n_embd} values a token and {target.n_vocab} tokens; give the head that was trained for "
            "it, another draft, or -md none"
        )
    return _completed(model, head.lacks, target) if head.lacks else model


def _completed(model: ModelInfo, lacks: Sequence[str], target: ModelInfo) -> ModelInfo:
    table, output = target.tensor(TABLE), target.tensor(OUTPUT)
    assert table is not None, target.path
    found = {TABLE: table, OUTPUT: replace(output or table, name=OUTPUT)}
    borrowed = tuple(found[name] for name in lacks)
    n_bytes = {tensor.name: tensor.n_bytes for tensor in borrowed}
    return replace(
        model,
        tensors=tuple(sorted((*model.tensors, *borrowed), key=lambda tensor: tensor.name != TABLE)),
        borrowed=borrowed,
        input_bytes=n_bytes.get(TABLE, model.input_bytes),
        output_bytes=model.output_bytes + n_bytes.get(OUTPUT, 0),
        fingerprint=sha256(f"{model.fingerprint} {target.fingerprint}".encode()).hexdigest()[:32],
    )


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers[:-1])) + f" and {layers[-1]}"
