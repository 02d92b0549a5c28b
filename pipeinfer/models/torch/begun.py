"""A run that a device has been told to evaluate. Knows no layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pipeinfer.core.interfaces import FloatArray
from pipeinfer.models.torch.device_queue import Mark


@dataclass(frozen=True, slots=True)
class BegunRun:
    """`found` is on the host, and complete when the mark is past; then `check` looks at it once, and may raise."""

    found: torch.Tensor
    done: Mark
    check: Callable[[FloatArray], None]

    @property
    def is_done(self) -> bool:
        return self.done.query()

    def result(self) -> FloatArray:
        """The only wait for the device that a run costs."""
        self.done.synchronize()
        rows: FloatArray = self.found.numpy()
        self.check(rows)
        return rows
