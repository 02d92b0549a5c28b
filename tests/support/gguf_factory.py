"""Small GGUF models with random weights, for tests and benchmarks. Deterministic by seed; no network, no training."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from pipeinfer.models.llama import ggml

UNKNOWN, CONTROL, NORMAL, BYTE, UNUSED = 2, 3, 1, 6, 5
PLAIN_TYPES = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
}
MEASURED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")  # their makers want an importance matrix
FILE_TYPES = {**dict(zip(MEASURED, MEASURED, strict=True)), "NVFP4": "NVFP4", "MXFP4": "MXFP4_MOE"}
WORDS = ["▁the", "▁a", "▁of", "▁and", "▁to", "▁in", "▁is", "▁model", "▁token", "▁layer", "▁rank", "▁th"]
WORDS += ["th", "he", "in", "er", "an", "ing"]
MARKERS = ["<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>", "<|end|>"]
"""Control tokens at the end of the vocabulary of a model with a chat template; the last of them ends a turn."""

FILL_IN = ("pre", "suf", "mid")
"""The first markers also stand around what a text has before a hole in it, after it, and instead of it."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """A model's dimensions. `peaky` scales the output head: the larger, the surer is the model of its choice.

    Layers from `n_strong` on add only `weak` times as much to the residual: a model of the first layers alone, of the
    same seed, is then a draft whose acceptance falls with `weak`.
    """

    arch: str = "llama"
    n_layer: int = 4
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 512
    n_vocab: int = 320
    n_expert: int = 0
    tied: bool = False
    rope_factors: bool = False
    n_ctx_short: int = 8192  # tokens for which phi3's short factors are made
    rope_long: float = 1.0  # the mean of its long ones
    peaky: float = 6.0
    n_strong: int = 1000
    weak: float = 0.0
    seed: int = 0
    head_length: int = 0  # 0: as long as the heads fill a row

    @property
    def head_dim(self) -> int:
        return self.head_length or self.n_embd // self.n_head


def write_model(
    path: Path,
    shape: Shape | None = None,
    type_name: str = "Q8_0",
    with_vocab: bool = True,
    part_tensors: int = 0,
    template: str = "",
) -> Path:
    """A model file in one of PLAIN_TYPES, or, through libllama's quantiser, in Q4_K_M, Q6_K or Q3_K_M.

    part_tensors > 0 splits the file: the first part is `path` with `-00001-of-0000N` in its name. `template`: of chats,
    in Jinja; the vocabulary then ends with MARKERS.
    """
    shape = shape or Shape()
    if type_name in PLAIN_TYPES:
        writer = gguf.GGUFWriter(path, shape.arch, split_max_tensors=part_tensors)
        _write(writer, shape, PLAIN_TYPES[type_name], type_name, with_vocab, template)
        return path
    plain = path.with_suffix(".f32")
    _write(gguf.GGUFWriter(plain, shape.arch), shape, PLAIN_TYPES["F32"], "F32", with_vocab, template)
    quantise(plain, path, type_name)
    plain.unlink()
    return path


def quantise(source: Path, path: Path, type_name: str) -> None:
    """A model in float32 in another type: its weights, or for FILE_TYPES random ones."""
    if type_name in FILE_TYPES:
        _write_blocks(source, path, type_name)
        return
    lib = ggml.load_library()
    options = lib.llama_model_quantize_default_params()
    options.ftype = gguf.LlamaFileType["ALL_F32" if type_name == "F32" else f"MOSTLY_{type_name}"].value
    options.nthread, options.allow_requantize = 2, True
    code = lib.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(options))
    assert code == 0, ggml.last_errors()


def _write_blocks(source: Path, path: Path, type_name: str) -> None:
    """The model in float32 at `source`, layers' matrices as random blocks of one of FILE_TYPES: any bits are numbers of
    it, and scales are what keeps them in bounds."""
    kind = gguf.GGMLQuantizationType[type_name]
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng, reader = np.random.default_rng(0), gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    file_type = gguf.LlamaFileType[f"MOSTLY_{FILE_TYPES[type_name]}"].value
    for name, known in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = file_type if name == "general.file_type" else known.contents()
        writer.add_key_value(name, value, *known.types[:2])
    for tensor in reader.tensors:
        data = np.asarray(tensor.data)
        if not tensor.name.startswith("blk.") or data.ndim < 2 or tensor.name.endswith("gate_inp.weight"):
            writer.add_tensor(tensor.name, data)
            continue
        blocks = rng.integers(0, 256, (data.size // n_values, n_bytes), np.uint8)
        wanted = 1 / np.sqrt(data.shape[-1])
        _set_scales(blocks, type_name, wanted)
        found = gguf.quants.dequantize(blocks.reshape(-1, n_bytes), kind).std()
        _set_scales(blocks, type_name, wanted * wanted / found)
        writer.add_tensor(tensor.name, blocks.reshape(*data.shape[:-1], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _set_scales(blocks: np.typing.NDArray[np.uint8], type_name: str, scale: float) -> None:
    if type_name == "MXFP4":  # a power of two
        blocks[:, 0] = 127 + round(np.log2(scale))
    elif type_name == "NVFP4":  # four of 8 bits each, 4 of them the exponent
        blocks[:, :4] = (max(0, 7 + round(np.log2(scale))) << 3) | (blocks[:, :4] & 7)
    else:
        half = int(np.float16(scale).view(np.uint16))
        if type_name == "IQ1_M":  # four bits at the end of each of the last four numbers
            last = blocks[:, -8:].copy().view("<u2") & 0x0FFF
            blocks[:, -8:] = (last | [(half >> 4 * part & 15) << 12 for part in range(4)]).astype("<u2").view(np.uint8)
        else:
            blocks[:, :2] = half & 255, half >> 8


def vocabulary(n_vocab: int) -> tuple[list[bytes], list[float], list[int]]:
    """A SentencePiece vocabulary: unk, bos, eos, all bytes, letters, a few words, then unused fillers."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, NORMAL]
    normal = [*"abcdefghijklmnopqrstuvwxyz", *WORDS]
    normal = normal[: n_vocab - len(tokens)]
    tokens += normal
    types += [NORMAL] * len(normal)
    fillers = [f"[PAD{i}]" for i in range(len(tokens), n_vocab)]
    tokens += fillers
    types += [UNUSED] * len(fillers)
    scores = [-1000.0 if kind != NORMAL else -1.0 * i / 100 for i, kind in enumerate(types)]
    return [token.encode() for token in tokens], scores, types


def _write(
    writer: gguf.GGUFWriter,
    shape: Shape,
    kind: gguf.GGMLQuantizationType,
    type_name: str,
    with_vocab: bool,
    template: str,
) -> None:
    rng = np.random.default_rng(shape.seed)
    _add_metadata(writer, shape, type_name, with_vocab, bool(template))
    if template:
        writer.add_chat_template(template)

    def matrix(name: str, *dims: int, scale: float = 1.0) -> None:
        data = rng.standard_normal(dims, np.float32) * np.float32(scale / np.sqrt(dims[-1]))
        if kind == gguf.GGMLQuantizationType.F32 or name.endswith("gate_inp.weight"):
            writer.add_tensor(name, data)
        elif kind == gguf.GGMLQuantizationType.F16:
            writer.add_tensor(name, data.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)

    def vector(name: str, n: int, around: float = 1.0) -> None:
        writer.add_tensor(name, (around + 0.1 * rng.standard_normal(n)).astype(np.float32))

    matrix("token_embd.weight", shape.n_vocab, shape.n_embd, scale=shape.peaky if shape.tied else 8.0)
    vector("output_norm.weight", shape.n_embd)
    if shape.arch == "falcon":
        vector("output_norm.bias", shape.n_embd, 0.0)
    if shape.rope_factors:
        for name in ("rope_factors_long", "rope_factors_short") if shape.arch == "phi3" else ("rope_freqs",):
            vector(f"{name}.weight", shape.head_dim // 2, shape.rope_long if name == "rope_factors_long" else 1.0)
    if shape.arch == "qwen2":
        vector("output.bias", shape.n_vocab, 0.0)
    if not shape.tied:
        matrix("output.weight", shape.n_vocab, shape.n_embd, scale=shape.peaky)
    for layer in range(shape.n_layer):
        strength = 1.0 if layer < shape.n_strong else shape.weak

        def scaled(name: str, *dims: int, strength: float = strength) -> None:
            adds = "attn_output" in name or "ffn_down" in name
            matrix(name, *dims, scale=strength if adds else 1.0)

        _add_layer(f"blk.{layer}.", shape, scaled, vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_layer(at: str, shape: Shape, matrix: Callable[..., None], vector: Callable[..., None]) -> None:
    embd, ff = shape.n_embd, shape.n_ff
    heads, kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    vector(at + "attn_norm.weight", embd)
    if shape.arch in ("falcon", "phi3"):
        matrix(at + "attn_qkv.weight", heads + 2 * kv, embd)
    else:
        for name, n in (("q", heads), ("k", kv), ("v", kv)):
            matrix(f"{at}attn_{name}.weight", n, embd)
            if shape.arch == "qwen2":
                vector(f"{at}attn_{name}.bias", n, 0.0)
    matrix(at + "attn_output.weight", embd, heads)
    if shape.arch.startswith("qwen3"):
        vector(at + "attn_q_norm.weight", shape.head_dim)
        vector(at + "attn_k_norm.weight", shape.head_dim)
    if shape.arch == "falcon":
        vector(at + "attn_norm.bias", embd, 0.0)
    else:
        vector(at + "ffn_norm.weight", embd)
    if shape.n_expert:
        matrix(at + "ffn_gate_inp.weight", shape.n_expert, embd)
        for name, dims in (("gate", (ff, embd)), ("up", (ff, embd)), ("down", (embd, ff))):
            matrix(f"{at}ffn_{name}_exps.weight", shape.n_expert, *dims)
        return
    if shape.arch not in ("falcon", "phi3"):
        matrix(at + "ffn_gate.weight", ff, embd)
    matrix(at + "ffn_up.weight", 2 * ff if shape.arch == "phi3" else ff, embd)
    matrix(at + "ffn_down.weight", embd, ff)


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape, type_name: str, with_vocab: bool, with_markers: bool) -> None:
    writer.add_name("random weights")  # libllama changes some vocabularies by the name of the model
    names = {"F32": "ALL_F32"}
    writer.add_file_type(gguf.LlamaFileType[names.get(type_name, f"MOSTLY_{type_name}")])
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_rope_dimension_count(shape.head_dim)
    if shape.head_length:
        writer.add_key_length(shape.head_length)
        writer.add_value_length(shape.head_length)
    if shape.arch == "falcon":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
    if shape.arch == "phi3":
        writer.add_rope_scaling_orig_ctx_len(shape.n_ctx_short)
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(shape.n_ff)
    if not with_vocab:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(shape.n_vocab)
    else:
        add_vocabulary(writer, shape.n_vocab, with_markers)


def add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int, with_markers: bool = False) -> None:
    tokens, scores, types = vocabulary(n_vocab)
    if with_markers:
        tokens[-len(MARKERS) :] = [marker.encode() for marker in MARKERS]
        types[-len(MARKERS) :] = [CONTROL] * len(MARKERS)
        writer.add_eot_token_id(n_vocab - 1)
        for at, name in enumerate(FILL_IN):
            writer.add_uint32(f"tokenizer.ggml.fim_{name}_token_id", n_vocab - len(MARKERS) + at)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
