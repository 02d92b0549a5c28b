"""Headers of drafts, above all of heads that read the target's features: EAGLE-3's files, and MTP heads in the target's
file or in one beside it. Loads nothing.

Keys and tensors are those of llama.cpp's conversion. libllama loads an MTP head from a file that has the model's
metadata, the head's layer under its own number, the tables, and no other layer; files beside a model (`mtp-….gguf`) are
such ones."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.architectures import Architecture
from pipeinfer.models.gguf.header import Header, Tensor, Value, value_of
from pipeinfer.models.gguf.layers import EXTRA, Layers
from pipeinfer.models.gguf.model_info import (
    OWN_HEAD,
    DraftHead,
    ModelInfo,
    describe,
    kv_shapes_of,
    layer_of,
    model_of,
    read_parts,
    whole_number,
)
from pipeinfer.models.gguf.writer import tensor_data

EAGLE3 = "eagle3"
EAGLE3_ARCHITECTURE = Architecture(layer_node="eagle3_prenorm")
MTP_ARCHITECTURE = Architecture(layer_node="mtp_attn_residual")
TABLE, OUTPUT, TOKEN_IDS, PROJECTION = "token_embd.weight", "output.weight", "d2t", "nextn.eh_proj.weight"
I64 = 27
COPY_BYTES = 1 << 20
MTP_TESTED = tuple(
    "bailingmoe3 cohere2moe deepseek2 deepseek32 glm-dsa glm4moe hy_v3 qwen35 qwen35moe qwen3next step35".split()
)
"""Architectures whose MTP heads guess as in llama.cpp (tests/models/test_heads.py)."""


def read_draft(path: Path) -> ModelInfo:
    """The header of a draft, a model or an EAGLE-3 head. Raises UserError when it cannot be used, with the way out."""
    return _describe_draft(read_parts(path))


def draft_of(path: Path, target: ModelInfo) -> ModelInfo:
    """The header of a draft for this target: a model's, a head's, or OWN_HEAD. Raises UserError when it cannot be used,
    with the way out."""
    if path == OWN_HEAD:
        return mtp_head(target)
    headers = read_parts(path)
    names = [tensor.name for header in headers for tensor in header.tensors]
    if any(name.endswith(PROJECTION) for name in names) and not any(layer_of(name) == 0 for name in names):
        return _mtp_file(headers, target)  # the head of a model, and none of its other layers
    return fit(_describe_draft(headers), target)


def read_drafts(paths: Sequence[Path], target: ModelInfo) -> list[ModelInfo]:
    """The headers of several drafts, each as `draft_of` reads it; a head first, then the smallest."""
    drafts = [draft_of(path, target) for path in paths]
    return sorted(drafts, key=lambda draft: (draft.head is None, draft.n_bytes))


def _describe_draft(headers: Sequence[Header]) -> ModelInfo:
    return describe_eagle3(headers[0]) if is_eagle3(headers[0]) else model_of(headers)


# -- EAGLE-3


def is_eagle3(header: Header) -> bool:
    return value_of(header.metadata, "general.architecture", "") == EAGLE3


def describe_eagle3(header: Header) -> ModelInfo:
    """The header of an EAGLE-3 head. Raises UserError for a damaged one."""
    path, metadata = header.path, header.metadata
    n_embd = whole_number(path, metadata, f"{EAGLE3}.target_hidden_size", 1, 1 << 20)
    whole_number(path, metadata, f"{EAGLE3}.block_count", 1, 1)
    layers = Layers(EAGLE3, EAGLE3_ARCHITECTURE, metadata, 1)
    by_name = {tensor.name: tensor for tensor in header.tensors}
    model = describe([header], layers, 1, layers.n_vocab, by_name.get(TABLE), by_name.get(OUTPUT))
    token_ids = by_name.get(TOKEN_IDS)
    lacks = tuple(name for name in (TABLE, OUTPUT) if name not in by_name)
    n_tokens = token_ids.shape[0] if token_ids else layers.n_vocab
    head = DraftHead(_target_layers(path, metadata), n_embd, n_tokens, lacks)
    _check_tables(model, token_ids)
    return replace(model, head=head)


def _target_layers(path: Path, metadata: dict[str, Value]) -> tuple[int, ...]:
    key = f"{EAGLE3}.target_layers"
    value = metadata[key].value if key in metadata else None
    layers = tuple(each for each in value if isinstance(each, int)) if isinstance(value, tuple) else ()
    if len(set(layers)) != 3:
        raise UserError(f"{path} is damaged: {key} is {value!r}, and three layers are wanted; convert it again")
    return layers


def _check_tables(model: ModelInfo, token_ids: Tensor | None) -> None:
    """Raises UserError where libllama would end the process: it looks tokens up by ids that it does not check."""
    table, output = model.tensor(TABLE), model.tensor(OUTPUT)
    n_outputs = model.n_vocab if token_ids is None else token_ids.shape[0]
    sound = 0 < n_outputs <= model.n_vocab
    sound = sound and (table is None or table.shape == (model.n_embd, model.n_vocab))
    sound = sound and (token_ids is None if output is None else output.shape == (model.n_embd, n_outputs))
    if sound and token_ids is not None:
        sound = token_ids.type == I64 and len(token_ids.shape) == 1
        data = b"".join(map(bytes, tensor_data(token_ids, COPY_BYTES))) if sound else bytes(16)
        ids = np.frombuffer(data, np.int64)
        sound = sound and len(set(ids.tolist())) == len(ids) and 0 <= int(ids.min()) <= int(ids.max()) < model.n_vocab
    if not sound:
        tables = f"its token table, output or {TOKEN_IDS} do not fit a vocabulary of {model.n_vocab} tokens"
        raise UserError(f"{model.path} is damaged: {tables}; convert it again")


def fit(model: ModelInfo, target: ModelInfo) -> ModelInfo:
    """The draft for this target: a head with the tensors that it lacks from the target's file. Raises UserError for a
    head that was made for another target, with the numbers of both."""
    head = model.head
    if head is None:
        return model
    n_last = target.n_layer - 1
    layers = ", ".join(map(str, head.target_layers[:-1])) + f" and {head.target_layers[-1]}"
    reason = ""
    if head.n_embd_target != target.n_embd:
        reason = f"it reads states of {head.n_embd_target} values"
    elif not all(1 <= layer <= n_last for layer in head.target_layers):
        reason = f"it reads the inputs of layers {layers}, and layers 1 to {n_last} have some that can be read"
    elif model.n_vocab != target.n_vocab:
        reason = f"it has {model.n_vocab} tokens"
    elif head.lacks and model.n_embd != target.n_embd:
        reason = f"it has no {' and no '.join(head.lacks)} of its own, and {model.n_embd} values a token"
    if reason:
        target_is = f"{target.n_layer} layers, {target.n_embd} values a token and {target.n_vocab} tokens"
        way_out = "give the head that was trained for it, another draft, or -md none"
        other = f"is a head for another model than {target.path}: {reason}; the target has {target_is}"
        raise UserError(f"{model.path} {other}; {way_out}")
    return _completed(model, head.lacks, target) if head.lacks else model


def _completed(model: ModelInfo, lacks: Sequence[str], target: ModelInfo) -> ModelInfo:
    table, output = target.tensor(TABLE), target.tensor(OUTPUT)
    assert table is not None, target.path
    tensors = {TABLE: table, OUTPUT: replace(output or table, name=OUTPUT)}
    borrowed = tuple(tensors[name] for name in lacks)
    n_bytes = {tensor.name: tensor.n_bytes for tensor in borrowed}
    return replace(
        model,
        tensors=_table_first([*model.tensors, *borrowed]),
        borrowed=borrowed,
        input_bytes=n_bytes.get(TABLE, model.input_bytes),
        output_bytes=model.output_bytes + n_bytes.get(OUTPUT, 0),
        fingerprint=_fingerprint(f"{model.fingerprint} {target.fingerprint}"),
    )


def _table_first(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """libllama takes the vocabulary's size from the first tensor of a file that is written here."""
    return tuple(sorted(tensors, key=lambda tensor: tensor.name != TABLE))


def _fingerprint(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:32]


# -- MTP (multi-token prediction)


@dataclass(frozen=True)
class _HeadLayers(Layers):
    """One layer, with the metadata of the whole model."""

    def metadata_of(self, layers: Sequence[int]) -> dict[str, bytes]:
        return {key: value.raw for key, value in self.metadata.items()}


def has_mtp_head(target: ModelInfo) -> bool:
    """Whether the target's file has a head that can be used."""
    return not _refusal(target, target.metadata, target.tensors)


def mtp_head(target: ModelInfo) -> ModelInfo:
    """The head in the target's file, as a draft. Raises UserError where there is none that can be used."""
    if reason := _refusal(target, target.metadata, target.tensors):
        raise UserError(f"-md {OWN_HEAD}: {target.path} {reason}; give another draft, or -md none")
    tensors = _table_first(tensor for tensor in target.tensors if layer_of(tensor.name) in (None, target.n_layer))
    return replace(
        _describe_mtp(target, target.metadata, tensors),
        path=OWN_HEAD,
        fingerprint=_fingerprint(f"{target.fingerprint} {OWN_HEAD}"),
        borrowed=tensors,
    )


def _mtp_file(headers: Sequence[Header], target: ModelInfo) -> ModelInfo:
    """The head in a file beside the target's. Raises UserError also for the head of another model."""
    path, metadata = headers[0].path, headers[0].metadata
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    shape = next((tensor.shape for tensor in tensors if tensor.name == TABLE), ())
    architecture = value_of(metadata, "general.architecture", "")
    reason = "" if architecture == target.architecture else f"is of a model of architecture {architecture!r}"
    reason = reason or _refusal(target, metadata, tensors)
    if not reason and shape != (target.n_embd, target.n_vocab):
        reason = f"has a token table of shape {shape}"
    if reason:
        raise UserError(
            f"{path} {reason}: it is no head for {target.path}, of architecture {target.architecture!r}, with "
            f"{target.n_layer} layers, {target.n_embd} values a token and {target.n_vocab} tokens; give the head of "
            "that model, another draft, or -md none"
        )
    return replace(
        _describe_mtp(target, metadata, tensors),
        path=path,
        paths=tuple(header.path for header in headers),
        states=tuple(header.state for header in headers),
        fingerprint=_fingerprint("".join(header.digest for header in headers)),
    )


def _describe_mtp(target: ModelInfo, metadata: Mapping[str, Value], tensors: tuple[Tensor, ...]) -> ModelInfo:
    name = target.architecture
    layers = Layers(name, replace(target.layers.architecture, states=None, windows=None), metadata, target.n_layer + 1)
    n_blocks = whole_number(target.path, dict(metadata), f"{name}.block_count", 1, 1 << 16)
    return replace(
        target,
        n_layer=1,
        n_params=sum(tensor.n_elements for tensor in tensors),
        layer_bytes=(sum(tensor.n_bytes for tensor in tensors if layer_of(tensor.name) is not None),),
        kv_shapes=kv_shapes_of(target.path, layers, n_blocks, target.n_embd)[-1:],
        layers=_HeadLayers(name, MTP_ARCHITECTURE, metadata, 1),
        tensors=tensors,
        head=DraftHead((target.n_layer,), target.n_embd, target.n_vocab, (), is_mtp=True),
    )


def _refusal(target: ModelInfo, metadata: Mapping[str, Value], tensors: Iterable[Tensor]) -> str:
    """Why no MTP head behind the target's layers can be used; empty if it can."""
    n_heads = value_of(metadata, f"{target.architecture}.{EXTRA}", 0)
    if not n_heads or all(tensor.name != f"blk.{target.n_layer}.{PROJECTION}" for tensor in tensors):
        return "has no head of its own"
    if n_heads > 1:
        return f"has {n_heads} heads of its own, and only one can be used"
    if target.architecture not in MTP_TESTED:
        return f"has a head of its own, which is known to work in {', '.join(MTP_TESTED)}, not in {target.architecture}"
    return ""
