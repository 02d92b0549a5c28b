"""Whose turn it is: members in the order in which they are due. Knows nothing of what they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """Members by id, each once. A new member is due after all others, a member that was served as well."""

    def __init__(self) -> None:
        self._members: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member_id: int) -> bool:
        return member_id in self._members

    def __iter__(self) -> Iterator[T]:
        """Members in their order; they may come and go meanwhile."""
        return iter(list(self._members.values()))

    def add(self, member_id: int, member: T) -> None:
        self._members.setdefault(member_id, member)

    def discard(self, member_id: int) -> None:
        self._members.pop(member_id, None)

    def prefer(self, member_id: int) -> None:
        """The member comes first now."""
        if len(self._members) > 1 and member_id in self._members:
            self._members = {member_id: self._members[member_id], **self._members}

    def rotate(self, member_id: int) -> None:
        """The member was served: all others come first now."""
        if member_id in self._members:
            self._members[member_id] = self._members.pop(member_id)
