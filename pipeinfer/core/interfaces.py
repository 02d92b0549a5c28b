"""The Protocols that join the core to models, clusters and tests. Knows no implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pipeinfer.core.kv.blocks import Span
    from pipeinfer.core.requests import Request
    from pipeinfer.core.runs import Guess, GuessVerdict, KvOp, Run, Verdict
    from pipeinfer.core.tree import Node

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class DeviceRows(Protocol):
    """Activations (n_rows, n_embd) in a device's memory, as they travel."""

    @property
    def memory(self) -> Any:
        """Their bytes, which MPI may send."""
        ...

    def pick(self, rows: Sequence[int]) -> DeviceRows:
        """These rows."""
        ...

    def spread(self, rows: Sequence[int], n_rows: int) -> DeviceRows:
        """Of `n_rows` rows these; the others are zero."""
        ...


@dataclass(slots=True)
class Batch:
    """The rows one stage evaluates together, in topological order.

    tokens, positions  (n_rows,) int32
    seqs               per row its sequence ids, the one it sees first
    hidden             (n_rows, n_embd) float32, the residual stream before this stage; None on the first stage
    wanted             (n_rows,) bool, rows whose logits the last stage must return
    span               the rows are whole blocks of it (see `blocks`), all in the same one sequence, and none is wanted
    on_device          instead of `hidden`, for a model that `DeviceStage`
    """

    tokens: IntArray
    positions: IntArray
    seqs: list[tuple[int, ...]]
    hidden: FloatArray | None
    wanted: npt.NDArray[np.bool_]
    span: Span | None = None
    on_device: DeviceRows | None = None

    @property
    def begins_blocks(self) -> bool:
        """Whether these are the first of a span's blocks."""
        return self.span is not None and int(self.positions[0]) == self.span.start


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


Rows = TypeVar("Rows", FloatArray, DeviceRows, covariant=True)


class StageFuture(Protocol[Rows]):
    """A batch that a device has been told to evaluate."""

    @property
    def is_done(self) -> bool: ...

    def result(self) -> Rows:
        """What `evaluate` would have returned. Waits for the device; the caller may change it."""
        ...


@runtime_checkable
class AsyncStage(Protocol):
    """A StageModel that may be given its next batch before the last one's result is there."""

    def begin(self, batch: Batch, stop: Callable[[], bool]) -> StageFuture[FloatArray] | None:
        """As `evaluate`, but for the result, which comes later; `stop` is asked before this returns. The next batch,
        and the operations before it, may come at once: they are done in the order in which they came."""
        ...


@runtime_checkable
class DeviceStage(AsyncStage, Protocol):
    """A StageModel that may take activations from its device's memory, and leave them there, for MPI to move."""

    def device_memory(self, n_bytes: int) -> Any:
        """Room on the device, which nothing there uses any more, for MPI to receive into."""
        ...

    def device_rows(self, memory: Any, n_rows: int, rounded: bool) -> DeviceRows:
        """What was received there, in float32 or `rounded` to bf16. The room must be left alone until the run that it
        is for is done, or was stopped."""
        ...

    def begin_on_device(self, batch: Batch, stop: Callable[[], bool], rounded: bool) -> StageFuture[DeviceRows] | None:
        """As `begin`, with the result on the device. Not for a last slice."""
        ...


class LoadedModel(StageModel, Protocol):
    """A StageModel as it is held between requests."""

    n_vocab: int

    def clear(self) -> None:
        """Empty the KV cache."""
        ...

    def close(self) -> None:
        """Free it. May be called twice."""
        ...


class ConstraintFailed(Exception):
    """A constraint takes more time or memory than it may."""


class Allowed(Protocol):
    """Which tokens may follow one text. Raises ConstraintFailed, for the same text always or never."""

    def has(self, token: int) -> bool: ...

    def restrict(self, logits: FloatArray) -> None:
        """Make logits (n_vocab,) -inf but for the tokens that may follow. One is left at least: where nothing may
        follow, the end of the text."""
        ...


class Constraint(Protocol):
    """What the output of one request may be. Several threads may ask."""

    def after(self, output: Sequence[int]) -> Allowed: ...


Answer = TypeVar("Answer", bound="Verdict | GuessVerdict", covariant=True)


class Pipeline(Protocol[Answer]):
    """All stages of one level as the head sees them. Runs are evaluated in the order of submission."""

    @property
    def n_stages(self) -> int: ...

    @property
    def is_at_head(self) -> bool:
        """Whether the head evaluates all of it, and can do nothing else meanwhile."""
        ...

    def submit(self, run: Run) -> None:
        """Send a run off. Never blocks."""
        ...

    def poll(self) -> Answer | None:
        """The next verdict if one has come. Verdicts come in the order of submission."""
        ...

    def cancel(self, run_ids: Sequence[int]) -> None:
        """Tell every stage that these runs need no evaluation. Their KvOps still apply, their verdicts still come."""
        ...

    def prune(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Tell every stage that these rows (run id -> indices) need no evaluation where their run has not begun."""
        ...


class Waiter(Protocol):
    """How the head waits when it has nothing to do."""

    def wait(self, pipelines: Sequence[Any], timeout_s: float | None = None) -> None:
        """Return when a verdict of one of the pipelines, of this waiter's kind, may have come or the time is over.

        Raises StopRequested when the user asks to stop.
        """
        ...


class Drafter(Protocol):
    """Guesses what follows a node, for any number of requests."""

    @property
    def can_open(self) -> bool:
        """Whether there is room for another request."""
        ...

    def open(self, request: Request) -> None:
        """A request begins; there must be room for it, or its `prefix_hit` moves."""
        ...

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> Mapping[Node, list[Guess]] | None:
        """Up to so many guesses after each node, likeliest first. Nodes for which there was no room are missing.

        None when `interrupted` answered True meanwhile.
        """
        ...

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        """The request's root moved along `path` (old root first, new root last); all other branches are dead."""
        ...

    def close(self, request: Request) -> None:
        """The request has ended: free what it holds, but for its first `n_retained` tokens as far as they are here."""
        ...

    def forget(self, request: Request) -> None:
        """Free what a request has left."""
        ...


class Clock(Protocol):
    def __call__(self) -> float:
        """Seconds, monotonic."""
        ...
