"""Types and constants at the bottom of core: arrays, tokens, constraints, the clock, turns. Imports nothing of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

NO_TOKEN = -1  # in a verdict: no token was wanted after the row, or the row was dead
FAILED = -2  # in a verdict: the request's constraint exceeds its limits
POSITION_END = 2**31 - 1  # as the end of a range of positions: the end of the sequence


class ConstraintFailed(Exception):
    """A constraint exceeds its limit of time or memory."""


class Allowed(Protocol):
    """The tokens that may follow one text. Methods raise ConstraintFailed, for one text always or never."""

    def has(self, token: int) -> bool: ...

    def restrict(self, logits: FloatArray) -> None:
        """Set logits (n_vocab,) to -inf except for tokens that may follow. At least one is left: the end of the text
        where nothing may follow."""


class Constraint(Protocol):
    """What the output of one request may be. Thread-safe."""

    def after(self, output: Sequence[int]) -> Allowed | None:
        """None: any token may follow."""


AdapterScales = tuple[tuple[int, float], ...]
"""(number of an adapter of the job, its factor) of each that is applied to a request's rows, in ascending order."""


class Clock(Protocol):
    def __call__(self) -> float:
        """Seconds, monotonic."""


T = TypeVar("T", bound=Hashable)


class RoundRobin(Generic[T]):
    """Members, each once. New members and those that were served come last."""

    def __init__(self) -> None:
        self._members: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member: T) -> bool:
        return member in self._members

    def __iter__(self) -> Iterator[T]:
        """Members in their order; they may come and go meanwhile."""
        return iter(list(self._members))

    def add(self, member: T) -> None:
        self._members[member] = None

    def discard(self, member: T) -> None:
        self._members.pop(member, None)

    def prefer(self, member: T) -> None:
        if len(self._members) > 1 and member in self._members:
            self._members = {member: None, **self._members}

    def rotate(self, member: T) -> None:
        """Move a member that was served to the end."""
        if member in self._members:
            del self._members[member]
            self._members[member] = None
