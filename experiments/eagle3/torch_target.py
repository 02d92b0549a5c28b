"""A llama target in torch that decodes many texts at once, each with cells of its own. Knows no sampling.

libllama's CPU kernels compute attention of every row over the cells of all sequences, so that many long texts at once
cost several times as much there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.demo_net import rope_tables, rotate
from experiments.eagle3.recording import Words
from experiments.eagle3.target_parts import read_weights, shape_of
from pipeinfer.cluster.wire import rounded
from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf.model_info import read_model_info


class TorchTarget:
    """`n_slots` texts of `n_cells` tokens at most. What comes out is what `StageTarget` gives, up to rounding."""

    def __init__(self, path: Path, layers: Sequence[int], n_slots: int, n_cells: int) -> None:
        """Raises UserError for a file that is no model, ValueError for another architecture than llama."""
        shape = shape_of(path, layers, 0)
        self.n_layer, self.layers = read_model_info(path).n_layer, layers
        self.n_kv, self.n_group = shape["n_head_kv"], shape["n_head"] // shape["n_head_kv"]
        self.n_embd, self.eps = shape["n_embd"], shape["norm_eps"]
        self.weights = read_weights(path)
        d = self.n_embd // (self.n_kv * self.n_group)
        self.cos, self.sin = rope_tables(n_cells, d, shape["rope_base"])
        self.cells = torch.zeros(2, self.n_layer, n_slots, self.n_kv, n_cells, d)

    def close(self) -> None:
        self.weights.clear()

    def forget(self, seq: int) -> None:
        """Cells after a sequence's newest position are never read."""

    @torch.no_grad()
    def evaluate(
        self, tokens: Sequence[int], positions: Sequence[int], seqs: Sequence[int], wanted: Sequence[bool]
    ) -> tuple[Words, FloatArray]:
        """Features (n_rows, n_features, n_embd) and the logits (n_wanted, n_vocab) of rows, a sequence's together."""
        runs = [list(rows) for _, rows in groupby(range(len(tokens)), key=lambda row: seqs[row])]
        single = [rows[0] for rows in runs if len(rows) == 1]
        features = np.empty((len(tokens), len(self.layers), self.n_embd), np.uint16)
        last = torch.empty(len(tokens), self.n_embd)
        for rows in [single] * bool(single) + [rows for rows in runs if len(rows) > 1]:
            found, last[rows] = self._forward(
                torch.tensor([tokens[row] for row in rows]),
                torch.tensor([positions[row] for row in rows]),
                torch.tensor([seqs[row] for row in rows]),
            )
            features[rows] = rounded(found.numpy())
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return features, F.linear(self._norm(last[torch.tensor(wanted)], "output_norm"), head).numpy()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.eps)

    def _forward(self, tokens: Tensor, positions: Tensor, seqs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of one sequence in order, or one row each of several; the features and the residual at the end."""
        x, kept = F.embedding(tokens, self.weights["token_embd.weight"]), []
        for layer in range(self.n_layer):
            if layer in self.layers:
                kept.append(x)
            x = x + self._attention(self._norm(x, f"blk.{layer}.attn_norm"), layer, positions, seqs)
            h = self._norm(x, f"blk.{layer}.ffn_norm")
            gate, up, down = (self.weights[f"blk.{layer}.ffn_{name}.weight"] for name in ("gate", "up", "down"))
            x = x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
        return torch.stack(kept, 1), x

    def _attention(self, x: Tensor, layer: int, positions: Tensor, seqs: Tensor) -> Tensor:
        n = len(x)
        q, k, v, out = (self.weights[f"blk.{layer}.attn_{name}.weight"] for name in ("q", "k", "v", "output"))
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        heads = rotate(F.linear(x, q).view(n, self.n_kv * self.n_group, -1), cos, sin)
        keys, values = self.cells[:, layer]
        keys[seqs, :, positions] = rotate(F.linear(x, k).view(n, self.n_kv, -1), cos, sin)
        values[seqs, :, positions] = F.linear(x, v).view(n, self.n_kv, -1)
        end = int(positions.max()) + 1
        sees = torch.arange(end)[None] <= positions[:, None]  # (n, end)
        if len(set(seqs.tolist())) == 1:  # rows of one sequence: they are the queries of one product
            heads, cells = heads.view(1, n, self.n_kv, self.n_group, -1), slice(int(seqs[0]), int(seqs[0]) + 1)
            mask = sees.repeat_interleave(self.n_group, 0)[None, None]
        else:  # of all slots, also of those without a row: copies of cells would cost more
            n_slots = len(keys)
            of_all = heads.new_zeros(n_slots, *heads.shape[1:]).index_copy(0, seqs, heads)
            heads, cells = of_all.view(n_slots, 1, self.n_kv, self.n_group, -1), slice(n_slots)
            mask = sees.new_ones(n_slots, end).index_copy(0, seqs, sees)[:, None, None]
        heads = heads.permute(0, 2, 1, 3, 4).flatten(2, 3)
        y = F.scaled_dot_product_attention(heads, keys[cells, :, :end], values[cells, :, :end], mask)
        y = y.unflatten(2, (-1, self.n_group)).permute(0, 2, 1, 3, 4).flatten(2)
        return F.linear(y[0] if len(y) == 1 else y[seqs, 0], out)
