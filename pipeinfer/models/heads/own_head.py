"""The head that a model has in its own file to guess ahead (MTP, multi-token prediction). Loads nothing.

libllama loads a file that has the model's metadata, the head's layer under its own number, the tables, and none of the
other layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.architecture import Architecture
from pipeinfer.models.gguf.head import OWN_HEAD, Head
from pipeinfer.models.gguf.layers import EXTRA, Layers
from pipeinfer.models.gguf.model_info import ModelInfo, kv_shapes_of, layer_of, whole_number
from pipeinfer.models.heads.header import fit, read_draft

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
    return own_head(target) if path == OWN_HEAD else fit(read_draft(path), target)


def has_own_head(target: ModelInfo) -> bool:
    """Whether it has one that can be used."""
    return not _refusal(target)


def own_head(target: ModelInfo) -> ModelInfo:
    """The target's head, as a draft. Raises UserError where there is none that can be used."""
    if reason := _refusal(target):
        raise UserError(f"-md {OWN_HEAD}: {target.path} {reason}; give another draft, or -md none")
    tensors = tuple(tensor for tensor in target.tensors if layer_of(tensor.name) in (None, target.n_layer))
    table = target.tensor(TABLE)
    assert table is not None, target.path
    # libllama takes the vocabulary's size from the first tensor of a file that is written here
    tensors = tuple(sorted(tensors, key=lambda tensor: tensor.name != TABLE))
    layers = replace(target.layers, known=replace(target.layers.known, states=None, windows=None), n=target.n_layer + 1)
    n_blocks = whole_number(target.path, dict(target.metadata), f"{target.architecture}.block_count", 1, 1 << 16)
    return replace(
        target,
        path=OWN_HEAD,
        n_layer=1,
        n_params=sum(tensor.n_elements for tensor in tensors),
        layer_bytes=(sum(tensor.n_bytes for tensor in tensors if layer_of(tensor.name) is not None),),
        kv_shapes=kv_shapes_of(target.path, layers, n_blocks, target.n_embd)[-1:],
        fingerprint=sha256(f"{target.fingerprint} {OWN_HEAD}".encode()).hexdigest()[:32],
        layers=_HeadLayers(target.architecture, KNOWN, target.metadata, 1),
        tensors=tensors,
        borrowed=tensors,
        head=Head((target.n_layer,), target.n_embd, target.n_vocab, (), own=True),
    )


def _refusal(target: ModelInfo) -> str:
    count = target.metadata.get(f"{target.architecture}.{EXTRA}")
    n_heads = count.value if count is not None and isinstance(count.value, int) else 0
    if not n_heads or target.tensor(f"blk.{target.n_layer}.{PROJECTION}") is None:
        return "has no head of its own"
    if n_heads > 1:
        return f"has {n_heads} heads of its own, and only one can be used"
    if target.architecture not in TESTED:
        return f"has a head of its own, which is known to work in {', '.join(TESTED)}, not in {target.architecture}"
    return ""
