"""A request with all that serves it: what the parts of the engine hand each other. Does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeinfer.core.observer import Observer
from pipeinfer.core.requests import Request

if TYPE_CHECKING:  # what policies see has parts of the engine, which know of this
    from pipeinfer.core.policy import Policy, PolicyContext


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that is open, or waits to be, for the first time or again."""

    request: Request
    policy: Policy
    observer: Observer
    context: PolicyContext
    n_heard: int = 0  # rows of the prompt that every stage has evaluated
    arrival: int = 0  # the how manieth of all it is
    was_open: bool = False  # it was preempted since, if it waits

    @property
    def rank(self) -> tuple[int, int]:
        """Lower ones are opened first and preempted last."""
        return self.request.priority, self.arrival
