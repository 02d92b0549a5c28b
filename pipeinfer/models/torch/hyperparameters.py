"""Which models the torch backend computes, and their numbers, by metadata and tensor names. Imports no torch."""

import math
from dataclasses import dataclass
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.header import Tensor
from pipeinfer.models.gguf.layers import Layers
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of

INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False, "qwen3moe": False}
"""The architectures: whether the two numbers that are rotated together lie side by side, or half a head apart."""

NORMS = ("attn_norm", "ffn_norm")
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output")
DENSE = ("ffn_gate", "ffn_up", "ffn_down")
EXPERTS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
PLAIN_ROPE = ("none", "linear")
OTHER_WAYS = "take another model, or --backend llama"


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """n_ff is that of an expert where there are experts; n_expert_used of them each row uses.

    rope_base, rope_scale   the angle of position p and pair i is p * rope_scale / rope_base ** (2 i / n_rot)
    scale                   of queries times keys
    """

    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    epsilon: float
    rope_base: float
    rope_scale: float
    interleaved: bool
    scale: float
    n_expert_used: int


def read_hyperparameters(info: ModelInfo) -> Hyperparameters:
    """Raises UserError, with the way out, for a model that the torch backend does not compute."""
    check_known(info)
    layers = info.layers
    n_head, n_head_kv = _uniform(layers, "attention.head_count", 0), _uniform(layers, "attention.head_count_kv", 0)
    n_head_kv = n_head_kv or n_head
    head_dim = int(_number(layers, "attention.key_length", info.n_embd // max(1, n_head)))
    if not n_head or n_head % n_head_kv or _number(layers, "attention.value_length", head_dim) != head_dim:
        raise _unknown(info, "has heads of a form that it does not know")
    factor = _number(layers, "rope.scaling.factor", _number(layers, "rope.scale_linear", 0.0))
    scaled = _text(layers, "rope.scaling.type", "linear") == "linear" and factor > 0
    return Hyperparameters(
        n_embd=info.n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_rot=int(_number(layers, "rope.dimension_count", head_dim)),
        epsilon=_number(layers, "attention.layer_norm_rms_epsilon", 1e-5),
        rope_base=_number(layers, "rope.freq_base", 10000.0),
        rope_scale=1.0 / factor if scaled else 1.0,
        interleaved=INTERLEAVED[info.architecture],
        scale=_number(layers, "attention.scale", 0.0) or 1.0 / math.sqrt(head_dim),
        n_expert_used=int(_number(layers, "expert_used_count", 0)),
    )


def check_known(info: ModelInfo) -> None:
    """Raises UserError unless the torch backend computes every tensor of this model as libllama does."""
    if info.architecture not in INTERLEAVED:
        known = ", ".join(INTERLEAVED)
        raise UserError(f"{info.path} is a {info.architecture} model; --backend torch computes {known}: {OTHER_WAYS}")
    scaling = _text(info.layers, "rope.scaling.type", "none")
    if scaling not in PLAIN_ROPE:
        raise _unknown(info, f"has rope scaling {scaling!r}, which it does not know")
    strange = next((tensor.name for tensor in info.tensors if not _is_known(tensor)), None)
    if strange:
        raise _unknown(info, f"has a tensor {strange}, which it does not know")


def _is_known(tensor: Tensor) -> bool:
    if layer_of(tensor.name) is None:
        return tensor.name in ("token_embd.weight", "output.weight", "output.bias", "output_norm.weight",
                               "rope_freqs.weight")  # fmt: skip
    name, _, kind = tensor.name.split(".", 2)[2].partition(".")
    if kind == "weight":
        return name in (*NORMS, *MATRICES, *DENSE, *EXPERTS, *HEAD_NORMS)
    return kind == "bias" and name in (*MATRICES, *DENSE)


def _unknown(info: ModelInfo, what: str) -> UserError:
    return UserError(f"--backend torch cannot compute {info.path}: it {what}; {OTHER_WAYS}")


def _uniform(layers: Layers, key: str, default: int) -> int:
    """A number that all layers have; 0 where they differ."""
    values = set(layers.of_layers(key, default))
    value = values.pop() if len(values) == 1 else 0
    return value if isinstance(value, int) else 0


def _value(layers: Layers, key: str) -> Any:
    found = layers.metadata.get(f"{layers.name}.{key}")
    return None if found is None else found.value


def _number(layers: Layers, key: str, default: float) -> float:
    value = _value(layers, key)
    return value if isinstance(value, int | float) else default


def _text(layers: Layers, key: str, default: str) -> str:
    value = _value(layers, key)
    return value if isinstance(value, str) else default
