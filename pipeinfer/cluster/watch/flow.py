"""Whether the messages of one rank reach the next. Knows the counts that ranks report; no socket and no clock.

Ranks have watch connections to the sentinel, not to each other. If the link between two ranks is cut, only MPI notices,
and it waits forever.
"""

from dataclasses import dataclass, replace


@dataclass(slots=True)
class Flow:
    """A rank's part in a pipeline: how many messages it has received from `source` and passed on to `dest`, and whether
    it waits for the next one, so that MPI moves messages. The head reports none."""

    source: int = -1
    dest: int = -1
    n_taken: int = 0
    n_passed: int = 0
    waits: bool = False


class Flows:
    """The last report of every rank."""

    def __init__(self, n_beats: int) -> None:
        """`n_beats`: a message is lost if it has not arrived after so many heartbeats of the waiting rank. Heartbeats
        are counted, not seconds, because a job may be suspended."""
        self._n_beats = n_beats
        self._said: dict[int, Flow] = {}
        self._n_waited: dict[int, int] = {}

    def hear(self, rank: int, flow: Flow) -> tuple[int, int] | None:
        """(rank, next rank) between which a message is lost, if the latter's report shows one."""
        before, self._said[rank] = self._said.get(rank), replace(flow)
        source = self._said.get(flow.source)
        lacks = (
            source is not None and source.dest == rank and source.waits and source.n_passed > flow.n_taken
            and flow.waits and flow == before
        )  # fmt: skip
        self._n_waited[rank] = self._n_waited.get(rank, 0) + 1 if lacks else 0
        return (flow.source, rank) if self._n_waited[rank] >= self._n_beats else None
