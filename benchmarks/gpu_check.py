"""Are layers on a device those on the CPU? Small random models of each family, compared row by row. Takes no times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from pipeinfer.core.interfaces import Batch, StageModel
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf.layers import F16_CACHE, CacheTypes
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.device_proof import prove
from pipeinfer.models.llama.ggml import has_gpu
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.rpc import connect
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.llama.token_table import dequantise
from pipeinfer.models.torch.params import TorchParams, load_torch
from tests.support.gguf_factory import Shape, write_model

SHAPES = {
    "llama": Shape(rope_factors=True),
    "qwen2": Shape("qwen2"),
    "qwen3": Shape("qwen3"),
    "qwen3moe": Shape("qwen3moe", n_expert=4),
}
ALLOWED = {"f32": 2e-3, "bf16": 2e-2, "int8": 2e-2, "int4": 4e-2, "libllama": 2e-2, "again": 1e-3, "transformers": 1e-4}
"""Of the median row's difference. libllama's caches are in float16; of rows that are undecided between two experts one
may get another."""

N_PROMPT = 40
TYPES = ("F32", "F16", "Q8_0", "Q4_K_M")


def check_devices(folder: Path, device: str, quick: bool) -> Iterator[dict[str, Any]]:
    """A finding a comparison: `right` where the difference is allowed. `quick`: of two families."""
    load_torch()
    for name, shape in list(SHAPES.items())[:: 3 if quick else 1]:
        path = write_model(folder / f"check-{name}.gguf", replace(shape, n_layer=2), "F32")
        expected = logits_of(open_llama(path, 0))
        for dtype in ("f32", "bf16"):
            stage = open_torch(path, device, dtype)
            yield finding(f"{name}, torch {dtype} on {device}", dtype, logits_of(stage), expected)
            stage.clear()  # type: ignore[attr-defined]
            yield finding(
                f"{name}, torch {dtype} again", "again", logits_of(stage), logits_of(open_torch(path, device, dtype))
            )
        for dtype in ("f32", "bf16", "int8"):
            yield exact_finding(f"{name}, torch {dtype}, exact on {device}", path, device, dtype)
        if device != "cpu":
            for exact in (False, True):
                yield waiting_finding(f"{name}, torch bf16{', exact' * exact}: recorded, without waiting", path, exact)
        for dtype in ("int8", "int4"):
            found, there = (logits_of(open_torch(path, where, dtype)) for where in (device, "cpu"))
            yield finding(f"{name}, torch {dtype} on {device} and on the CPU", dtype, found, there)
        packed = write_model(folder / f"check-{name}-Q4_K_M.gguf", replace(shape, n_layer=2), "Q4_K_M")
        found, there = (logits_of(open_torch(packed, where, "f32")) for where in (device, "cpu"))
        yield finding(f"{name}, Q4_K_M, torch f32 on {device} and on the CPU", "f32", found, there)
        if device != "cpu" and has_gpu():
            yield finding(f"{name}, libllama on its GPU", "libllama", logits_of(open_llama(path, -1)), expected)
    if find_spec("transformers"):
        path = write_model(folder / "check-transformers.gguf", Shape("qwen2", n_layer=2), "F32")
        tokens = tokens_of(N_PROMPT)
        found = logits_of(open_torch(path, device, "f32"), only_prompt=True)
        yield finding("qwen2, torch f32 and transformers", "transformers", found, transformers_logits(path, tokens))


def check_llama(folder: Path, device: str, servers: Sequence[str], quick: bool) -> list[dict[str, Any]]:
    """The same of libllama's device of this name, an RPC server's among them; and how many rows it may compute at once,
    each with the bits that it has alone. `same_as_cpu`: and that a CPU gives it. `quick`: of one family."""
    connect(servers)
    found = []
    for (name, shape), type_name in product(list(SHAPES.items())[: 1 if quick else None], TYPES):
        path = write_model(folder / f"check-{name}-{type_name}.gguf", replace(shape, n_layer=2), type_name)
        there, here = (logits_of(open_llama(path, *where)) for where in ((-1, (device,)), (0, ())))
        found.append(finding(f"{name} {type_name}, libllama on {device} and on the CPU", "libllama", there, here))
        for types in (F16_CACHE, CacheTypes("bf16", "f16")) if device.startswith("RPC") else (F16_CACHE,):
            params = LlamaParams(0, cache=types)
            proofs = [
                prove(read_model_info(path), replace(params, n_gpu_layers=n, devices=where))
                for n, where in ((-1, (device,)), (0, ()))
            ]
            what = f"{name} {type_name}, keys {types.k}, values {types.v}, exact on {device}"
            found.append(
                {"what": what, "rows_at_once": proofs[0].n_rows, "same_as_cpu": proofs[0].digest == proofs[1].digest}
            )
    return found


def finding(what: str, kind: str, found: FloatArray, expected: FloatArray) -> dict[str, Any]:
    rows = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    median, worst = float(np.median(rows)), float(rows.max())
    return {"what": what, "median": median, "worst": worst, "allowed": ALLOWED[kind], "right": median < ALLOWED[kind]}


def waiting_finding(what: str, path: Path, exact: bool) -> dict[str, Any]:
    """On a GPU: whether runs of few rows were recorded, and whether the host is left alone while any run is begun."""
    torch, stage = load_torch(), open_torch(path, "cuda", "bf16", exact)
    logits_of(stage)  # what is met for the first time is recorded, which waits
    frames = list(stage._replays._frames.values()) if stage._replays else []  # type: ignore[attr-defined]
    n_recorded = sum(frame._graph is not None for frame in frames)
    stage.clear()  # type: ignore[attr-defined]
    why, at = "", 0
    for n in (N_PROMPT, 1, 1, 5):
        batch = Batch(
            np.arange(n, dtype=np.int32) + 5,
            np.arange(at, at + n, dtype=np.int32),
            [(0,)] * n,
            None,
            np.ones(n, np.bool_),
        )
        torch.cuda.set_sync_debug_mode("error")
        try:
            begun = stage.begin(batch, lambda: False)  # type: ignore[attr-defined]
        except RuntimeError as error:
            why, begun = f"{n} rows: {error}"[:300], None
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if begun is None:
            break
        begun.result()
        at += n
    return {
        "what": what,
        "frames": len(frames),
        "recorded": n_recorded,
        "why": why,
        "right": 0 < n_recorded == len(frames) and not why,
    }


def exact_finding(what: str, path: Path, device: str, dtype: str) -> dict[str, Any]:
    """Whether rows have the same bits in runs of several as in runs of one."""
    tokens, rows = tokens_of(N_PROMPT), (1, 2, 3, 5, 8, 21)
    alone, together = (open_torch(path, device, dtype, exact=True) for _ in range(2))
    one = np.concatenate([evaluate(alone, [token], [at], [(0,)]) for at, token in enumerate(tokens)])
    firsts = np.cumsum((0, *rows)).tolist()
    many = np.concatenate(
        [
            evaluate(together, tokens[first:end], range(first, end), [(0,)] * (end - first))
            for first, end in pairwise(firsts)
        ]
    )
    n_other = int(np.any(one != many, axis=1).sum())
    return {"what": what, "rows": len(one), "rows_that_differ": n_other, "right": n_other == 0}


def open_torch(path: Path, device: str, dtype: str, exact: bool = False) -> StageModel:
    """Exact as on a GPU, also on the CPU."""
    from pipeinfer.models.torch.stage import TorchStage

    info = read_model_info(path)
    params = TorchParams(512, 8, 64, 64, 1, device, dtype, exact=exact, padded=exact)
    return TorchStage(open_slice(info, 0, info.n_layer), params)


def open_llama(path: Path, n_gpu_layers: int, devices: tuple[str, ...] | None = None) -> StageModel:
    info = read_model_info(path)
    params = LlamaParams(512, 8, 64, 64, n_gpu_layers=n_gpu_layers, exact=False, devices=devices)
    return LlamaStage(open_slice(info, 0, info.n_layer), params)


def tokens_of(n: int) -> list[int]:
    found: list[int] = np.random.default_rng(1).integers(3, 300, n).tolist()
    return found


def logits_of(stage: StageModel, only_prompt: bool = False) -> FloatArray:
    """After every row of a prompt, of single rows, and of a tree with two branches, one of them taken back and grown
    again."""
    tokens = tokens_of(N_PROMPT + 8)
    found = [evaluate(stage, tokens[:N_PROMPT], range(N_PROMPT), [(0,)] * N_PROMPT)]
    if only_prompt:
        return found[0]
    for at in range(N_PROMPT, N_PROMPT + 4):
        found.append(evaluate(stage, [tokens[at]], [at], [(0,)]))
    at = N_PROMPT + 4
    for _ in range(2):
        stage.apply([KvOp(OpKind.COPY, 0, 1, 0, at)])
        seqs = [(0, 1), (0,), (1,), (0,), (1,)]
        found.append(evaluate(stage, [7, 8, 9, 10, 11], [at, at + 1, at + 1, at + 2, at + 2], seqs))
        stage.apply([KvOp(OpKind.REMOVE, 0, first=at), KvOp(OpKind.REMOVE, 1)])
    return np.concatenate(found)


def evaluate(
    stage: StageModel, tokens: Sequence[int], positions: Sequence[int], seqs: Sequence[tuple[int, ...]]
) -> FloatArray:
    n = len(tokens)
    batch = Batch(np.array(tokens, np.int32), np.array(positions, np.int32), list(seqs), None, np.ones(n, np.bool_))
    logits = stage.evaluate(batch, lambda: False)
    assert logits is not None
    return logits.copy()


def transformers_logits(path: Path, tokens: Sequence[int]) -> FloatArray:
    """What transformers' model of the same weights says after each token."""
    torch = load_torch()
    from transformers import Qwen2Config, Qwen2ForCausalLM

    info = read_model_info(path)
    numbers = {key.partition(".")[2]: value.value for key, value in info.metadata.items() if key.startswith("qwen2.")}
    config = Qwen2Config(
        vocab_size=info.n_vocab,
        hidden_size=info.n_embd,
        intermediate_size=numbers["feed_forward_length"],
        num_hidden_layers=info.n_layer,
        num_attention_heads=numbers["attention.head_count"],
        num_key_value_heads=numbers["attention.head_count_kv"],
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).eval()
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
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
    state, bias = {}, torch.zeros(info.n_vocab)
    for tensor in info.tensors:
        *layer, name, kind = tensor.name.split(".")
        with open(tensor.path, "rb") as file:
            file.seek(tensor.offset)
            numbers_read = dequantise(tensor.type, file.read(tensor.n_bytes), tensor.n_elements)
        data = torch.from_numpy(numbers_read.copy()).view(tuple(reversed(tensor.shape)))
        if tensor.name == "output.bias":
            bias = data
        else:
            state[".".join((["model.layers", layer[1]] if layer else []) + [names[name], kind])] = data
    model.load_state_dict(state)
    with torch.inference_mode():
        found: FloatArray = (model(torch.tensor([list(tokens)])).logits[0] + bias).numpy()
    return found
