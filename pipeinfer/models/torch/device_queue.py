"""What a device does in order while the host goes on: work, marks in it, and the host's memory that it copies from and
to. Knows no layer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in a device's work, by torch's names."""

    def query(self) -> bool:
        """Whether all work before it is done."""
        ...

    def synchronize(self) -> None:
        """Return when it is."""
        ...


class Past:
    """A mark in work that was done at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class DeviceQueue:
    """The current stream of a GPU. On a CPU everything is done when it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_late = device.type != "cpu"

    def current(self) -> AbstractContextManager[object]:
        """Within, this device is the one that streams, events and recordings belong to."""
        return torch.cuda.device(self.device) if self._is_late else nullcontext()

    def do(self, work: Callable[[], None]) -> None:
        """`work` hands kernels and copies to the device, and waits for none."""
        work()

    def mark(self) -> Mark:
        """Behind all work so far."""
        if not self._is_late:
            return Past()
        event = torch.cuda.Event()
        event.record()
        return event

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """On the device, without the host's waiting for it: torch keeps the memory that is copied from until then."""
        return values.pin_memory().to(self.device, non_blocking=True) if self._is_late else values

    def download(self, values: torch.Tensor) -> torch.Tensor:
        """On the host, complete when the device has come so far."""
        if not self._is_late:
            return values
        found = self.host_memory(tuple(values.shape), values.dtype)
        found.copy_(values, non_blocking=True)
        return found

    def device_memory(self, n_bytes: int) -> torch.Tensor:
        """Bytes on the device that no work of it uses any more, nor will unasked."""
        with self.current():
            found = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
            self.mark().synchronize()
        return found

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What the device copies from and to without the host's waiting for it."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._is_late)
