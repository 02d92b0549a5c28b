"""The GPUs that this process's libllama can use, by name. Loads nothing onto them."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from pipeinfer.models.llama.ggml import ggml, load_library

GPU_TYPE = 1  # GGML_BACKEND_DEVICE_TYPE_GPU


def gpu_names() -> list[str]:
    """What each calls itself, as in `NVIDIA H100`; none with a build for CPUs."""
    library = load_library()
    if not library.llama_supports_gpu_offload():
        return []
    suffix = "dylib" if sys.platform == "darwin" else "so"
    registry = ctypes.CDLL(str(Path(str(library.__file__)).parent / "lib" / f"libggml.{suffix}"))
    registry.ggml_backend_dev_count.restype = ctypes.c_size_t
    registry.ggml_backend_dev_get.argtypes, registry.ggml_backend_dev_get.restype = [ctypes.c_size_t], ctypes.c_void_p
    base = ggml()
    base.ggml_backend_dev_type.argtypes, base.ggml_backend_dev_type.restype = [ctypes.c_void_p], ctypes.c_int
    base.ggml_backend_dev_description.argtypes = [ctypes.c_void_p]
    base.ggml_backend_dev_description.restype = ctypes.c_char_p
    devices = map(registry.ggml_backend_dev_get, range(registry.ggml_backend_dev_count()))
    return [
        base.ggml_backend_dev_description(device).decode("utf-8", "replace")
        for device in devices
        if base.ggml_backend_dev_type(device) == GPU_TYPE
    ]
