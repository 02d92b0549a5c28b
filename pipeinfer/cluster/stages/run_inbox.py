"""Receive runs, whose activations are in the same message or, from a device, in a second one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeinfer.cluster.idle import Idle
from pipeinfer.cluster.messages.activations import WireType
from pipeinfer.cluster.messages.wire import Transaction
from pipeinfer.cluster.transport import NOT_SENT, Inbox, Request
from pipeinfer.core.interfaces import DeviceRows


@dataclass(frozen=True, slots=True)
class Arrival:
    """A complete transaction, in memory that is the caller's until it is given back. `memory`: of its activations, if
    they came out of band."""

    transaction: Transaction
    memory: Any = None


class RunInbox:
    """`out_of_band`: receives activations into a device's memory; `rows`: (memory, n_rows) -> the activations in it."""

    def __init__(
        self, inbox: Inbox, n_embd: int, wire_type: WireType, out_of_band: Inbox | None = None,
        rows: Callable[[Any, int], DeviceRows] | None = None,
    ) -> None:  # fmt: skip
        self._inbox, self._n_embd, self._wire_type = inbox, n_embd, wire_type
        self._out_of_band, self._rows = out_of_band, rows
        self._waiting: Transaction | None = None  # for its activations

    def poll(self) -> Arrival | None:
        """The next run, if it is complete."""
        if self._waiting is None:
            buffer = self._inbox.poll()
            if buffer is None:
                return None
            self._waiting = Transaction(buffer, self._n_embd, self._wire_type)
        transaction, memory = self._waiting, None
        if transaction.comes_out_of_band:
            assert self._out_of_band and self._rows, "activations out of band need memory for them"
            memory = self._out_of_band.poll()
            if memory is None:
                return None
            transaction.out_of_band = self._rows(memory, transaction.n_rows)
        self._waiting = None
        return Arrival(transaction, memory)

    def holds(self) -> bool:
        """Whether a run has come, or its first message."""
        return self._waiting is not None or self._inbox.holds()

    def give_back(self, arrival: Arrival, sent: Request = NOT_SENT) -> None:
        """Reuse the run's memory, once its message, if that is being sent on, is sent."""
        self._inbox.give_back(arrival.transaction.buffer, sent)
        if self._out_of_band and arrival.memory is not None:
            self._out_of_band.give_back(arrival.memory)

    def close(self, idle: Idle) -> None:
        """Cancel the receives that are still posted."""
        for inbox in filter(None, (self._inbox, self._out_of_band)):
            inbox.close(idle)
