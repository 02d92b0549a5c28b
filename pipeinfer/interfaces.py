"""The Protocols that join the core to models, clusters and tests. Knows no implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pipeinfer.requests import Request
    from pipeinfer.runs import KvOp, Run, Verdict
    from pipeinfer.tree import Node

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(slots=True)
class Batch:
    """The rows one stage evaluates together, in topological order.

    tokens, positions  (n_rows,) int32
    seqs               per row its sequence ids, the one it sees first
    hidden             (n_rows, n_embd) float32, the residual stream before this stage; None on the first stage
    wanted             (n_rows,) bool, rows whose logits the last stage must return
    n_prompt           more than 0: the rows are whole blocks of a prompt of which so many rows are evaluated in blocks
                       (see `blocks`), all in the same one sequence, and none is wanted
    """

    tokens: IntArray
    positions: IntArray
    seqs: list[tuple[int, ...]]
    hidden: FloatArray | None
    wanted: npt.NDArray[np.bool_]
    n_prompt: int = 0


class StageModel(Protocol):
    """A contiguous slice of layers with its KV cache: what one stage computes."""

    n_embd: int
    is_last: bool

    def apply(self, ops: Sequence[KvOp]) -> None:
        """Change the KV cache. Ops arrive in order, each exactly once."""
        ...

    def next_position(self, seq: int) -> int:
        """The position a sequence's next row must have: its last cell's + 1, or 0 when it is empty."""
        ...

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        """The residual stream after the slice (n_rows, n_embd), or, on the last stage, the logits (n_wanted, n_vocab).

        `stop` is asked between layers; once it answers True the evaluation ends, leaves the KV cache as it was before,
        and returns None. The result is only valid until the next call; the caller may change it.
        """
        ...


class Pipeline(Protocol):
    """All stages as the head sees them. Runs are evaluated in the order of submission."""

    n_stages: int

    def submit(self, run: Run) -> None:
        """Send a run off. Never blocks."""
        ...

    def poll(self) -> Verdict | None:
        """The next verdict if one has come. Verdicts come in the order of submission."""
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when a verdict may have come or the time is over; raise `StopRequested` when the user asks to stop."""
        ...

    def cancel(self, run_ids: Sequence[int]) -> None:
        """Tell every stage that these runs need no evaluation. Their KvOps still apply, their verdicts still come."""
        ...


@dataclass(frozen=True, slots=True)
class Guess:
    """A token the draft thinks may follow a node, with its probability under the draft."""

    token: int
    probability: float


class Drafter(Protocol):
    """Guesses what follows a node, for any number of requests."""

    def expand(
        self, request: Request, nodes: Sequence[Node], width: int, interrupted: Callable[[], bool]
    ) -> list[list[Guess]] | None:
        """For each node up to `width` guesses, most likely first; None when `interrupted` answered True meanwhile."""
        ...

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        """The request's root moved along `path` (old root first, new root last); all other branches are dead."""
        ...

    def close(self, request: Request) -> None:
        """The request has ended: free what it holds."""
        ...


class Refiner(Protocol):
    """A larger draft on a pipeline of its own: says what follows nodes that a smaller draft has guessed."""

    @property
    def has_room(self) -> bool:
        """Whether another question would not only lie in a queue."""
        ...

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come."""
        ...

    def ask(self, request: Request, nodes: Sequence[Node]) -> bool:
        """Ask what follows these nodes, the most important first; False if no answer will come of it. Never blocks."""
        ...

    def poll(self) -> list[tuple[Request, Node, list[Guess] | None]] | None:
        """The next answer if one has come, without what died meanwhile; guesses are likeliest first, None where there
        was no room for the node."""
        ...

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        """The request's root moved along `path` (old root first, new root last); all other branches are dead."""
        ...

    def close(self, request: Request) -> None:
        """The request has ended: free what it holds."""
        ...

    def audit(self, live: Mapping[int, Sequence[Node]]) -> None:
        """Raise AssertionError if a sequence leaks; `live`: the live nodes of each open request."""
        ...


class Clock(Protocol):
    def __call__(self) -> float:
        """Seconds, monotonic."""
        ...
