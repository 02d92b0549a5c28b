"""Which rank has sent nothing for too long. Knows the times that it is given; no socket and no clock."""

from collections.abc import Iterable


class HeartbeatMonitor:
    """For ranks that should be heard several times within `limit_s`.

    When no rank is heard, or `look` was not called in time, the whole job was suspended (Ctrl-Z, a closed laptop). Then
    no rank is at fault, and every rank's time starts again when one is heard.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._heard_s: dict[int, float] = {}
        self._looked_s = -1.0
        self._suspended = False

    @property
    def look_s(self) -> float:
        """Seconds between calls of `look`."""
        return self.limit_s / 12

    def begin(self, ranks: Iterable[int], now_s: float) -> None:
        """Monitor these ranks from now on."""
        self._heard_s = dict.fromkeys(ranks, now_s)
        self._looked_s = now_s

    def hear(self, rank: int, now_s: float) -> None:
        if rank in self._heard_s:
            self._heard_s[rank] = now_s

    def forget(self, rank: int) -> None:
        """Stop monitoring a rank that leaves in order."""
        self._heard_s.pop(rank, None)

    def look(self, now_s: float) -> int | None:
        """The rank that has been silent the longest, if for `limit_s` while another one was heard; else None."""
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
