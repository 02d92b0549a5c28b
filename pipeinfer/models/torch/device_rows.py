"""Activations that stay on a device between stages. Knows no layer and no MPI."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pipeinfer.models.torch.device_queue import DeviceQueue


@dataclass(frozen=True, slots=True)
class OwnDeviceRows:
    """DeviceRows of torch's. `values`: (n_rows, n_embd), contiguous, float32 or bfloat16."""

    values: torch.Tensor
    queue: DeviceQueue

    @property
    def memory(self) -> torch.Tensor:
        return self.values.view(-1).view(torch.uint8)

    def pick(self, rows: Sequence[int]) -> "OwnDeviceRows":
        """In the order of the device's work."""
        with self._on_device():
            return OwnDeviceRows(self.values.index_select(0, self._numbers(rows)), self.queue)

    def spread(self, rows: Sequence[int], n_rows: int) -> "OwnDeviceRows":
        """Waits for the device: MPI knows nothing of the order of its work."""
        with self._on_device():
            found = self.values.new_zeros((n_rows, self.values.shape[1]))
            found.index_copy_(0, self._numbers(rows), self.values)
            self.queue.mark().synchronize()
        return OwnDeviceRows(found, self.queue)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with torch.inference_mode(), self.queue.current():
            yield

    def _numbers(self, rows: Sequence[int]) -> torch.Tensor:
        return self.queue.upload(torch.tensor(rows))
