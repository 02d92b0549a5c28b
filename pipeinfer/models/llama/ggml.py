"""Load libllama quietly, and reach the few functions of libggml that llama_cpp's Python does not export.

llama_cpp is imported by `load_library`, not by importing this module: it takes a while. Knows no stage and no cache.
"""

import ctypes
import os
import subprocess
import sys
from collections import deque
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from pipeinfer.core.types import FloatArray, IntArray
from pipeinfer.disk_cache import user_cache
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.contents import SourceFile
from pipeinfer.models.gguf.header import Tensor
from pipeinfer.models.llama.params import NUMA_STRATEGIES
from pipeinfer.models.llama.threads import spin_briefly

LOG_ERROR = 4
PROBE_TIMEOUT_S = 20.0
F32, F16 = 0, 1

_errors: deque[str] = deque(maxlen=4)
_keep_alive: list[Any] = []


@cache
def load_library() -> ModuleType:
    """llama_cpp's ctypes module, its backends initialised and its log silenced (see `last_errors`).

    Raises UserError when it is not installed, or its library cannot be loaded on this host.
    """
    spin_briefly(os.environ)
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # dying, it would start a debugger that prints a screenful
    try:
        library = _bindings()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"llama.cpp cannot be loaded ({why}); install a llama-cpp-python that fits this host") from None

    @library.llama_log_callback
    def on_log(level: int, text: bytes, _: object) -> None:
        if level == LOG_ERROR:
            _errors.append(text.decode("utf-8", "replace").strip())

    _keep_alive.append(on_log)  # ctypes does not hold it, libllama calls it until the process ends
    library.llama_log_set(on_log, None)
    library.llama_backend_init()
    return library


def use_nodes(strategy: str) -> None:
    """How libggml's threads use NUMA nodes, one of NUMA_STRATEGIES. Must come before the first of them."""
    load_library().llama_numa_init(1 + NUMA_STRATEGIES.index(strategy))


@cache
def load_extension() -> ModuleType:
    """The functions that libllama exports for drafts inside of it. Raises UserError where a build has none."""
    load_library()
    try:
        return _bindings("llama_cpp_ext")
    except (ImportError, AttributeError) as error:
        raise UserError(f"this llama-cpp-python cannot compute EAGLE-3 heads ({error}); install 0.3.36") from None


def _bindings(name: str = "llama_cpp") -> ModuleType:
    """A ctypes module of llama_cpp, without the package around it: importing that takes longer than loading a small
    model, and nothing of it is used here."""
    spec = find_spec("llama_cpp")
    if "llama_cpp" in sys.modules or spec is None:
        return import_module(f"llama_cpp.{name}")
    sys.modules["llama_cpp"] = module_from_spec(spec)
    try:
        return import_module(f"llama_cpp.{name}")
    finally:
        del sys.modules["llama_cpp"]  # whoever imports it gets it whole


def kept_name(what: str) -> str:
    """Of what is found out of this build of libggml on this host."""
    folder = Path(str(load_library().__file__)).parent / "lib"
    return f"{what}: {folder} of {folder.stat().st_mtime_ns} on {os.uname().nodename}"


@cache
def amx_works() -> bool:
    """False when libggml has kernels for this processor's matrix tiles, and they crash or multiply wrongly.

    GCC 12 drops most of the tile configuration before it is loaded (its `_tile_loadconfig` claims to read 8 of the 64
    bytes), and the first multiplication then ends the process: another process tries.
    """
    library = load_library()
    if b"AMX_INT8 = 1" not in library.llama_print_system_info():
        return True
    folder = Path(str(library.__file__)).parent / "lib"
    name, kept = kept_name("amx"), user_cache()
    works = kept.get(name)
    if not isinstance(works, bool):
        works = probe_amx(folder)
        kept.put(name, works)
    return works


def probe_amx(folder: Path) -> bool:
    """Whether the libggml in `folder` multiplies rightly, or has no AMX kernels for this processor."""
    probe = [sys.executable, "-I", "-S", str(Path(__file__).with_name("amx_probe.py")), str(folder)]
    try:
        done = subprocess.run(probe, capture_output=True, stdin=subprocess.DEVNULL, timeout=PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def hear_errors() -> None:
    """Take libllama's log again: who imports the whole of llama_cpp gives it to that package."""
    load_library().llama_log_set(_keep_alive[0], None)


def last_errors() -> str:
    """What libllama last complained about, on one line; forgotten once asked for."""
    text = "; ".join(_errors)
    _errors.clear()
    return "".join(sign if sign.isprintable() else "?" for sign in text)  # it quotes what is in damaged files


def sibling(name: str) -> ctypes.CDLL:
    """The library of this name next to the libllama in use."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(str(Path(str(load_library().__file__)).parent / "lib" / f"lib{name}.{suffix}"))


@cache
def ggml() -> ctypes.CDLL:
    """libggml-base, next to the libllama in use."""
    base = sibling("ggml-base")
    base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    base.ggml_backend_tensor_get.restype = None
    base.ggml_backend_tensor_set.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    base.ggml_backend_tensor_set.restype = None
    base.ggml_get_name.argtypes = [ctypes.c_void_p]
    base.ggml_get_name.restype = ctypes.c_void_p
    base.ggml_get_type_traits.argtypes = [ctypes.c_int]
    base.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
    return base


def type_name(type: int) -> str:
    """Of weights, such as q4_k."""
    name_of = ggml().ggml_type_name
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_int]
    return str(name_of(type).decode().lower())


_ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _TypeTraits(ctypes.Structure):
    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("block_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", _ToFloat),
        ("from_float_ref", ctypes.c_void_p),
    ]


def dequantise(kind: int, data: bytes | memoryview, n_values: int) -> FloatArray:
    """(n_values,) what a tensor's data, whole rows of GGML type `kind`, stand for: libggml's own conversion."""
    if kind == F32:
        return np.frombuffer(data, np.float32, n_values)
    out = np.empty(n_values, np.float32)
    source = np.frombuffer(data, np.uint8)
    ggml().ggml_get_type_traits(kind).contents.to_float(source.ctypes.data, out.ctypes.data, n_values)
    return out


class TokenTable:
    """The rows of a token embedding, read from the model file as tokens need them.

    What libllama's own lookup computes, bit for bit (the same conversion of each row), but only rows in use are ever
    read, and the slice that starts the pipeline needs no vocabulary. Read, not mapped: a model file that is cut off
    while the job runs is a fault with a name.
    """

    def __init__(self, tensor: Tensor, source: SourceFile, scale: float = 1.0) -> None:
        """`source` is the tensor's file, which the table closes. Rows come multiplied by `scale`."""
        self._scale = np.float32(scale)
        self.n_embd, self.n_vocab = tensor.shape
        self._row_bytes = tensor.n_bytes // self.n_vocab
        self._type, self._offset, self._source = tensor.type, tensor.offset, source
        self._to_float = ggml().ggml_get_type_traits(tensor.type).contents.to_float

    def lookup(self, tokens: IntArray) -> FloatArray:
        """(n_rows,) token ids -> (n_rows, n_embd) embeddings.

        ValueError for an id outside the vocabulary, ModelFault when the file was changed.
        """
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.n_vocab:
            raise ValueError(f"token ids {tokens.min()}..{tokens.max()} for a vocabulary of {self.n_vocab}")
        out = np.empty((len(tokens), self.n_embd), np.float32)
        address, stride = out.ctypes.data, 4 * self.n_embd
        for i, token in enumerate(tokens.tolist()):
            row = self._source.read(self._row_bytes, self._offset + token * self._row_bytes)
            if self._type == F32:
                out[i] = np.frombuffer(row, np.float32)
            else:
                self._to_float(row, address + i * stride, self.n_embd)
        self._source.check()
        return out if self._scale == 1 else out * self._scale

    def close(self) -> None:
        self._source.close()
