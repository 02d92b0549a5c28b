"""The head that a model brings to guess ahead (MTP, multi-token prediction), in its own file or in one beside it. Loads
nothing.

libllama loads a file that has the model's metadata, the head's layer under its own number, the tables, and none of the
other layers. Files beside a model (`mtp-….gguf`) are such ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.architecture import Architecture
from pipeinfer.models.gguf.head import OWN_HEAD, Head
from pipeinfer.models.gguf.header import Header, Tensor, Value
from pipeinfer.models.gguf.layers import EXTRA, Layers
from pipeinfer.models.gguf.model_info import ModelInfo, kv_shapes_of, layer_of, read_parts, whole_number
from pipeinfer.models.heads.header import draft_in, fit

KNOWN = Architecture(layer_node="mtp_attn_residual")
TESTED = (
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "glm-dsa", "glm4moe", "hy_v3", "qwen35", "qwen35moe",
    "qwen3next", "step35",
)  # fmt: skip
"""Architectures whose heads guess what they do in llama.cpp (tests/models/test_heads.py)."""
PROJECTION, TABLE = "nextn.eh_proj.weight", "token_embd.weight"


@dataclass(frozen=True)
class _HeadLayers(Layers):
    """One layer, with the metadata of the whole model."""

    def metadata_of(self, layers: Sequence[int]) -> dict[str, bytes]:
        return {key: value.raw for key, value in self.metadata.items()}


def draft_of(path: Path, target: ModelInfo) -> ModelInfo:
    """The header of a draft for this target: a model's, a head's, or OWN_HEAD. Raises UserError when it cannot be used,
    with the way out."""
    if path == OWN_HEAD:
        return own_head(target)
    headers = read_parts(path)
    return _head_beside(headers, target) if is_beside(headers) else fit(draft_in(headers), target)


def is_beside(headers: Sequence[Header]) -> bool:
    """Whether a file holds the head of a model and none of its other layers."""
    has_head = any(tensor.name.endswith(PROJECTION) for header in headers for tensor in header.tensors)
    return has_head and not any(layer_of(tensor.name) == 0 for header in headers for tensor in header.tensors)


def has_own_head(target: ModelInfo) -> bool:
    """Whether the target's file has a head that can be used."""
    return not _refusal(target.architecture, target.metadata, target.n_layer, target.tensors)


def own_head(target: ModelInfo) -> ModelInfo:
    """The head in the target's file, as a draft. Raises UserError where there is none that can be used."""
    if reason := _refusal(target.architecture, target.metadata, target.n_layer, target.tensors):
        raise UserError(f"-md {OWN_HEAD}: {target.path} {reason}; give another draft, or -md none")
    tensors = [tensor for tensor in target.tensors if layer_of(tensor.name) in (None, target.n_layer)]
    # libllama takes the vocabulary's size from the first tensor of a file that is written here
    tensors.sort(key=lambda tensor: tensor.name != TABLE)
    fingerprint = sha256(f"{target.fingerprint} {OWN_HEAD}".encode()).hexdigest()[:32]
    made = _described(target, target.metadata, tensors)
    return replace(made, path=OWN_HEAD, fingerprint=fingerprint, borrowed=tuple(tensors))


def _head_beside(headers: Sequence[Header], target: ModelInfo) -> ModelInfo:
    """The same of a file of its own. Raises UserError for one that is of another model, too."""
    path, metadata = headers[0].path, headers[0].metadata
    tensors = [tensor for header in headers for tensor in header.tensors]
    found = next((tensor.shape for tensor in tensors if tensor.name == TABLE), ())
    architecture = metadata["general.architecture"].value if "general.architecture" in metadata else ""
    reason = "" if architecture == target.architecture else f"is of a model of architecture {architecture!r}"
    reason = reason or _refusal(target.architecture, metadata, target.n_layer, tensors)
    if not reason and found != (target.n_embd, target.n_vocab):
        reason = f"has a token table of shape {found}"
    if reason:
        raise UserError(
            f"{path} {reason}: it is no head for {target.path}, of architecture {target.architecture!r}, with "
            f"{target.n_layer} layers, {target.n_embd} values a token and {target.n_vocab} tokens; give the head of "
            "that model, another draft, or -md none"
        )
    return replace(
        _described(target, metadata, tensors),
        path=path,
        paths=tuple(header.path for header in headers),
        states=tuple(header.state for header in headers),
        fingerprint=sha256("".join(header.digest for header in headers).encode()).hexdigest()[:32],
    )


def _described(target: ModelInfo, metadata: Mapping[str, Value], tensors: Sequence[Tensor]) -> ModelInfo:
    known, name = target.layers.known, target.architecture
    layers = Layers(name, replace(known, states=None, windows=None), metadata, target.n_layer + 1)
    n_blocks = whole_number(target.path, dict(metadata), f"{name}.block_count", 1, 1 << 16)
    return replace(
        target,
        n_layer=1,
        n_params=sum(tensor.n_elements for tensor in tensors),
        layer_bytes=(sum(tensor.n_bytes for tensor in tensors if layer_of(tensor.name) is not None),),
        kv_shapes=kv_shapes_of(target.path, layers, n_blocks, target.n_embd)[-1:],
        layers=_HeadLayers(name, KNOWN, metadata, 1),
        tensors=tuple(tensors),
        head=Head((target.n_layer,), target.n_embd, target.n_vocab, (), own=True),
    )


def _refusal(architecture: str, metadata: Mapping[str, Value], n_layer: int, tensors: Iterable[Tensor]) -> str:
    """Why no head behind `n_layer` layers can be used; empty if it can."""
    count = metadata.get(f"{architecture}.{EXTRA}")
    n_heads = count.value if count is not None and isinstance(count.value, int) else 0
    if not n_heads or all(tensor.name != f"blk.{n_layer}.{PROJECTION}" for tensor in tensors):
        return "has no head of its own"
    if n_heads > 1:
        return f"has {n_heads} heads of its own, and only one can be used"
    if architecture not in TESTED:
        return f"has a head of its own, which is known to work in {', '.join(TESTED)}, not in {architecture}"
    return ""
