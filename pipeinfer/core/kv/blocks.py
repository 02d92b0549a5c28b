"""Where a prompt is cut so that its rows are always computed in the same way. Knows positions, no model.

Exact numerics ask that a row has the same bits however the work was cut. For guesses that takes kernels that do not
look at the batch; a prompt is known beforehand, so that it may take the faster ones, which do, as long as its batches
follow from its length alone: blocks of BLOCK rows, the last of up to 2 BLOCK - 1, each evaluated by itself after the
blocks before it. A prompt with fewer rows than one block, and the last token of any, whose row is the tree's root, are
evaluated as guesses are.

A text that goes on from cells that are there has its new rows in blocks of their own, if they are as many as a block.
"""

from __future__ import annotations

from typing import NamedTuple

BLOCK = 64
"""libggml multiplies and attends in tiles from so many rows on."""

LARGEST = 2 * BLOCK - 1


class Span(NamedTuple):
    """Rows [start, end) of a text that are evaluated in blocks, the first of which begins at `start`."""

    start: int
    end: int

    @property
    def edges(self) -> list[int]:
        """Where its blocks begin, and where the last one ends."""
        return [self.start + edge for edge in block_edges(self.end - self.start)]

    def floor(self, at: int) -> int:
        """Where the block begins that row `at` is in; `at` if it is in none."""
        if not self.start < at < self.end:
            return at
        n_blocks = (self.end - self.start) // BLOCK
        return self.start + min((at - self.start) // BLOCK, n_blocks - 1) * BLOCK

    def chunk_end(self, at: int, n_chunk: int) -> int:
        """The end of the chunk from row `at` on: whole blocks, as many as `n_chunk` rows hold, but one at least."""
        return self.start + chunk_end(self.end - self.start, at - self.start, n_chunk)


def spans_of(n_tokens: int) -> tuple[Span, ...]:
    """Those of a prompt by itself."""
    n_rows = rows_in_blocks(n_tokens)
    return (Span(0, n_rows),) if n_rows else ()


def rows_in_blocks(n_tokens: int) -> int:
    """How many of a prompt's first rows are evaluated in blocks: all but the last, or none."""
    return n_tokens - 1 if n_tokens > BLOCK else 0


def block_edges(n_rows: int) -> list[int]:
    """Where the blocks of `n_rows` rows begin, and where the last one ends."""
    assert n_rows >= BLOCK, f"{n_rows} rows are no block"
    return [*range(0, n_rows - BLOCK + 1, BLOCK), n_rows]


def chunk_end(n_rows: int, start: int, n_chunk: int) -> int:
    """The end of the chunk from `start` on: whole blocks, as many as `n_chunk` rows hold, but one at least."""
    later = [edge for edge in block_edges(n_rows) if edge > start]
    return max((edge for edge in later if edge <= start + n_chunk), default=later[0])
