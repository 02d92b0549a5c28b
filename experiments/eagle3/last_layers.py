"""What the target's layers after the last feature make of it, over a whole text in torch. Knows no head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.demo_net import rope_tables, rotate


@dataclass(frozen=True)
class LastLayers:
    """Of a llama target: its layers from `first` on and its output norm. `shape`: as `shape_of` has it."""

    weights: Mapping[str, Tensor]
    shape: Mapping[str, Any]
    first: int

    @torch.no_grad()
    def normed(self, x: Tensor) -> Tensor:
        """Of the residual (n, n_embd) before layer `first` what the output rows are multiplied by."""
        layer = self.first
        while f"blk.{layer}.attn_q.weight" in self.weights:
            x = x + self._attention(self._norm(x, f"blk.{layer}.attn_norm"), f"blk.{layer}.attn_")
            h = self._norm(x, f"blk.{layer}.ffn_norm")
            gate, up, down = (self.weights[f"blk.{layer}.ffn_{name}.weight"] for name in ("gate", "up", "down"))
            x = x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
            layer += 1
        return self._norm(x, "output_norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.shape["norm_eps"])

    def _attention(self, x: Tensor, name: str) -> Tensor:
        size = self.shape["n_embd"] // self.shape["n_head"]
        cos, sin = rope_tables(len(x), size, self.shape["rope_base"])
        q, k, v = (
            F.linear(x, self.weights[f"{name}{part}.weight"]).unflatten(-1, (-1, size)).transpose(0, 1)[None]
            for part in "qkv"
        )
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        return F.linear(y[0].transpose(0, 1).flatten(1), self.weights[f"{name}output.weight"])
