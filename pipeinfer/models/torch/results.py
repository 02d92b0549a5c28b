"""Where what a run has computed goes: to the host, or no further. Knows no layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from pipeinfer.core.types import FloatArray
from pipeinfer.models.torch.device_queue import DeviceQueue
from pipeinfer.models.torch.device_rows import OwnDeviceRows

Check = Callable[[FloatArray], None]
R = TypeVar("R", FloatArray, OwnDeviceRows, covariant=True)


class Result(Protocol[R]):
    def take(self, values: torch.Tensor) -> None:
        """In the order of the device's work: (n_rows, n), which may change after that."""
        ...

    def get(self, check: Check) -> R:
        """Once the device has done it. `check` may raise."""
        ...


@dataclass(slots=True)
class OnHost:
    """A Result that is read on the host."""

    queue: DeviceQueue
    rows: torch.Tensor | None = None

    def take(self, values: torch.Tensor) -> None:
        self.rows = self.queue.download(values)

    def get(self, check: Check) -> FloatArray:
        assert self.rows is not None
        rows: FloatArray = self.rows.numpy()
        check(rows)
        return rows


@dataclass(slots=True)
class OnDevice:
    """A Result that stays there, as `dtype`; whether all are numbers is found there too."""

    queue: DeviceQueue
    dtype: torch.dtype
    rows: torch.Tensor | None = None
    is_sound: torch.Tensor | None = None

    def take(self, values: torch.Tensor) -> None:
        self.rows = values.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        self.is_sound = self.queue.download(torch.isfinite(values).all().reshape(1))

    def get(self, check: Check) -> OwnDeviceRows:
        assert self.rows is not None and self.is_sound is not None
        if not self.is_sound[0]:
            check(self.rows.float().cpu().numpy())
        return OwnDeviceRows(self.rows, self.queue)
