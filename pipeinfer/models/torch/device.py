"""Work that a device does in order while the host goes on, and its results. Knows no layer and no MPI."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from pipeinfer.core.types import FloatArray

Check = Callable[[FloatArray], None]  # raises for rows that a sound model cannot compute


class Mark(Protocol):
    """A place in a device's work; the methods of a CUDA event."""

    def query(self) -> bool:
        """Whether all work before it is done."""
        ...

    def synchronize(self) -> None:
        """Return when it is."""
        ...


class DoneMark:
    """A Mark behind work that was done at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class DeviceQueue:
    """The current stream of a GPU. A CPU does all work at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_async = device.type != "cpu"

    def current(self) -> AbstractContextManager[object]:
        """Within, streams, events and recordings belong to this device."""
        return torch.cuda.device(self.device) if self._is_async else nullcontext()

    def do(self, work: Callable[[], None]) -> None:
        """`work` hands kernels and copies to the device, and waits for none."""
        work()

    def mark(self) -> Mark:
        """Behind all work so far."""
        if not self._is_async:
            return DoneMark()
        event = torch.cuda.Event()
        event.record()
        return event

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """Copy to the device. The host does not wait: torch holds the pinned memory until it was read."""
        return values.pin_memory().to(self.device, non_blocking=True) if self._is_async else values

    def download(self, values: torch.Tensor) -> torch.Tensor:
        """Copy to the host; complete behind the next mark."""
        if not self._is_async:
            return values
        copy = self.host_memory(tuple(values.shape), values.dtype)
        copy.copy_(values, non_blocking=True)
        return copy

    def device_memory(self, n_bytes: int) -> torch.Tensor:
        """Bytes on the device that none of its work uses."""
        with self.current():
            memory = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
            self.mark().synchronize()
        return memory

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory that the device copies from and to while the host goes on."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._is_async)


@dataclass(frozen=True, slots=True)
class TorchRows:
    """DeviceRows in torch. `values`: (n_rows, n_embd), contiguous, float32 or bfloat16."""

    values: torch.Tensor
    queue: DeviceQueue

    @property
    def memory(self) -> torch.Tensor:
        return self.values.view(-1).view(torch.uint8)

    def pick(self, rows: Sequence[int]) -> "TorchRows":
        """In the order of the device's work."""
        with torch.inference_mode(), self.queue.current():
            return TorchRows(self.values.index_select(0, self.queue.upload(torch.tensor(rows))), self.queue)

    def spread(self, rows: Sequence[int], n_rows: int) -> "TorchRows":
        """Waits for the device: MPI does not know the order of its work."""
        with torch.inference_mode(), self.queue.current():
            values = self.values.new_zeros((n_rows, self.values.shape[1]))
            values.index_copy_(0, self.queue.upload(torch.tensor(rows)), self.values)
            self.queue.mark().synchronize()
        return TorchRows(values, self.queue)


class PendingRows:
    """Rows that the device computes; complete behind the mark `done`."""

    def __init__(self, queue: DeviceQueue, check: Check) -> None:
        self._queue, self._check = queue, check
        self.done: Mark = DoneMark()
        self.rows: torch.Tensor | None = None

    @property
    def is_done(self) -> bool:
        return self.done.query()

    def take(self, values: torch.Tensor) -> None:
        """Copy (n_rows, n) values in the order of the device's work; they may change afterwards."""
        raise NotImplementedError

    def _wait(self) -> torch.Tensor:
        """The only wait for the device that a run costs."""
        self.done.synchronize()
        assert self.rows is not None
        return self.rows


class HostFuture(PendingRows):
    """A StageFuture whose rows are read on the host."""

    def take(self, values: torch.Tensor) -> None:
        self.rows = self._queue.download(values)

    def result(self) -> FloatArray:
        rows: FloatArray = self._wait().numpy()
        self._check(rows)
        return rows


class DeviceFuture(PendingRows):
    """A StageFuture whose rows stay on the device, as `dtype`; the device finds out whether all are finite."""

    def __init__(self, queue: DeviceQueue, check: Check, dtype: torch.dtype) -> None:
        super().__init__(queue, check)
        self._dtype, self._is_finite = dtype, torch.ones(1, dtype=torch.bool)

    def take(self, values: torch.Tensor) -> None:
        self.rows = values.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
        self._is_finite = self._queue.download(torch.isfinite(values).all().reshape(1))

    def result(self) -> TorchRows:
        rows = self._wait()
        if not self._is_finite[0]:
            self._check(rows.float().cpu().numpy())
        return TorchRows(rows, self._queue)
