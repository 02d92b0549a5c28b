"""libggml's AMX kernels are tried in a process of their own before a model may use them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama import ggml
from pipeinfer.models.llama.decoder import FIND, Decoder
from pipeinfer.models.llama.ggml import amx_works, load_library, probe_amx
from pipeinfer.models.llama.params import NARROW, LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from tests.models.test_llama_stage import loaded, make_batch, random_tokens, run
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.gguf_factory import Shape, write_model

__all__ = ["loaded"]
Loader = Callable[..., list[LlamaStage]]

BUFFER_AT = 8
"""Of the pointer to its buffer in a ggml_tensor."""


def test_what_is_decided_is_what_the_probe_finds() -> None:
    library = load_library()
    found = probe_amx(Path(str(library.__file__)).parent / "lib")
    assert amx_works() == (found or b"AMX_INT8 = 1" not in library.llama_print_system_info())


def test_libraries_that_cannot_be_tried_are_not_trusted(tmp_path: Path) -> None:
    assert not probe_amx(tmp_path)


def test_matrices_that_multiply_permuted_rows_are_not_repacked(tmp_path: Path) -> None:
    wide = {"attention.q_lora_rank": 64, "attention.key_length_mla": 96, "expert_feed_forward_length": 64}
    model = replace(MODELS["deepseek32"], metadata={**MODELS["deepseek32"].metadata, **wide})
    info = read_model_info(write_random_model(tmp_path / "model.gguf", model))
    with ExitStack() as closing:
        slice_file = open_slice(info, 1, 3)
        closing.callback(slice_file.close)
        opened = Decoder(slice_file, LlamaParams(64, exact=False), closing).model
        names = {name: _buffers_of(opened, f"blk.1.{name}.weight") for name in ("attn_k_b", "attn_v_b", "attn_norm")}
    assert names == {"attn_k_b": b"CPU_Mapped", "attn_v_b": b"CPU_Mapped", "attn_norm": b"CPU"}


def test_rows_of_a_matrix_of_one_block_are_right_in_large_batches(tmp_path: Path, loaded: Loader) -> None:
    """Also with fast numerics, where libllama would repack it: AMX kernels then read beyond it from 32 rows on."""
    path = write_model(tmp_path / "model.gguf", Shape(n_ff=NARROW))
    (stage,) = loaded(path, (), LlamaParams(n_cells=256, n_batch=64, n_outputs_max=64, exact=False))
    tokens = random_tokens(48)
    alone = [run([stage], make_batch([token], at))[0] for at, token in enumerate(tokens)]
    stage.apply([KvOp(OpKind.REMOVE, 0)])
    assert np.allclose(run([stage], make_batch(tokens, 0)), alone, atol=1e-2)


def _buffers_of(model: object, name: str) -> bytes:
    base = ggml.ggml()
    find, type_of, name_of = getattr(base, FIND), base.ggml_backend_buffer_get_type, base.ggml_backend_buft_name
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
    type_of.restype, type_of.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    tensor = find(model, name.encode())
    return bytes(name_of(type_of(ctypes.c_void_p.from_address(tensor + BUFFER_AT))))
