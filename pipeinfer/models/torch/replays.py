"""Runs filled up to a few sizes, so that on a GPU each size is recorded once, as a CUDA graph, and then replayed. Knows
what a run's inputs are, no layer.

No GPU has run the recording yet. Filling up is the same on a CPU, where tests look at what it must not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

MOST_ROWS = 64
"""Of a run that is filled up; larger ones, chunks of prompts, keep a GPU busy without."""

LEAST_CELLS = 256
N_WARM_UP = 2
"""Runs before a recording: libraries choose their kernels and buffers then."""


class Inputs(NamedTuple):
    """rows      (n_rows, n_embd), the residual stream before the slice
    cos, sin  (n_rows, 1, n_rot / 2)
    cells     (n_rows,), where keys and values go
    seen      (n_rows, n_cells), which cells each row sees
    """

    rows: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    cells: torch.Tensor
    seen: torch.Tensor


class Replays:
    """`compute` makes of inputs the residual stream after the slice. `spare`: the cell that rows of no use write to."""

    def __init__(self, compute: Callable[[Inputs], torch.Tensor], spare: int, records: bool) -> None:
        self._compute, self._spare, self._records = compute, spare, records
        self._frames: dict[tuple[int, int], Frame] = {}

    def takes(self, inputs: Inputs) -> bool:
        return len(inputs.rows) <= MOST_ROWS

    def run(self, inputs: Inputs) -> torch.Tensor:
        """(n_rows, n_embd), valid until the next run."""
        n_rows, n_cells = inputs.seen.shape
        size = _next_power(n_rows), min(self._spare, max(LEAST_CELLS, _next_power(n_cells)))
        if size not in self._frames:
            self._frames[size] = Frame(self._compute, _filled(inputs, *size, self._spare), self._records)
        frame = self._frames[size]
        frame.take(inputs, self._spare)
        return frame.replay()[:n_rows]


class Frame:
    """Inputs of one size, at places that do not change, and what is made of them."""

    def __init__(self, compute: Callable[[Inputs], torch.Tensor], inputs: Inputs, records: bool) -> None:
        self.inputs, self._compute = inputs, compute
        self._graph: torch.cuda.CUDAGraph | None = None
        if records:
            self._record()

    def take(self, inputs: Inputs, spare: int) -> None:
        """Put a run's rows in; those after them see all cells, and write to the spare one."""
        n_rows, n_cells = inputs.seen.shape
        for own, given in zip(self.inputs[:3], inputs[:3], strict=True):
            own[:n_rows] = given
        self.inputs.cells[:n_rows] = inputs.cells
        self.inputs.cells[n_rows:] = spare
        self.inputs.seen[:n_rows, :n_cells] = inputs.seen
        self.inputs.seen[:n_rows, n_cells:] = False

    def replay(self) -> torch.Tensor:
        if self._graph is None:
            return self._compute(self.inputs)
        self._graph.replay()
        return self._out

    def _record(self) -> None:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(N_WARM_UP):
                self._compute(self.inputs)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = self._compute(self.inputs)


def _filled(inputs: Inputs, n_rows: int, n_cells: int, spare: int) -> Inputs:
    """Inputs of this size; before `take` nothing of them is of use."""
    rows, cos, sin = (each.new_zeros((n_rows, *each.shape[1:])) for each in inputs[:3])
    cells = inputs.cells.new_full((n_rows,), spare)
    return Inputs(rows, cos, sin, cells, inputs.seen.new_ones((n_rows, n_cells)))


def _next_power(n: int) -> int:
    return 1 << (n - 1).bit_length()
