"""Whether what one rank passes on reaches the next one. Knows what ranks say of themselves; no socket and no clock.

Ranks hold connections to the sentinel, not to each other, so a way between two of them may be cut that only MPI takes,
which waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True)
class Flow:
    """A rank's part in a pipeline: how many messages it has taken in from `source` and passed on to `dest`, and whether
    it waits for the next one, so that MPI can move them. Of the head, which is not in it, nothing is known."""

    source: int = -1
    dest: int = -1
    n_taken: int = 0
    n_passed: int = 0
    waits: bool = False


class Flows:
    """What all ranks have said last."""

    def __init__(self, n_beats: int) -> None:
        """`n_beats`: a message is lost that is not there after its rank has said so often that it waits. Not after a
        time: a job may be suspended."""
        self._n_beats = n_beats
        self._said: dict[int, Flow] = {}
        self._n_waited: dict[int, int] = {}

    def hear(self, rank: int, flow: Flow) -> tuple[int, int] | None:
        """(rank, next rank) between which a message is lost, as the latter has just shown."""
        before, self._said[rank] = self._said.get(rank), replace(flow)
        source = self._said.get(flow.source)
        lacks = (
            source is not None and source.dest == rank and source.waits and source.n_passed > flow.n_taken
            and flow.waits and flow == before
        )  # fmt: skip
        self._n_waited[rank] = self._n_waited.get(rank, 0) + 1 if lacks else 0
        return (flow.source, rank) if self._n_waited[rank] >= self._n_beats else None
