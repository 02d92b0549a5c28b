"""Ctrl-C in a conversation: it stops the answer; a second one, or one at the prompt, ends the job. Knows no signals."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupts:
    """`says_stop`: whether the user has asked for the same in another way. Asked in every wait, so it must be quick."""

    def __init__(self, says_stop: Callable[[], bool]) -> None:
        self.says_stop = says_stop
        self.left = False  # at the prompt: who reads a line shall leave
        self._reading = self._stopped = self._due = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Meanwhile a line is read; what comes after it is an answer."""
        self._reading = True
        try:
            yield
        finally:
            self._reading = self._stopped = self._due = False

    def interrupt(self, number: int) -> bool:
        """A signal came: whether that is seen to here; else the job shall stop. Called in another thread."""
        if number != signal.SIGINT:
            return False
        if self._reading or self.left:
            self.left = True
        elif self._stopped:
            return False
        else:
            self._stopped = self._due = True
        return True

    def asked(self) -> bool:
        """Another rank was told to stop: whether that is seen to here; else the job shall stop."""
        return False

    def due(self) -> bool:
        """Whether the answer shall end; said once."""
        if self._reading or not (self._due or self.says_stop()):
            return False
        self._due, self._stopped = False, True
        return True
