"""Whose turn it is: members in the order in which they are due. Knows nothing of what they do."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

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
        """Move a member to the front."""
        if len(self._members) > 1 and member in self._members:
            self._members = {member: None, **self._members}

    def rotate(self, member: T) -> None:
        """Move a member that was served to the end."""
        if member in self._members:
            del self._members[member]
            self._members[member] = None
