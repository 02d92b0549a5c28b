"""The same model decoded by others, for `gpu.py`: a plain llama under `torch.compile` with a cache of fixed size, and
transformers, also with a draft. Greedy, one text. Uses pipeinfer to read the file, nothing of how it computes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.torch.layer import deinterleaved_order
from pipeinfer.models.torch.params import BF16, F32, Hyperparameters, load_torch, read_hyperparameters
from pipeinfer.models.torch.weights import Weights

torch = load_torch()

from torch import nn  # noqa: E402
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu  # noqa: E402

N_PROMPT, N_WARM_UP = 16, 8
HF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def prompt(n_vocab: int) -> list[int]:
    found: list[int] = np.random.default_rng(2).integers(3, n_vocab, N_PROMPT).tolist()
    return found


# -- a plain llama


class PlainLlama(nn.Module):
    """A token and its position -> the next token and position, all on the device. Matrices are as in the file, so
    numbers that are rotated together lie side by side."""

    def __init__(self, path: Path, device: str, dtype: str, n_cells: int) -> None:
        super().__init__()
        info = read_model_info(path)
        self.numbers = numbers = read_hyperparameters(info)
        kind = torch.float32 if dtype == F32 else torch.bfloat16
        with closing(Weights(open_slice(info, 0, info.n_layer), dtype, torch.device(device), 4)) as weights:
            for name in weights.tensors:
                loaded = weights.vector(name).to(kind) if "norm" in name else weights.matrix(name)
                self.register_buffer(name.replace(".", "_"), loaded)
        self.n_layer, self.head = info.n_layer, "token_embd_weight" if info.tied else "output_weight"
        for layer in range(info.n_layer):
            for part in "kv":
                shape = (1, numbers.n_head_kv, n_cells, numbers.head_dim)
                self.register_buffer(f"cache_{part}_{layer}", torch.zeros(shape, dtype=kind, device=device))
        angles = torch.outer(torch.arange(n_cells), frequencies(numbers))
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()], -1).to(device))
        self.register_buffer("seen", torch.ones((n_cells, n_cells), dtype=torch.bool, device=device).tril())

    def forward(self, token: Any, position: Any) -> tuple[Any, Any]:
        numbers = self.numbers
        rows, seen = self.token_embd_weight[token], self.seen[position][None, None]
        for layer in range(self.n_layer):
            own = {name: getattr(self, f"blk_{layer}_{name}_weight") for name in HF_NAMES}
            normed = rms_norm(rows, rows.shape[-1:], own["attn_norm"], numbers.epsilon)
            queries, keys, values = (
                linear(normed, own[f"attn_{part}"]).view(1, -1, 1, numbers.head_dim) for part in "qkv"
            )
            kept_keys, kept_values = getattr(self, f"cache_k_{layer}"), getattr(self, f"cache_v_{layer}")
            kept_keys.index_copy_(2, position, self.turned(keys, position))
            kept_values.index_copy_(2, position, values)
            attended = scaled_dot_product_attention(
                self.turned(queries, position), kept_keys, kept_values, attn_mask=seen, enable_gqa=True
            )
            rows = rows + linear(attended.reshape(1, -1), own["attn_output"])
            normed = rms_norm(rows, rows.shape[-1:], own["ffn_norm"], numbers.epsilon)
            gated = silu(linear(normed, own["ffn_gate"])) * linear(normed, own["ffn_up"])
            rows = rows + linear(gated, own["ffn_down"])
        normed = rms_norm(rows, rows.shape[-1:], self.output_norm_weight, numbers.epsilon)
        return linear(normed, getattr(self, self.head)).argmax(-1), position + 1

    def turned(self, heads: Any, position: Any) -> Any:
        cos, sin = self.turns[position].unbind(-1)
        first, second = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
        return turned.flatten(-2).to(heads.dtype)


def frequencies(numbers: Hyperparameters) -> Any:
    return numbers.rope_scale * numbers.rope_base ** (-2.0 * torch.arange(numbers.n_rot // 2) / numbers.n_rot)


def compiled(
    path: Path, device: str, n_tokens: int, wait: Callable[[], None], compiler: str
) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Seconds a token, and the tokens. The host waits once, behind the last."""
    model = PlainLlama(path, device, F32 if device == "cpu" else BF16, 64 * math.ceil((N_PROMPT + n_tokens + 64) / 64))
    mode = {"mode": "reduce-overhead"} if device != "cpu" and compiler == "inductor" else {}
    start_s, step = time.perf_counter(), torch.compile(model, backend=compiler, fullgraph=True, dynamic=False, **mode)

    @torch.inference_mode()
    def decode(n: int) -> tuple[list[int], float]:
        found, position = [], torch.zeros(1, dtype=torch.int64, device=device)
        for token in prompt(read_model_info(path).n_vocab):
            following, position = (each.clone() for each in step(torch.tensor([token], device=device), position))
        wait()
        start_s = time.perf_counter()
        for _ in range(n):
            found.append(following)
            following, position = (each.clone() for each in step(following, position))
        wait()
        return [int(token) for token in found], (time.perf_counter() - start_s) / n

    decode(N_WARM_UP)
    compile_s = time.perf_counter() - start_s
    tokens, tpot_s = decode(n_tokens)
    yield {"what": "torch.compile", "compiler": compiler, "tpot_s": tpot_s, "compile_s": compile_s}, tokens


# -- transformers


def transformers_figures(
    path: Path, draft: Path, device: str, n_tokens: int, wait: Callable[[], None]
) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Seconds a token alone, and with a draft (assisted generation), and the tokens."""
    if not find_spec("transformers"):
        yield {"what": "transformers", "why": "not installed here"}, []
        return
    import transformers

    target, assistant = (transformers_model(each, device) for each in (path, draft))
    ids = torch.tensor([prompt(target.config.vocab_size)], device=device)
    for what, more in (("transformers", {}), ("transformers, assisted", {"assistant_model": assistant})):
        common = {
            "do_sample": False,
            "attention_mask": torch.ones_like(ids),
            "pad_token_id": 0,
            "eos_token_id": None,
            **more,
        }
        with torch.inference_mode():
            target.generate(ids, max_new_tokens=N_WARM_UP, **common)
            times = []
            for n in (1, n_tokens):  # what a prompt takes is taken off
                wait()
                start_s = time.perf_counter()
                text = target.generate(ids, max_new_tokens=n, **common)[0, N_PROMPT:].tolist()
                wait()
                times.append(time.perf_counter() - start_s)
        tpot_s = (times[1] - times[0]) / max(1, len(text) - 1)
        yield {"what": what, "version": transformers.__version__, "tpot_s": tpot_s}, text


def transformers_model(path: Path, device: str) -> Any:
    """Its llama with the weights of a file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    info = read_model_info(path)
    numbers, dtype = read_hyperparameters(info), F32 if device == "cpu" else BF16
    wide = info.tensor("blk.0.ffn_up.weight")
    assert wide is not None
    config = LlamaConfig(
        vocab_size=info.n_vocab,
        hidden_size=info.n_embd,
        intermediate_size=wide.shape[1],
        num_hidden_layers=info.n_layer,
        num_attention_heads=numbers.n_head,
        num_key_value_heads=numbers.n_head_kv,
        head_dim=numbers.head_dim,
        rms_norm_eps=numbers.epsilon,
        tie_word_embeddings=info.tied,
        rope_parameters={"rope_type": "default", "rope_theta": numbers.rope_base},
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {}
    with closing(Weights(open_slice(info, 0, info.n_layer), dtype, torch.device(device), 4)) as weights:
        for name in weights.tensors:
            loaded: Any = weights.vector(name) if "norm" in name else weights.matrix(name, order=order_of(numbers))
            state[transformers_name(name)] = loaded.to(torch.float32 if dtype == F32 else torch.bfloat16)
    model.load_state_dict(state, strict=not info.tied, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)  # it has no weights
    return model.eval()


def order_of(numbers: Hyperparameters) -> Callable[[str], Any]:
    """Of the rows of queries and keys: there the numbers that are rotated together lie half a head apart."""
    heads = {"attn_q": numbers.n_head, "attn_k": numbers.n_head_kv}

    def order(name: str) -> Any:
        part = name.split(".")[-2]
        return deinterleaved_order(heads[part], numbers.head_dim, numbers.n_rot) if part in heads else None

    return order


def transformers_name(name: str) -> str:
    *layer, part, kind = name.split(".")
    if layer:
        return f"model.layers.{layer[1]}.{HF_NAMES[part]}.{kind}"
    return {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}[part] + f".{kind}"
