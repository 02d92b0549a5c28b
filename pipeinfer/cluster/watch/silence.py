"""Which rank has said nothing for too long. Knows times that it is told; no socket and no clock."""

from __future__ import annotations

from collections.abc import Iterable


class Silence:
    """Of ranks that are to be heard several times in `limit_s`.

    When nobody is heard, or who listens has not looked, the job was suspended (Ctrl-Z, a laptop that was closed) and no
    rank is at fault: all have their time anew once somebody speaks.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._heard_s: dict[int, float] = {}
        self._looked_s = -1.0
        self._suspended = False

    @property
    def look_s(self) -> float:
        """`look` is to be called so often."""
        return self.limit_s / 12

    def begin(self, ranks: Iterable[int], now_s: float) -> None:
        """From now on these are listened to."""
        self._heard_s = dict.fromkeys(ranks, now_s)
        self._looked_s = now_s

    def hear(self, rank: int, now_s: float) -> None:
        if rank in self._heard_s:
            self._heard_s[rank] = now_s

    def forget(self, rank: int) -> None:
        """It has said goodbye."""
        self._heard_s.pop(rank, None)

    def look(self, now_s: float) -> int | None:
        """A rank that has been silent for `limit_s` while another one spoke; of several the one that was so first."""
        was_away = now_s - self._looked_s > self.limit_s / 2
        self._looked_s = now_s
        if not self._heard_s:
            return None
        if now_s - max(self._heard_s.values()) > self.limit_s / 2:
            self._suspended = True
            return None
        if was_away or self._suspended:
            self.begin(self._heard_s, now_s)
            self._suspended = False
        first = min(self._heard_s, key=lambda rank: self._heard_s[rank])
        return first if now_s - self._heard_s[first] >= self.limit_s else None
