"""What heartbeats show: a rank that sends none, and a message that one rank sent and the next has not received.

Knows the times and counts that it is given; no socket and no clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


class HeartbeatMonitor:
    """Finds a rank without heartbeats for `limit_s`.

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


@dataclass(slots=True)
class Flow:
    """A rank's part in a pipeline: how many messages it has received from `source` and passed on to `dest`, and whether
    it waits for the next one, so that MPI moves messages. The head reports none."""

    source: int = -1
    dest: int = -1
    n_taken: int = 0
    n_passed: int = 0
    waits: bool = False


class FlowMonitor:
    """Finds a cut link between two ranks, of which only MPI notices, and waits forever: ranks have watch connections to
    the sentinel, not to each other."""

    def __init__(self, n_beats: int) -> None:
        """`n_beats`: a message is lost if it has not arrived after so many heartbeats of the waiting rank. Heartbeats
        are counted, not seconds, because a job may be suspended."""
        self._n_beats = n_beats
        self._flows: dict[int, Flow] = {}
        self._n_waited: dict[int, int] = {}

    def hear(self, rank: int, flow: Flow) -> tuple[int, int] | None:
        """(rank, next rank) between which a message is lost, if the latter's report shows one."""
        before, self._flows[rank] = self._flows.get(rank), replace(flow)
        source = self._flows.get(flow.source)
        is_sent = source is not None and source.dest == rank and source.waits and source.n_passed > flow.n_taken
        lacks = is_sent and flow.waits and flow == before
        self._n_waited[rank] = self._n_waited.get(rank, 0) + 1 if lacks else 0
        return (flow.source, rank) if self._n_waited[rank] >= self._n_beats else None
