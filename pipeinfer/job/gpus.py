"""The GPUs that this process's libllama can use, by name. Loads nothing onto them."""

from __future__ import annotations

from pipeinfer.models.llama.devices import llama_devices
from pipeinfer.models.llama.ggml import load_library


def gpu_names() -> list[str]:
    """What each calls itself, as in `NVIDIA H100`; none with a build for CPUs."""
    if not load_library().llama_supports_gpu_offload():
        return []
    return [device.description for device in llama_devices() if device.kind == "GPU"]
