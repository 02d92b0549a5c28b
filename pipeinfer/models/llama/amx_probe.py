"""Multiply two small matrices with libggml's AMX kernels, in a process of its own: `python -I -S amx_probe.py FOLDER`.
Exit code 0: right, or libggml has no such kernels for this processor; anything else, a signal's too: not to be used.
Knows libggml's C API alone; only the standard library may be imported here."""

import array
import ctypes
import itertools
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

K, N_WEIGHTS, N_ROWS = 256, 64, 8  # more than one row: a single one is multiplied without tiles
BLOCK = b"\x00\x3c" + b"\x01" * 32  # Q8_0: scale 1.0 as float16, then 32 times 1
F32, Q8_0 = 0, 8
CPU = 0
POINTER = ctypes.c_void_p


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def main(folder: Path) -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer here
    base, registry = (ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("ggml-base", "ggml"))
    device = function(registry, "ggml_backend_dev_by_type", ctypes.c_int)(CPU)
    buffers = amx_buffers(base, device)
    return 0 if buffers is None or product_is_right(base, device, buffers) else 1


def function(library: ctypes.CDLL, name: str, *arguments: Any) -> Callable[..., Any]:
    """A function of the library that takes `arguments` and returns a pointer, or nothing of interest."""
    pointer = getattr(library, name)
    pointer.restype, pointer.argtypes = POINTER, arguments
    return pointer


def amx_buffers(base: ctypes.CDLL, device: int) -> int | None:
    """The buffer type whose tensors AMX kernels multiply, if there is one."""
    registered = function(base, "ggml_backend_dev_backend_reg", POINTER)(device)
    find = function(base, "ggml_backend_reg_get_proc_address", POINTER, ctypes.c_char_p)
    address = find(registered, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return None
    types = ctypes.CFUNCTYPE(ctypes.POINTER(POINTER), POINTER)(address)(device)
    name_of = function(base, "ggml_backend_buft_name", POINTER)
    all_types = itertools.takewhile(bool, (types[at] for at in itertools.count()))
    return next((each for each in all_types if ctypes.string_at(name_of(each)).startswith(b"AMX")), None)


def product_is_right(base: ctypes.CDLL, device: int, buffers: int) -> bool:
    start = function(base, "ggml_init", InitParams)
    tensor = function(base, "ggml_new_tensor_2d", POINTER, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    allocate = function(base, "ggml_backend_alloc_ctx_tensors_from_buft", POINTER, POINTER)
    put, get = (
        function(base, f"ggml_backend_tensor_{verb}", POINTER, POINTER, ctypes.c_size_t, ctypes.c_size_t)
        for verb in ("set", "get")
    )
    weights, context = (start(InitParams(1 << 20, None, True)) for _ in range(2))
    matrix, rows = tensor(weights, Q8_0, K, N_WEIGHTS), tensor(context, F32, K, N_ROWS)
    allocate(weights, buffers)
    product = function(base, "ggml_mul_mat", POINTER, POINTER, POINTER)(context, matrix, rows)
    graph = function(base, "ggml_new_graph", POINTER)(context)
    function(base, "ggml_build_forward_expand", POINTER, POINTER)(graph, product)
    allocate(context, function(base, "ggml_backend_dev_buffer_type", POINTER)(device))
    blocks, ones = BLOCK * (K // 32 * N_WEIGHTS), array.array("f", [1.0] * K * N_ROWS).tobytes()
    put(matrix, blocks, 0, len(blocks))
    put(rows, ones, 0, len(ones))
    backend = function(base, "ggml_backend_dev_init", POINTER, POINTER)(device, None)
    function(base, "ggml_backend_graph_compute", POINTER, POINTER)(backend, graph)
    out = (ctypes.c_float * (N_WEIGHTS * N_ROWS))()
    get(product, out, 0, ctypes.sizeof(out))
    return all(abs(value - K) < 0.01 * K for value in out)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
