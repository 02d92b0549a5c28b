"""What a stage need not evaluate: cancelled runs and dead rows, as far as it has been told. Knows no MPI."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol


class Pruned(Protocol):
    """What the head says need not be evaluated. It may say so late, or never."""

    def is_cancelled(self, run_id: int) -> bool:
        """Called before a run and between its layers."""
        ...

    def rows(self, run_id: int) -> Sequence[int]:
        """Called before a run: the indices of its dead rows."""
        ...


class LocalPrunings:
    """Pruned, told in this process. `listen` is called between layers, before the question is answered."""

    def __init__(self, listen: Callable[[], object] = lambda: None) -> None:
        self.listen = listen
        self.cancelled: set[int] = set()
        self.pruned: dict[int, set[int]] = {}

    def cancel(self, run_ids: Iterable[int]) -> None:
        self.cancelled.update(run_ids)

    def prune(self, rows: Mapping[int, Iterable[int]]) -> None:
        for run_id, dead in rows.items():
            self.pruned.setdefault(run_id, set()).update(dead)

    def is_cancelled(self, run_id: int) -> bool:
        self.listen()
        return run_id in self.cancelled

    def rows(self, run_id: int) -> Sequence[int]:
        return sorted(self.pruned.get(run_id, ()))

    def forget_before(self, run_id: int) -> None:
        """Drop what concerns older runs: runs come in the order of their ids."""
        self.cancelled = {known for known in self.cancelled if known >= run_id}
        self.pruned = {known: rows for known, rows in self.pruned.items() if known >= run_id}
