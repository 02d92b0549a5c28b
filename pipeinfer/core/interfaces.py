"""Protocols that models, clusters and tests implement. Knows no implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from pipeinfer.core.blocks import Span
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import BlockKey, Guess, GuessVerdict, KvOp, Run, Verdict
from pipeinfer.core.tree import Node
from pipeinfer.core.types import AdapterScales, FloatArray, IntArray


class DeviceRows(Protocol):
    """Activations (n_rows, n_embd) in a device's memory."""

    @property
    def memory(self) -> Any:
        """Their bytes, as MPI sends them."""

    def pick(self, rows: Sequence[int]) -> DeviceRows:
        """These rows."""

    def spread(self, rows: Sequence[int], n_rows: int) -> DeviceRows:
        """These rows, as rows `rows` of `n_rows`; the others are zero."""


@dataclass(slots=True)
class Batch:
    """The rows one stage evaluates together, in topological order."""

    tokens: IntArray  # (n_rows,)
    positions: IntArray  # (n_rows,)
    seqs: list[tuple[int, ...]]  # per row its sequence ids, first the one that it sees
    hidden: FloatArray | None  # (n_rows, n_embd) float32, the residual stream; None on the first stage
    wanted: npt.NDArray[np.bool_]  # (n_rows,) bool, rows whose logits the last stage must return
    span: Span | None = None  # the rows are whole blocks of it (see `blocks`), all in one sequence, and none is wanted
    adapters: AdapterScales | None = None  # of all rows; None: as the job says
    on_device: DeviceRows | None = None  # replaces `hidden` for a model that `DeviceStage`

    @property
    def begins_blocks(self) -> bool:
        """Whether the rows start with the span's first block."""
        return self.span is not None and int(self.positions[0]) == self.span.start


class StageModel(Protocol):
    """A contiguous slice of layers with its KV cache."""

    n_embd: int
    is_last: bool

    def apply(self, ops: Sequence[KvOp]) -> None:
        """Change the KV cache. Operations arrive in order, each once."""

    def next_position(self, seq: int) -> int:
        """The position of a sequence's next row: its last cell's + 1, or 0 if it is empty."""

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        """The residual stream after the slice (n_rows, n_embd), or, on the last stage, the logits (n_wanted, n_vocab).
        `stop` is called between layers; if it returns True, the evaluation leaves the KV cache as it was and returns
        None. The result is valid until the next call, and the caller may change it."""


@runtime_checkable
class CellStage(Protocol):
    """A StageModel whose cells can be taken out and put back, with the same bits. `has_states`: only all of a
    sequence's together."""

    has_states: bool

    def next_position(self, seq: int) -> int: ...

    def save_cells(self, seq: int, first: int, end: int) -> npt.NDArray[np.uint8]:
        """The cells of a sequence at positions [first, end), BLOCK or up to LARGEST, as bytes. With states it ends at
        `end`, and `first` is 0."""

    def load_cells(self, seq: int, cells: npt.NDArray[np.uint8]) -> None:
        """Put such cells, which follow those of the sequence, into it. There must be room for them."""


class CellBlock(NamedTuple):
    """`tokens`: those of its rows, on the last stage alone. `cells`: as a CellStage gives and takes them."""

    tokens: npt.NDArray[np.int32]
    cells: npt.NDArray[np.uint8]


class Blocks(Protocol):
    """Where a stage's blocks of cells are kept. One thread calls all but `keys`."""

    @property
    def keys(self) -> list[BlockKey]: ...

    def write(self, key: BlockKey, block: CellBlock) -> None:
        """Keep a block, unless it is there or larger than all blocks may be."""

    def read(self, key: BlockKey) -> CellBlock | None:
        """A block with the bits that were written; None if there is none."""

    def use(self, keys: Sequence[BlockKey]) -> None:
        """Note a use of these blocks, the first of which are removed last."""

    def close(self) -> None: ...


@runtime_checkable
class FeatureStage(Protocol):
    """A StageModel some of whose layers drafts read."""

    n_features: int  # of its layers, how many; 0: none

    @property
    def features(self) -> FloatArray:
        """(n_features, n_rows, n_embd), the residual stream after each, of the last `evaluate`; valid as its result."""


Rows = TypeVar("Rows", FloatArray, DeviceRows, covariant=True)


class StageFuture(Protocol[Rows]):
    """A batch that a device is evaluating."""

    @property
    def is_done(self) -> bool: ...

    def result(self) -> Rows:
        """What `evaluate` returns. Waits for the device."""


@runtime_checkable
class AsyncStage(Protocol):
    """A StageModel that takes further batches before the result of the last one is there."""

    def begin(self, batch: Batch, stop: Callable[[], bool]) -> StageFuture[FloatArray] | None:
        """Start what `evaluate` does; `stop` is called before this returns. The next batch and operations may follow at
        once, and are done in their order."""


@runtime_checkable
class DeviceStage(AsyncStage, Protocol):
    """A StageModel that takes activations from its device's memory and leaves them there."""

    def device_memory(self, n_bytes: int) -> Any:
        """Memory of the device, unused, that MPI may receive into."""

    def device_rows(self, memory: Any, n_rows: int, rounded: bool) -> DeviceRows:
        """What was received there, in float32 or `rounded` to bf16. The memory is in use until the batch ends."""

    def begin_on_device(self, batch: Batch, stop: Callable[[], bool], rounded: bool) -> StageFuture[DeviceRows] | None:
        """As `begin`, with the result on the device. Not on the last stage."""


class LoadedModel(StageModel, Protocol):
    """A StageModel that is kept between requests."""

    n_vocab: int

    def clear(self) -> None:
        """Empty the KV cache."""

    def close(self) -> None:
        """Free it; a second call does nothing."""


class HeadModel(LoadedModel, Protocol):
    """A draft's head that goes on from features of the target. In a batch each row is a token and, in `hidden`, what
    `encode` makes of the features of the token before it; where there are none yet, the row of `states` of that one."""

    def encode(self, features: FloatArray) -> FloatArray:
        """(n_rows, n) -> (n_rows, n_embd), which the caller may keep."""

    @property
    def states(self) -> FloatArray:
        """(n_rows, n_embd), of every row of the last `evaluate`. Valid until the next call."""


AnyVerdict = TypeVar("AnyVerdict", bound="Verdict | GuessVerdict", covariant=True)


class Pipeline(Protocol[AnyVerdict]):
    """All stages of one level, seen from rank 0. Runs are evaluated in the order of submission."""

    @property
    def n_stages(self) -> int: ...

    @property
    def is_at_head(self) -> bool:
        """Whether rank 0 evaluates all of it, and can do nothing else meanwhile."""

    def submit(self, run: Run) -> None:
        """Send a run. Never blocks."""

    def poll(self) -> AnyVerdict | None:
        """The next verdict, in the order of submission; None if it has not come."""

    def cancel(self, run_ids: Sequence[int]) -> None:
        """Tell all stages not to evaluate these runs. Their operations still apply, and their verdicts still come."""

    def prune(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Tell all stages to leave out these rows (run id -> indices) of runs that they have not begun."""


class Waiter(Protocol):
    """How rank 0 waits when it has nothing to do."""

    def wait(self, pipelines: Sequence[Any], timeout_s: float | None = None) -> None:
        """Return when a verdict of one of the pipelines, all of the waiter's kind, may have come, or after the timeout.
        Raises StopRequested when the user asks to stop."""


class Drafter(Protocol):
    """A draft in this process, for any number of requests."""

    @property
    def can_open(self) -> bool:
        """Whether there is room for another request."""

    def open(self, request: Request) -> None:
        """Open a request. There must be room for it, or its `prefix_hit` moves."""

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> Mapping[Node, list[Guess]] | None:
        """Up to so many guesses after each node, likeliest first. Nodes for which there was no room are missing. None
        when `interrupted` answered True meanwhile."""

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        """The request's root moved along `path`, from the old root to the new one; other branches are dead."""

    def close(self, request: Request) -> None:
        """Free what the request holds, but for its first `n_retained` tokens."""

    def forget(self, request: Request) -> None:
        """Free what a finished request has retained."""


@runtime_checkable
class FeatureDrafter(Drafter, Protocol):
    """A draft that reads what the target computes."""

    def read(self, request: Request, start: int, nodes: Sequence[Node], features: FloatArray) -> None:
        """The target has evaluated committed tokens from position `start` on and then `nodes`, some of which may be
        dead. `features`: (n_rows, n) of these rows, which may be kept. Called before the nodes settle."""


@runtime_checkable
class InstantDrafter(Drafter, Protocol):
    """A draft that knows some guesses at once."""

    def look_up(self, request: Request, node: Node) -> tuple[Guess | None, bool]:
        """The guess after a node that takes no time, and whether `expand` would find no other."""
