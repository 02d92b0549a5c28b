"""Runs padded to a few sizes, so that on a GPU each size is recorded once, as a CUDA graph, and then replayed. Knows
the inputs of a run, no layer.

A run's inputs are written into a staging buffer on the host; there are as many as runs may be in flight. The device
copies it to the graph's inputs, in the order of its work, and has finished the run when it is written again.

No GPU has run the recording yet. Padding is the same on a CPU, where tests cover it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import NamedTuple, TypeAlias

import torch

from pipeinfer.models.torch.device import DeviceQueue, DoneMark, Mark, PendingRows

MOST_ROWS = 64  # of a padded run; larger ones, chunks of prompts, keep a GPU busy without a graph
LEAST_CELLS = 256
AHEAD_ROWS, AHEAD_CELLS = (1, 2, 4, 8), 4096
"""Sizes that are recorded when a model is loaded; others are at their first run, which takes the time of some runs."""

N_WARM_UP = 2  # runs before a recording: libraries choose their kernels and buffers then
N_STAGING = 2  # runs that may be in flight on the device


class Inputs(NamedTuple):
    """`cos`, `sin`: (n_rows, 1, n_rot)."""

    cells: torch.Tensor  # (n_rows,), of the rows' keys and values
    wanted: torch.Tensor  # (n_wanted,), the rows whose logits are wanted; on a last slice
    rows: torch.Tensor  # (n_rows, n_embd), the residual stream before the slice; no rows if it is on the device
    cos: torch.Tensor
    sin: torch.Tensor
    visible: torch.Tensor  # (n_rows, n_cells), which cells each row sees; or their numbers in order, then -1


Compute = Callable[[Inputs], torch.Tensor]
Finish = Callable[[torch.Tensor], torch.Tensor]
MayRecord: TypeAlias = "Recorder | None"

ROWS = Inputs._fields.index("rows")


@dataclass(slots=True)
class StagingBuffer:
    """A run's inputs on the host; the device has read them behind the mark `done`."""

    memory: torch.Tensor
    done: Mark = field(default_factory=DoneMark)
    _views: "dict[Frame, Inputs]" = field(default_factory=dict)

    def views(self, frame: "Frame", queue: DeviceQueue) -> Inputs:
        if len(self.memory) < frame.n_bytes:
            self.memory = queue.host_memory((frame.n_bytes,), torch.uint8)
            self._views.clear()
        if frame not in self._views:
            self._views[frame] = frame.views(self.memory)
        return self._views[frame]


class Replays:
    """`compute`: from inputs the residual stream after the slice. `spare`: the cell that padding writes to."""

    def __init__(
        self, compute: Compute, spare: int, queue: DeviceQueue, records: bool, most_recorded: int | None = None
    ) -> None:
        """`most_recorded`: rows times cells of the largest recording; larger runs are only padded. None: no limit."""
        self._compute, self._spare, self._queue, self._most_recorded = compute, spare, queue, most_recorded
        self._frames: dict[tuple[int, int], Frame] = {}
        self._recorder = Recorder() if records else None
        self._staging = [StagingBuffer(torch.empty(0, dtype=torch.uint8)) for _ in range(N_STAGING)]

    def record_ahead(self, like: Inputs) -> None:
        """Record the sizes that most texts need: few rows, and cells up to some thousands."""
        n_cells, most = LEAST_CELLS, min(self._spare, AHEAD_CELLS)
        while True:
            for n_rows in AHEAD_ROWS:
                self._frame(like, (n_rows, min(self._spare, n_cells)))
            if n_cells >= most:
                return
            n_cells *= 2

    def _frame(self, like: Inputs, size: tuple[int, int]) -> "Frame":
        if size not in self._frames:
            is_small = self._most_recorded is None or size[0] * size[1] <= self._most_recorded
            recorder = self._recorder if is_small else None
            self._frames[size] = Frame(self._compute, like, size, self._spare, self._queue, recorder)
        return self._frames[size]

    def begin(self, inputs: Inputs, on_device: torch.Tensor | None, finish: Finish | None, result: PendingRows) -> Mark:
        """Give the result the residual stream, or `finish` of the wanted rows; complete behind the mark. `on_device`:
        replaces `inputs.rows`."""
        n_rows, n_cells = inputs.visible.shape
        size = _next_power(n_rows), min(self._spare, max(LEAST_CELLS, _next_power(n_cells)))
        frame, staging = self._frame(inputs, size), self._staging[0]
        self._staging.append(self._staging.pop(0))
        staging.done.synchronize()
        fill(staging.views(frame, self._queue), inputs, self._spare)
        source, n_wanted = staging.memory[: frame.n_bytes], len(inputs.wanted)

        def work() -> None:
            frame.read(source, on_device)
            after = frame.replay()
            result.take(finish(after.index_select(0, frame.inputs.wanted[:n_wanted])) if finish else after[:n_rows])

        self._queue.do(work)
        staging.done = self._queue.mark()
        return staging.done


class Frame:
    """Inputs of one size, at fixed places on the device, and their recording."""

    def __init__(
        self, compute: Compute, like: Inputs, size: tuple[int, int], spare: int, queue: DeviceQueue, recorder: MayRecord
    ) -> None:
        """`size`: rows and cells, of inputs as `like`."""
        n_rows, n_cells = size
        # the widest numbers first, so that each part begins where its numbers may
        self._parts = [(part.dtype, (n_rows, *part.shape[1:])) for part in like[:-1]]
        self._parts.append((like.visible.dtype, (n_rows, n_cells)))
        sizes = [dtype.itemsize * prod(shape) for dtype, shape in self._parts]
        self._ends = list(accumulate(sizes, initial=0))
        self.n_bytes = self._ends[-1]
        neutral = torch.zeros(self.n_bytes, dtype=torch.uint8)
        fill(self.views(neutral), Inputs(*(part[:0] for part in like)), spare)
        self.memory = neutral.to(queue.device)
        self.inputs, self._compute = self.views(self.memory), compute
        self._graph: torch.cuda.CUDAGraph | None = None
        if recorder:
            self._graph, self._out = recorder.record(lambda: compute(self.inputs))

    def views(self, memory: torch.Tensor) -> Inputs:
        parts = zip(self._parts, self._ends, self._ends[1:], strict=False)
        return Inputs(*(memory[first:end].view(dtype).view(shape) for (dtype, shape), first, end in parts))

    def read(self, source: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Copy the host's bytes in; `rows`: the residual stream, if it is on the device."""
        if rows is None:
            self.memory.copy_(source, non_blocking=True)
            return
        first, end = self._ends[ROWS : ROWS + 2]
        self.memory[:first].copy_(source[:first], non_blocking=True)
        self.memory[end:].copy_(source[end:], non_blocking=True)
        self.inputs.rows[: len(rows)].copy_(rows)
        self.inputs.rows[len(rows) :].zero_()

    def replay(self) -> torch.Tensor:
        """(n_rows, n_embd), valid until the next call."""
        if self._graph is None:
            return self._compute(self.inputs)
        self._graph.replay()
        return self._out


class Recorder:
    """All recordings of a device. They share their temporary memory: each result is copied before the next runs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # one stream, as cuBLAS has a work space for each
        self._aside = torch.cuda.Stream()

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """The recording, and the place of its result."""
        current = torch.cuda.current_stream()
        self._aside.wait_stream(current)
        with torch.cuda.stream(self._aside):
            for _ in range(N_WARM_UP):
                compute()
        current.wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        # meanwhile other threads may call MPI, and MPI the device
        with torch.cuda.graph(graph, self._pool, self._aside, capture_error_mode="thread_local"):
            result = compute()
        return graph, result


def fill(frame: Inputs, inputs: Inputs, spare: int) -> None:
    """Copy a run's rows in; the padding behind them sees some cells and writes to the spare one."""
    n_rows, n_cells = inputs.visible.shape
    for target, source in zip(frame[:-1], inputs[:-1], strict=True):
        if source is inputs.rows and not len(source):
            continue
        target[: len(source)] = source
        if len(source) < len(target):
            target[len(source) :] = 0
    is_mask = inputs.visible.dtype is torch.bool
    frame.visible[:n_rows, :n_cells] = inputs.visible
    frame.visible[:n_rows, n_cells:] = False if is_mask else -1
    if n_rows < len(frame.visible):
        frame.cells[n_rows:] = spare
        frame.visible[n_rows:] = True if is_mask else 0


def _next_power(n: int) -> int:
    return 1 << (n - 1).bit_length()
