"""A small llama-architecture transformer in torch, and its GGUF export.

Knows tensors and GGUF names; knows no corpus, no schedule. Only scripts that train use it, so torch stays an extra.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.gguf_file import add_shape, add_weight, finish

ROPE_BASE = 10_000.0
NORM_EPS = 1e-5


@dataclass(frozen=True)
class NetConfig:
    """Shape of one model; `n_params` counts the tied embedding once."""

    n_vocab: int
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_ctx_train: int = 1024

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def n_params(self) -> int:
        attention = 2 * self.n_embd * (self.n_embd + self.n_head_kv * self.head_dim)
        return self.n_vocab * self.n_embd + self.n_layer * (attention + 3 * self.n_embd * self.n_ff)


def rope_tables(n_pos: int, head_dim: int, base: float = ROPE_BASE) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (n_pos, head_dim / 2)."""
    freq = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.arange(n_pos).float()[:, None] * freq
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding over *adjacent* pairs, llama.cpp's order for this architecture. x: (B, H, T, D)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Block(nn.Module):
    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        d, kv = config.n_embd, config.n_head_kv * config.head_dim
        self.attn_norm = nn.RMSNorm(d, eps=NORM_EPS)
        self.attn_q = nn.Linear(d, d, bias=False)
        self.attn_k = nn.Linear(d, kv, bias=False)
        self.attn_v = nn.Linear(d, kv, bias=False)
        self.attn_output = nn.Linear(d, d, bias=False)
        self.ffn_norm = nn.RMSNorm(d, eps=NORM_EPS)
        self.ffn_gate = nn.Linear(d, config.n_ff, bias=False)
        self.ffn_up = nn.Linear(d, config.n_ff, bias=False)
        self.ffn_down = nn.Linear(config.n_ff, d, bias=False)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n_batch, n_pos, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(n_batch, n_pos, -1, self.config.head_dim).transpose(1, 2)

        q = rotate(heads(self.attn_q(x)), cos, sin)
        k = rotate(heads(self.attn_k(x)), cos, sin)
        y = F.scaled_dot_product_attention(q, k, heads(self.attn_v(x)), is_causal=True, enable_gqa=True)
        return self.attn_output(y.transpose(1, 2).reshape(n_batch, n_pos, -1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attn_norm(x), cos, sin)
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Net(nn.Module):
    """Token ids (B, T) -> logits (B, T, n_vocab); input and output embeddings are tied."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.n_vocab, config.n_embd)
        self.blk = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.output_norm = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                depth_scale = (
                    (2 * config.n_layer) ** -0.5 if name.endswith(("attn_output.weight", "ffn_down.weight")) else 1
                )
                nn.init.normal_(weight, std=depth_scale * weight.shape[-1] ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = rope_tables(tokens.shape[1], self.config.head_dim)
        # the embedding rows have norm 1 so that they serve as output rows too; the residual wants unit variance
        x = self.token_embd(tokens) * self.config.n_embd**0.5
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for block in self.blk:
            x = block(x, cos, sin)
        return F.linear(self.output_norm(x), self.token_embd.weight)

    @torch.no_grad()
    def export_weights(self) -> dict[str, Tensor]:
        """llama.cpp tensor name -> weight, with the input scale folded so that plain llama computes the same.

        The embedding is stored scaled by sqrt(n_embd); the tied output head is scaled back through the final norm.
        """
        scale = self.config.n_embd**0.5
        weights = {name: weight.detach().float() for name, weight in self.named_parameters()}
        weights["token_embd.weight"] = weights["token_embd.weight"] * scale
        weights["output_norm.weight"] = weights["output_norm.weight"] / scale
        return weights


def export_gguf(net: Net, path: Path, name: str, add_tokenizer: object) -> None:
    """Write `net` as a Q8_0 GGUF (norms in F32). `add_tokenizer(writer)` adds the tokenizer's keys."""
    config = net.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_license("PSF-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    add_shape(
        writer,
        n_vocab=config.n_vocab,
        n_ctx=config.n_ctx_train,
        n_embd=config.n_embd,
        n_layer=config.n_layer,
        n_ff=config.n_ff,
        n_head=config.n_head,
        n_head_kv=config.n_head_kv,
        rope_base=ROPE_BASE,
        norm_eps=NORM_EPS,
    )
    add_tokenizer(writer)  # type: ignore[operator]
    for tensor, weight in net.export_weights().items():
        add_weight(writer, tensor, weight.numpy(), "Q8_0")
    finish(writer)


def save_net(net: Net, path: Path) -> None:
    torch.save({"config": asdict(net.config), "state": net.state_dict()}, path)


def load_net(path: Path) -> Net:
    saved = torch.load(path, weights_only=True)
    net = Net(NetConfig(**saved["config"]))
    net.load_state_dict(saved["state"])
    return net
