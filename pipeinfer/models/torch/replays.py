"""Runs filled up to a few sizes, so that on a GPU each size is recorded once, as a CUDA graph, and then replayed. Knows
what a run's inputs are, no layer.

A run's inputs are written into memory of the host, of which there are as many versions as runs may be under way: the
device copies a version, in the order of its work, to where the graph reads. A version is written again when the device
is done with the run that it was for.

No GPU has run the recording yet. Filling up is the same on a CPU, where tests look at what it must not change.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from pipeinfer.models.torch.device_queue import DeviceQueue, Mark, Past
from pipeinfer.models.torch.results import Result

MOST_ROWS = 64
"""Of a run that is filled up; larger ones, chunks of prompts, keep a GPU busy without."""

LEAST_CELLS = 256
AHEAD_ROWS, AHEAD_CELLS = (1, 2, 4, 8), 4096
"""Of runs that are recorded when a model is loaded; others are when they are first met, which takes some runs' time."""

N_WARM_UP = 2
"""Runs before a recording: libraries choose their kernels and buffers then."""

N_VERSIONS = 2
"""Runs that may be under way on the device while the host prepares none."""


class Inputs(NamedTuple):
    """cells     (n_rows,), where keys and values go
    wanted    (n_wanted,), the rows whose logits are wanted; on a last slice
    rows      (n_rows, n_embd), the residual stream before the slice; no rows where it is on the device
    cos, sin  (n_rows, 1, n_rot)
    seen      (n_rows, n_cells), which cells each row sees; or their numbers, in order, and -1 behind them
    """

    cells: torch.Tensor
    wanted: torch.Tensor
    rows: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    seen: torch.Tensor


ROWS = Inputs._fields.index("rows")


@dataclass(slots=True)
class Version:
    """A run's inputs on the host, and where the device is done with them."""

    memory: torch.Tensor
    done: Mark = field(default_factory=Past)
    _views: "dict[Frame, Inputs]" = field(default_factory=dict)

    def views(self, frame: "Frame", queue: DeviceQueue) -> Inputs:
        """The memory as that frame's inputs, larger if need be."""
        if len(self.memory) < frame.n_bytes:
            self.memory = queue.host_memory((frame.n_bytes,), torch.uint8)
            self._views.clear()
        if frame not in self._views:
            self._views[frame] = frame.views(self.memory)
        return self._views[frame]


class Replays:
    """`compute` makes of inputs the residual stream after the slice. `spare`: the cell that rows of no use write to."""

    def __init__(
        self, compute: Callable[[Inputs], torch.Tensor], spare: int, queue: DeviceQueue, records: bool,
        most_recorded: int | None = None,
    ) -> None:  # fmt: skip
        """`most_recorded`: rows times cells of what is recorded; larger runs are filled up only. None: no limit."""
        self._compute, self._spare, self._queue, self._most_recorded = compute, spare, queue, most_recorded
        self._frames: dict[tuple[int, int], Frame] = {}
        self._recorder = Recorder() if records else None
        self._versions = [Version(torch.empty(0, dtype=torch.uint8)) for _ in range(N_VERSIONS)]

    def takes(self, n_rows: int) -> bool:
        return n_rows <= MOST_ROWS

    def record_ahead(self, like: Inputs) -> None:
        """What texts will need, so that none of them stands still for it: few rows, and cells up to some thousands."""
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

    def begin(
        self, inputs: Inputs, on_device: torch.Tensor | None,
        finish: Callable[[torch.Tensor], torch.Tensor] | None, result: Result[Any],
    ) -> Mark:  # fmt: skip
        """Of inputs on the host, of which `rows` may be `on_device`, the residual stream goes to the result, or what
        `finish` makes of the rows that are wanted; it is complete when the mark is past."""
        n_rows, n_cells = inputs.seen.shape
        size = _next_power(n_rows), min(self._spare, max(LEAST_CELLS, _next_power(n_cells)))
        frame, version = self._frame(inputs, size), self._versions[0]
        self._versions.append(self._versions.pop(0))
        version.done.synchronize()
        fill(version.views(frame, self._queue), inputs, self._spare)
        source, n_wanted = version.memory[: frame.n_bytes], len(inputs.wanted)

        def work() -> None:
            frame.read(source, on_device)
            after = frame.replay()
            result.take(finish(after.index_select(0, frame.inputs.wanted[:n_wanted])) if finish else after[:n_rows])

        self._queue.do(work)
        version.done = self._queue.mark()
        return version.done


class Frame:
    """Inputs of one size, at places on the device that do not change, and what is made of them."""

    def __init__(
        self, compute: Callable[[Inputs], torch.Tensor], like: Inputs, size: tuple[int, int], spare: int,
        queue: DeviceQueue, recorder: "Recorder | None",
    ) -> None:  # fmt: skip
        """`size`: rows and cells, of inputs as `like`."""
        n_rows, n_cells = size
        # the widest numbers first, so that each part begins where its numbers may
        self._parts = [(part.dtype, (n_rows, *part.shape[1:])) for part in like[:-1]]
        self._parts.append((like.seen.dtype, (n_rows, n_cells)))
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
        """The parts of bytes."""
        return Inputs(
            *(
                memory[first:end].view(dtype).view(shape)
                for (dtype, shape), first, end in zip(self._parts, self._ends, self._ends[1:], strict=False)
            )
        )

    def read(self, source: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Bytes of the host's; `rows` of the residual stream, if they are on the device."""
        if rows is None:
            self.memory.copy_(source, non_blocking=True)
            return
        first, end = self._ends[ROWS : ROWS + 2]
        self.memory[:first].copy_(source[:first], non_blocking=True)
        self.memory[end:].copy_(source[end:], non_blocking=True)
        self.inputs.rows[: len(rows)].copy_(rows)
        self.inputs.rows[len(rows) :].zero_()

    def replay(self) -> torch.Tensor:
        """(n_rows, n_embd), valid until the next time."""
        if self._graph is None:
            return self._compute(self.inputs)
        self._graph.replay()
        return self._out


class Recorder:
    """All recordings of a device. What one needs while it runs they share: each result is copied before the next
    runs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # one stream, as each has work space of the library's that multiplies
        self._aside = torch.cuda.Stream()

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """What is recorded, and where its result is when it ran."""
        current = torch.cuda.current_stream()
        self._aside.wait_stream(current)
        with torch.cuda.stream(self._aside):
            for _ in range(N_WARM_UP):
                compute()
        current.wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        # other threads may ask MPI for messages meanwhile, and it the device
        with torch.cuda.graph(graph, self._pool, self._aside, capture_error_mode="thread_local"):
            found = compute()
        return graph, found


def fill(frame: Inputs, inputs: Inputs, spare: int) -> None:
    """Put a run's rows in; those after them see some cells, whichever, and write to the spare one."""
    n_rows, n_cells = inputs.seen.shape
    for own, given in zip(frame[:-1], inputs[:-1], strict=True):
        if given is inputs.rows and not len(given):
            continue
        own[: len(given)] = given
        if len(given) < len(own):
            own[len(given) :] = 0
    is_mask = inputs.seen.dtype is torch.bool
    frame.seen[:n_rows, :n_cells] = inputs.seen
    frame.seen[:n_rows, n_cells:] = False if is_mask else -1
    if n_rows < len(frame.seen):
        frame.cells[n_rows:] = spare
        frame.seen[n_rows:] = True if is_mask else 0


def _next_power(n: int) -> int:
    return 1 << (n - 1).bit_length()
