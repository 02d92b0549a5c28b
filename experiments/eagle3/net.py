"""An EAGLE-3 head in torch, as llama.cpp's `eagle3` computes it, over whole texts at once.

Knows tensors; knows no data and no schedule. At position P the head reads the token at P + 1 and a feature of P: fused
from the target's, which is *true*, or the head's own of P - 1. It guesses the token at P + 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.demo_net import rope_tables, rotate


@dataclass(frozen=True)
class HeadConfig:
    """`layers`: the target's, whose inputs are the features. `blind`: features are not read, as in a plain draft of
    the same cost."""

    layers: tuple[int, int, int]
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_guessed: int
    rope_base: float
    norm_eps: float
    blind: bool = False

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


class Head(nn.Module):
    """Parameters have llama.cpp's names. `token_embd` (n_vocab, n_embd) is the target's and is not trained; `guessed`
    (n_guessed,) are the tokens that the head can guess, in the order of its logits."""

    def __init__(self, config: HeadConfig, token_embd: Tensor, guessed: Tensor) -> None:
        super().__init__()
        self.config = c = config
        self.register_buffer("token_embd", token_embd, persistent=False)
        self.register_buffer("guessed", guessed)
        d, kv = c.n_embd, c.n_head_kv * c.head_dim
        self.enc_norm = nn.RMSNorm(3 * d, eps=c.norm_eps)
        self.fc = nn.Linear(3 * d, d, bias=False)
        self.attn_norm, self.attn_norm_2 = nn.RMSNorm(d, eps=c.norm_eps), nn.RMSNorm(d, eps=c.norm_eps)
        self.attn_q, self.attn_output = nn.Linear(2 * d, d, bias=False), nn.Linear(d, d, bias=False)
        self.attn_k, self.attn_v = nn.Linear(2 * d, kv, bias=False), nn.Linear(2 * d, kv, bias=False)
        self.ffn_norm = nn.RMSNorm(d, eps=c.norm_eps)
        self.ffn_gate, self.ffn_up = nn.Linear(d, c.n_ff, bias=False), nn.Linear(d, c.n_ff, bias=False)
        self.ffn_down = nn.Linear(c.n_ff, d, bias=False)
        self.output_norm = nn.RMSNorm(d, eps=c.norm_eps)
        self.output = nn.Linear(d, c.n_guessed, bias=False)

    def fuse(self, features: Tensor) -> Tensor:
        """Of (…, 3, n_embd) the true feature (…, n_embd)."""
        fused = self.fc(self.enc_norm(features.flatten(-2)))
        return torch.zeros_like(fused) if self.config.blind else fused

    def unroll(self, tokens: Tensor, features: Tensor, n_steps: int) -> Iterator[Tensor]:
        """The head's states (B, T, n_embd) after 0, 1, … own features, T = n - 1 positions of tokens (B, n) and
        features (B, n, 3, n_embd). After k, the first k positions mean nothing.

        A row with k own features sees the cells that a pipeline holds then: from true features up to k positions
        before it, then those that were made on the way.
        """
        n_pos = tokens.shape[1] - 1
        cos, sin = rope_tables(n_pos, self.config.head_dim, self.config.rope_base)
        embedding = self.attn_norm(F.embedding(tokens[:, 1:], self.token_embd))
        feature = self.fuse(features[:, :-1])
        at = torch.arange(n_pos)
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(n_steps):
            x = torch.cat((embedding, self.attn_norm_2(feature)), -1)
            q, k, v = self._heads(self.attn_q(x)), self._heads(self.attn_k(x)), self._heads(self.attn_v(x))
            q, k = rotate(q, cos, sin) * self.config.head_dim**-0.5, rotate(k, cos, sin)
            k, v = (each.repeat_interleave(self.config.n_head // self.config.n_head_kv, 1) for each in (k, v))
            own.append((k, v))
            seen = at[None] + step <= at[:, None]
            state = self._finish(feature, self._attend(q, own, seen))
            yield state
            feature = _shifted(state, 1, dim=1)

    def logits(self, states: Tensor) -> Tensor:
        """(…, n_guessed)."""
        return self.output(self.output_norm(states))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    @staticmethod
    def _attend(q: Tensor, own: list[tuple[Tensor, Tensor]], seen: Tensor) -> Tensor:
        """`own`: keys and values of each step, the first of true features; `seen`: which of those."""
        (keys, values), *later = own
        if not later:
            return F.scaled_dot_product_attention(q, keys, values, seen, scale=1.0)
        scores = (q @ keys.mT).masked_fill(~seen, -torch.inf)
        shifted = [(_shifted(k, back), _shifted(v, back)) for back, (k, v) in enumerate(reversed(later))]
        near = torch.stack([(q * k).sum(-1) for k, _ in shifted], -1)
        weights = torch.cat((scores, near), -1).softmax(-1)
        n = keys.shape[2]
        found = weights[..., :n] @ values
        for index, (_, v) in enumerate(shifted):
            found = found + weights[..., n + index, None] * v
        return found

    def _finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        x = residual + self.attn_output(attended.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


def _shifted(x: Tensor, n: int, dim: int = 2) -> Tensor:
    """Row i is what row i - n was; the first n rows mean nothing."""
    return x.roll(n, dim) if n else x


def save_head(head: Head, path: Path, **more: object) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    torch.save({"config": asdict(head.config), "state": head.state_dict(), **more}, part)
    part.rename(path)


def load_head(path: Path, token_embd: Tensor) -> tuple[Head, dict[str, Any]]:
    """The head, and all that was saved."""
    saved = torch.load(path, weights_only=True)
    config = HeadConfig(**{**saved["config"], "layers": tuple(saved["config"]["layers"])})
    head = Head(config, token_embd, saved["state"]["guessed"])
    head.load_state_dict(saved["state"])
    return head, saved
