"""A run that a device has been told to evaluate. Knows no layer."""

from dataclasses import dataclass
from typing import Generic

from pipeinfer.models.torch.device_queue import Mark
from pipeinfer.models.torch.results import Check, R, Result


@dataclass(frozen=True, slots=True)
class BegunRun(Generic[R]):
    """`found` is complete when the mark is past; then `check` looks at it once, and may raise."""

    found: Result[R]
    done: Mark
    check: Check

    @property
    def is_done(self) -> bool:
        return self.done.query()

    def result(self) -> R:
        """The only wait for the device that a run costs."""
        self.done.synchronize()
        return self.found.get(self.check)
