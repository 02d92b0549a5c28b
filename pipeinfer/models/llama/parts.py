"""A batch in parts that libllama evaluates one by one. Knows batches, no library."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeinfer.core.interfaces import Batch

Indices = npt.NDArray[np.intp]


def blocks_of(batch: Batch) -> list[tuple[int, int]]:
    """Of a batch of whole blocks of a span, the rows [start, end) of each."""
    assert batch.span, "rows that are no blocks"
    first, n_rows = int(batch.positions[0]), len(batch.positions)
    edges = [edge - first for edge in batch.span.edges if first <= edge <= first + n_rows]
    assert edges[0] == 0 and edges[-1] == n_rows, f"rows {first} and {edges} on are no whole blocks"
    return list(pairwise(edges))


def apart(batch: Batch, exact: bool) -> list[Indices]:
    """The rows of each part where layers have states: sums follow from how many rows of a sequence come at once, and
    libllama reorders a batch of several sequences. Whole blocks; else each row, or without `exact` each sequence."""
    if batch.span:
        return [np.arange(start, end) for start, end in blocks_of(batch)]
    if exact:
        return [np.array([row]) for row in range(len(batch.positions))]
    firsts = np.array([seqs[0] for seqs in batch.seqs])
    return [np.flatnonzero(firsts == seq) for seq in dict.fromkeys(firsts.tolist())]


def part_of(batch: Batch, rows: Indices) -> Batch:
    """These rows as a batch of their own, each in its first sequence alone."""
    return Batch(
        batch.tokens[rows],
        batch.positions[rows],
        [batch.seqs[row][:1] for row in rows],
        None if batch.hidden is None else batch.hidden[rows],
        batch.wanted[rows],
    )
