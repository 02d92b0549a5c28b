"""Plain llama-cpp-python, whole model, one process, greedy: what every run must reproduce.

Run as `python -m tests.support.plain_llama [--repacked] MODEL N ID,ID,… [GRAMMAR [ADAPTER:SCALE …]]`; prints the
generated token ids as JSON, of a grammar up to the end of the text.

A row alone: no repacked weights unless that is said, flash attention, K in BF16 and V in F16 (the reverse elsewhere
than on x86). A prompt of more than 64 tokens: all but the last of them in batches of 64, the last one of up to 127,
with K and V in F16; after each K (or V) is rounded to BF16. Where libllama has no flash attention (grok) every row is
computed alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import platform
import struct
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

SILENT = llama_cpp.llama_log_callback(lambda *_: None)  # kept: libllama calls it for as long as it lives
F16, BF16 = 1, 30
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
READING = (F16, F16)  # types of K and V
PAIR, RECORD = struct.Struct("<II"), struct.Struct("<iQ")
MAX_LAYERS = 1024
WITHOUT_FLASH = ("grok",)
FEW = 4  # rows that no kernel for weights as in the file computes otherwise than one
REPACKED = "--repacked"


def greedy(
    path: str,
    prompt: list[int],
    n_predict: int,
    n_threads: int = 2,
    grammar: str = "",
    see: Callable[[Any], object] = lambda logits: None,
    adapters: Sequence[str] = (),
    repacked: bool = False,
) -> list[int]:
    """`see` is shown each token's logits. `adapters`: each FILE:SCALE. `repacked`: weights are, where libllama does
    that; a row is alone then, since such kernels may add up several rows in another order."""
    llama_cpp.llama_log_set(SILENT, None)
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = repacked
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
    loras = load_adapters(model, adapters)
    context = make_context(model, len(prompt) + n_predict + 8, FEW, decoding(), n_threads, loras=loras)
    vocab = llama_cpp.llama_model_get_vocab(model)
    n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
    sampler = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode(), b"root") if grammar else None
    out: list[int] = []
    feed = list(prompt)
    if len(prompt) > 64 and architecture(model) not in WITHOUT_FLASH:
        read_blocks(model, context, prompt[:-1], n_threads, loras)
        feed = prompt[-1:]
    while len(out) < n_predict:
        decode(context, feed, [*range(0, len(feed), 1 if loras or repacked else FEW), len(feed)])
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (n_vocab,))
        see(logits)
        out.append(best(sampler, logits) if sampler else int(np.argmax(logits)))
        feed = out[-1:]
        if sampler and llama_cpp.llama_vocab_is_eog(vocab, out[-1]):
            break
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return out


def prompt_logits(path: str, prompt: list[int], n_threads: int = 2, repacked: bool = False) -> list[Any]:
    """The logits after each token of a prompt but the last. `repacked`: as for `greedy`."""
    llama_cpp.llama_log_set(SILENT, None)
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = repacked
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
    context = make_context(model, len(prompt) + 8, FEW, decoding(), n_threads)
    n_vocab, rows = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)), list[Any]()

    def see(context: Any, n_rows: int) -> None:
        rows.extend(np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (n_rows, n_vocab)).copy())

    if len(prompt) > 64:
        read_blocks(model, context, prompt[:-1], n_threads, see=see)
    else:
        decode(context, prompt[:-1], [*range(0, len(prompt) - 1, 1 if repacked else FEW), len(prompt) - 1], see)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return rows


def architecture(model: Any) -> str:
    name = ctypes.create_string_buffer(64)
    llama_cpp.llama_model_meta_val_str(model, b"general.architecture", name, len(name))
    return name.value.decode()


def best(sampler: Any, logits: Any) -> int:
    """The likeliest token that a grammar lets pass, which it takes in."""
    data = [llama_cpp.llama_token_data(id=token, logit=logit, p=0) for token, logit in enumerate(logits.tolist())]
    array = (llama_cpp.llama_token_data * len(data))(*data)
    candidates = llama_cpp.llama_token_data_array(data=array, size=len(data), selected=-1, sorted=False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(candidates))
    token = max(range(len(data)), key=lambda at: array[at].logit)
    llama_cpp.llama_sampler_accept(sampler, token)
    return token


def decoding() -> tuple[int, int]:
    """Types of K and V where rows are computed alone."""
    return (BF16, F16) if IS_X86 else (F16, BF16)


def load_adapters(model: Any, adapters: Sequence[str]) -> list[tuple[Any, float]]:
    """The files as they are, each with its scale."""
    both = [each.rpartition(":")[::2] for each in adapters]
    return [(llama_cpp.llama_adapter_lora_init(model, path.encode()), float(scale)) for path, scale in both]


def make_context(
    model: Any,
    n_ctx: int,
    n_batch: int,
    types: tuple[int, int],
    n_threads: int,
    n_seq: int = 1,
    loras: Sequence[tuple[Any, float]] = (),
) -> Any:
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max, params.kv_unified = n_seq, True
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_batch
    params.n_threads = params.n_threads_batch = n_threads
    params.flash_attn_type, (params.type_k, params.type_v) = 1, types
    context, n = llama_cpp.llama_init_from_model(model, params), len(loras)
    if loras:
        handles = (llama_cpp.llama_cpp.llama_adapter_lora_p_ctypes * n)(*(lora for lora, _ in loras))
        scales = (ctypes.c_float * n)(*(scale for _, scale in loras))
        assert llama_cpp.llama_set_adapters_lora(context, handles, n, scales) == 0
    return context


See = Callable[[Any, int], object] | None  # shown a context and the number of rows that have logits in it


def decode(context: Any, tokens: Sequence[int], cuts: Sequence[int], see: See = None) -> None:
    for start, end in pairwise(cuts):
        n_rows = end - start
        ids, flags = (llama_cpp.llama_token * n_rows)(*tokens[start:end]), (ctypes.c_int8 * n_rows)(*[1] * n_rows)
        batch = llama_cpp.llama_batch_get_one(ids, n_rows)
        if see:
            batch.logits = flags
        assert llama_cpp.llama_decode(context, batch) == 0
        if see:
            see(context, n_rows)


def read_blocks(
    model: Any,
    context: Any,
    tokens: Sequence[int],
    n_threads: int,
    loras: Sequence[tuple[Any, float]] = (),
    see: See = None,
) -> None:
    """Evaluate the tokens in batches of 64 and more, and give `context` the cells."""
    n_tokens, window = len(tokens), llama_cpp.llama_model_n_swa(model) or 127
    reader = make_context(model, n_tokens, 127, READING, n_threads, n_seq=2, loras=loras)
    memory = llama_cpp.llama_get_memory(reader)
    for start, end in pairwise([*(64 * block for block in range(n_tokens // 64)), n_tokens]):
        decode(reader, tokens, [start, end], see)
        pieces = [(at, min(at + window, end)) for at in range(start, end, window)]  # a state has one window's cells
        states = []
        for piece in pieces:
            llama_cpp.llama_memory_seq_cp(memory, 0, 1, *piece)
            states.append(state_of(reader, 1))
            llama_cpp.llama_memory_seq_rm(memory, 1, -1, -1)
        llama_cpp.llama_memory_seq_rm(memory, 0, start, end)
        for piece, state in zip(pieces, states, strict=True):
            round_records(memoryview(state).cast("B"), F16, IS_X86)
            assert llama_cpp.llama_state_seq_set_data(reader, state, len(state), 1) == len(state)
            llama_cpp.llama_memory_seq_cp(memory, 1, 0, *piece)
            llama_cpp.llama_memory_seq_rm(memory, 1, -1, -1)
    whole = state_of(reader, 0)
    llama_cpp.llama_free(reader)
    round_records(memoryview(whole).cast("B"), BF16, IS_X86)
    assert llama_cpp.llama_state_seq_set_data(context, whole, len(whole), 0) == len(whole)


def state_of(context: Any, seq: int) -> Any:
    n_bytes = llama_cpp.llama_state_seq_get_size(context, seq)
    state = (ctypes.c_uint8 * n_bytes)()
    assert llama_cpp.llama_state_seq_get_data(context, state, n_bytes, seq) == n_bytes
    return state


def round_records(state: memoryview, type_: int, keys: bool) -> None:
    """K (or V) of all layers to BF16, and noted as of that type, or as F16 again."""
    base = ctypes.CDLL(str(Path(str(llama_cpp.llama_cpp.__file__)).parent / "lib" / "libggml-base.so"))
    for start, end in records(state, keys):
        n_values = (end - start - RECORD.size) // 2
        RECORD.pack_into(state, start, type_, RECORD.unpack_from(state, start)[1])
        halves = (ctypes.c_uint16 * n_values).from_buffer(state[start + RECORD.size : end])
        floats = (ctypes.c_float * n_values)()
        base.ggml_fp16_to_fp32_row(halves, floats, ctypes.c_int64(n_values))
        base.ggml_fp32_to_bf16_row(floats, halves, ctypes.c_int64(n_values))
        if type_ == F16:
            base.ggml_bf16_to_fp32_row(halves, floats, ctypes.c_int64(n_values))
            base.ggml_fp32_to_fp16_row(floats, halves, ctypes.c_int64(n_values))


def records(state: memoryview, keys: bool) -> list[tuple[int, int]]:
    """(first, end) byte of each layer's K (or V) in the state of a sequence.

    A word and the sequence's number; then of each cache, two where some layers have a sliding window: streams, cells;
    of each cell 12 bytes, or 24 where a token has several positions; whether V is transposed, layers; records of each
    layer's K, then of each layer's V: type, bytes of a row, rows.
    """
    for cell_bytes in (12, 24):
        at, found = 8, list[tuple[int, int]]()
        with contextlib.suppress(struct.error):  # cells are of the other size
            while at < len(state):
                n_streams, n_cells = PAIR.unpack_from(state, at)
                at += PAIR.size + n_cells * cell_bytes
                is_transposed, n_layers = PAIR.unpack_from(state, at)
                at += PAIR.size
                if n_streams != 1 or is_transposed or n_layers > MAX_LAYERS:
                    break
                for layer in range(2 * n_layers):
                    end = at + RECORD.size + n_cells * RECORD.unpack_from(state, at)[1]
                    found += [(at, end)] * ((layer < n_layers) is keys)
                    at = end
        if at == len(state):
            return found
    raise ValueError(f"the layout of a state of {len(state)} bytes is not known")


if __name__ == "__main__":
    path, count, ids, *others = [word for word in sys.argv[1:] if word != REPACKED]
    print(
        json.dumps(
            greedy(
                path,
                [int(token) for token in ids.split(",")],
                int(count),
                grammar="".join(others[:1]),
                adapters=others[1:],
                repacked=REPACKED in sys.argv,
            )
        )
    )
