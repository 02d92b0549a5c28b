"""The models that the torch backend computes, what a stage of it is loaded with, and whether this host has torch.
Imports torch in `load_torch` alone."""

import math
import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from pipeinfer.child import package_version
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.header import Tensor
from pipeinfer.models.gguf.layers import Layers
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of
from pipeinfer.models.llama.threads import spin_briefly

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
F32, BF16, INT8, INT4 = "f32", "bf16", "int8", "int4"
WEIGHT_BYTES = {F32: 4.0, BF16: 2.0, INT8: 1.0, INT4: 0.625}
HEAD_BYTES = WEIGHT_BYTES | {INT4: 1.0}
CACHE_BYTES = {F32: 4, BF16: 2, INT8: 2, INT4: 2}
"""Bytes of a weight, of a weight of the output matrix, and of a key or value. In 4 bits every 32 have a scale and an
offset."""

MISSING = "--backend torch needs PyTorch, which is not installed here; pip install 'pipeinfer[torch]' on every host"


@dataclass(frozen=True)
class TorchParams:
    """`device`: where weights, keys and values are and layers are computed: `cpu`, `cuda` or `cuda:N`; `auto`: a GPU
    where there is one. `dtype`: of weights: `f32`, `bf16`, or `int8` or `int4`, with keys and values in bf16; `auto`:
    bf16 on a GPU, else f32."""

    n_cells: int  # KV cells
    n_seq_max: int = 32  # sequence ids of users
    n_batch: int = 512  # rows of the largest batch
    n_outputs_max: int = 32  # rows of a batch that may want logits, on the last stage
    n_threads: int = 1  # at most; fewer while other processes want the cores
    device: str = AUTO
    dtype: str = AUTO
    local_rank: int = 0  # this rank's number on its host, for `auto` and `cuda`: ranks take the GPUs in turns
    exact: bool = True  # the same row gives the same bits in every batch and tree, on the CPU
    padded: bool = False  # runs are padded to a few sizes, as on a GPU, whose graphs need that


def torch_version() -> str:
    """The installed package's, without importing it; empty if there is none."""
    return (package_version("torch") or "unknown") if find_spec("torch") else ""


@cache
def load_torch() -> Any:
    """The module; its waiting threads spin briefly. Raises UserError if it is not installed."""
    spin_briefly(os.environ)
    try:
        import torch
    except ImportError:
        raise UserError(MISSING) from None
    return torch


INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False, "qwen3moe": False}
"""By architecture: whether the two numbers that are rotated together lie side by side, or half a head apart."""

ENDS = ("token_embd.weight", "output.weight", "output.bias", "output_norm.weight", "rope_freqs.weight")
NORMS = ("attn_norm", "ffn_norm")
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output")
DENSE = ("ffn_gate", "ffn_up", "ffn_down")
EXPERTS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
PLAIN_ROPE = ("none", "linear")
OTHER_WAYS = "take another model, or --backend llama"


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The angle of position p and pair i is p * rope_scale / rope_base ** (2 i / n_rot)."""

    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    epsilon: float
    rope_base: float
    rope_scale: float
    interleaved: bool
    scale: float  # of queries times keys
    n_expert_used: int  # experts of a row


def read_hyperparameters(info: ModelInfo) -> Hyperparameters:
    """Raises UserError for a model that the torch backend does not compute."""
    check_known(info)
    layers = info.layers
    n_head, n_head_kv = _uniform(layers, "attention.head_count"), _uniform(layers, "attention.head_count_kv")
    n_head_kv = n_head_kv or n_head
    head_dim = layers.get("attention.key_length", info.n_embd // max(1, n_head))
    if not n_head or n_head % n_head_kv or layers.get("attention.value_length", head_dim) != head_dim:
        raise _unknown(info, "has heads of a form that it does not know")
    factor = layers.get("rope.scaling.factor", layers.get("rope.scale_linear", 0.0))
    scaled = layers.get("rope.scaling.type", "linear") == "linear" and factor > 0
    return Hyperparameters(
        n_embd=info.n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_rot=layers.get("rope.dimension_count", head_dim),
        epsilon=layers.get("attention.layer_norm_rms_epsilon", 1e-5),
        rope_base=layers.get("rope.freq_base", 10000.0),
        rope_scale=1.0 / factor if scaled else 1.0,
        interleaved=INTERLEAVED[info.architecture],
        scale=layers.get("attention.scale", 0.0) or 1.0 / math.sqrt(head_dim),
        n_expert_used=layers.get("expert_used_count", 0),
    )


def check_known(info: ModelInfo) -> None:
    """Raises UserError unless the torch backend computes every tensor of this model as libllama does."""
    if info.architecture not in INTERLEAVED:
        names = ", ".join(INTERLEAVED)
        raise UserError(f"{info.path} is a {info.architecture} model; --backend torch computes {names}: {OTHER_WAYS}")
    scaling = info.layers.get("rope.scaling.type", "none")
    if scaling not in PLAIN_ROPE:
        raise _unknown(info, f"has rope scaling {scaling!r}, which it does not know")
    unknown = next((tensor.name for tensor in info.tensors if not _is_known(tensor)), None)
    if unknown:
        raise _unknown(info, f"has a tensor {unknown}, which it does not know")


def _is_known(tensor: Tensor) -> bool:
    if layer_of(tensor.name) is None:
        return tensor.name in ENDS
    name, _, kind = tensor.name.split(".", 2)[2].partition(".")
    if kind == "weight":
        return name in (*NORMS, *MATRICES, *DENSE, *EXPERTS, *HEAD_NORMS)
    return kind == "bias" and name in (*MATRICES, *DENSE)


def _unknown(info: ModelInfo, what: str) -> UserError:
    return UserError(f"--backend torch cannot compute {info.path}: it {what}; {OTHER_WAYS}")


def _uniform(layers: Layers, key: str) -> int:
    """The number of all layers; 0 if they differ."""
    values = set(layers.of_layers(key, 0))
    value = values.pop() if len(values) == 1 else 0
    return value if isinstance(value, int) else 0
