"""The GPUs that this process's libllama sees, and those of a rank. Loads nothing onto them."""

from collections.abc import Iterable, Sequence

from pipeinfer.errors import UserError
from pipeinfer.job.placement.devices import DevicePlan
from pipeinfer.models.llama.devices import GPUS, Device, llama_devices
from pipeinfer.models.llama.ggml import load_library

BUILD = "a build of llama-cpp-python with CMAKE_ARGS=-DGGML_CUDA=on"


def can_offload() -> bool:
    """Whether this process's libllama can put layers on GPUs."""
    return bool(load_library().llama_supports_gpu_offload())


def gpus() -> list[Device]:
    """Those that this process's libllama can use; none with a build for CPUs."""
    return [device for device in llama_devices() if device.kind in GPUS] if can_offload() else []


def gpu_names() -> list[str]:
    """What each calls itself, as in `NVIDIA H200`."""
    return [device.description for device in gpus()]


def own_gpus(own: Iterable[DevicePlan], present: Sequence[Device]) -> tuple[tuple[str, int], ...]:
    """The devices of this rank's layers, and the bytes that are free on each."""
    used = next((each for each in own if each.uses_gpus), None)
    if used is None:
        return ()
    return tuple(
        (device.name, device.free_bytes)
        for device in present
        if device.free_bytes and (used.devices is None or device.name in used.devices)
    )


def check_present(asked: Sequence[str], present: Sequence[Device]) -> None:
    """Raises UserError, with those that are, for a device that is not there."""
    known = [device.name for device in present]
    missing = next((name for name in asked if name not in known), None)
    if missing is None:
        return
    shown = ", ".join(f"{device.name} ({device.description})" for device in present)
    there = f"libllama has {shown} there" if present else f"libllama sees no GPU there: it takes one, and {BUILD}"
    raise UserError(f"--device {missing} is not there; {there}; `pipeinfer info` lists devices, none leaves layers on "
                    "the CPU")  # fmt: skip
