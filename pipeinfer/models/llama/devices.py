"""The devices that this process's libllama can compute on. Loads nothing onto them."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeinfer.models.llama.ggml import ggml, sibling

KINDS = {0: "CPU", 1: "GPU", 2: "integrated GPU", 3: "accelerator"}
"""ggml_backend_dev_type's answers."""

GPUS = ("GPU", "integrated GPU")
"""Kinds that layers can be put on."""


@dataclass(frozen=True, slots=True)
class Device:
    """`name`: as ggml numbers it, CUDA0; `description`: as it calls itself, NVIDIA H100. Bytes are 0 where ggml does
    not tell."""

    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int


def llama_devices() -> list[Device]:
    """In ggml's order."""
    return [device for device, _ in _devices()]


def device_list(names: Sequence[str]) -> ctypes.Array[ctypes.c_void_p]:
    """The devices of these names as libllama wants them, with a null behind the last. Each must be there."""
    handles = {device.name: handle for device, handle in _devices()}
    return (ctypes.c_void_p * (len(names) + 1))(*(handles[name] for name in names), None)


def _devices() -> Iterator[tuple[Device, int]]:
    """With ggml's own handles."""
    base, registry = ggml(), sibling("ggml")
    registry.ggml_backend_dev_count.restype = ctypes.c_size_t
    registry.ggml_backend_dev_get.argtypes, registry.ggml_backend_dev_get.restype = [ctypes.c_size_t], ctypes.c_void_p
    base.ggml_backend_dev_type.argtypes, base.ggml_backend_dev_type.restype = [ctypes.c_void_p], ctypes.c_int
    size = ctypes.POINTER(ctypes.c_size_t)
    base.ggml_backend_dev_memory.argtypes, base.ggml_backend_dev_memory.restype = [ctypes.c_void_p, size, size], None
    for text in (base.ggml_backend_dev_name, base.ggml_backend_dev_description):
        text.argtypes, text.restype = [ctypes.c_void_p], ctypes.c_char_p
    for index in range(registry.ggml_backend_dev_count()):
        device = registry.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        kind = base.ggml_backend_dev_type(device)
        name, description = (
            ask(device).decode("utf-8", "replace").strip()
            for ask in (base.ggml_backend_dev_name, base.ggml_backend_dev_description)
        )
        yield Device(name, description, KINDS.get(kind, str(kind)), free.value, total.value), device
