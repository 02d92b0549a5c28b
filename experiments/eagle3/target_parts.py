"""What a head takes from its target: its shape, its vectors, its first weights. Trains nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from experiments.eagle3.net import Head
from experiments.eagle3.recording import Text
from pipeinfer.models.gguf.model_info import read_model_info

N_MEASURED = 64
"""Texts whose features' sizes are measured."""

SMALL = 0.1


def feature_layers(n_layer: int) -> tuple[int, int, int]:
    """The layers whose inputs are the features where nothing else is said, as llama.cpp's converter takes them."""
    return 2, n_layer // 2, n_layer - 3


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a GGUF file as float32, rows first."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = torch.from_numpy(values.astype(np.float32).reshape([int(n) for n in tensor.shape[::-1]]))
    return found


def shape_of(target: Path, layers: Sequence[int] | None, n_ff: int) -> dict[str, Any]:
    """Fields of a HeadConfig: the shape of one of the target's layers. Raises ValueError for another architecture."""
    info = read_model_info(target)
    if info.metadata["general.architecture"].value != "llama":
        raise ValueError(f"{target} is no llama model")

    def key(name: str) -> Any:
        return info.metadata[f"llama.{name}"].value

    return {
        "layers": tuple(layers or feature_layers(info.n_layer)),
        "n_embd": info.n_embd,
        "n_head": key("attention.head_count"),
        "n_head_kv": key("attention.head_count_kv"),
        "n_ff": n_ff or key("feed_forward_length"),
        "rope_base": key("rope.freq_base"),
        "norm_eps": key("attention.layer_norm_rms_epsilon"),
    }


@torch.no_grad()
def begin_from(head: Head, weights: Mapping[str, Tensor], texts: Sequence[Text]) -> None:
    """First weights: the target's last layer, norm and output rows, features scaled to like size each. What the layer
    adds begins small: it is for another place in the text."""
    d = head.config.n_embd
    features = np.concatenate([text.features[1:] for text in texts[:N_MEASURED]])
    values = torch.from_numpy(features.view(np.int16)).view(torch.bfloat16).float().flatten(1)
    whole = values.square().mean(-1, keepdim=True)
    head.enc_norm.weight.copy_((values.square() / whole).mean(0).rsqrt().clamp(max=100.0))
    torch.nn.init.normal_(head.fc.weight, std=0.3 * head.fc.weight.shape[1] ** -0.5)
    # as long as it was, and so like what the target's output rows read
    head.fc.weight[:, 2 * d :] += torch.diag(head.enc_norm.weight[2 * d :].reciprocal())
    block = f"blk.{_n_layer(weights) - 1}."
    for name in ("q", "k", "v"):
        matrix = getattr(head, f"attn_{name}").weight
        torch.nn.init.normal_(matrix, std=0.5 * matrix.shape[1] ** -0.5)
        matrix[:, d:] += weights[f"{block}attn_{name}.weight"]
    head.attn_output.weight.copy_(SMALL * weights[f"{block}attn_output.weight"])
    if head.config.n_ff == weights[f"{block}ffn_up.weight"].shape[0]:
        for name in ("ffn_gate", "ffn_up", "ffn_down", "ffn_norm"):
            getattr(head, name).weight.copy_(weights[f"{block}{name}.weight"])
        head.ffn_down.weight.mul_(SMALL)
    head.output_norm.weight.copy_(weights["output_norm.weight"])
    rows = weights.get("output.weight", weights["token_embd.weight"])
    head.output.weight.copy_(rows[head.guessed])


def _n_layer(weights: Mapping[str, Tensor]) -> int:
    return 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blk."))
