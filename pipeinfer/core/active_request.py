"""A request with its policy and observer: what the parts of the engine hand each other. Does nothing."""

from dataclasses import dataclass

from pipeinfer.core.observer import Observer
from pipeinfer.core.policy import Policy, PolicyView
from pipeinfer.core.requests import Request


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that is open, or waits to be opened."""

    request: Request
    policy: Policy
    observer: Observer
    context: PolicyView
    n_heard: int = 0  # rows of the prompt that every stage has evaluated
    arrival: int = 0  # its number in the order of arrival; 0: it has yet to wait
    was_open: bool = False  # if it waits, it was preempted

    @property
    def rank(self) -> tuple[int, int]:
        """Lower ranks are opened first and preempted last."""
        return self.request.priority, self.arrival
