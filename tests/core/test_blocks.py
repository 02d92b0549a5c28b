"""Where prompts are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pipeinfer.core.blocks import BLOCK, LARGEST, Span, rows_in_blocks


def test_blocks_follow_from_the_length_and_none_is_too_small() -> None:
    for n_rows in range(BLOCK, 5 * BLOCK):
        edges = Span(0, n_rows).edges
        assert edges[0] == 0 and edges[-1] == n_rows
        assert all(start % BLOCK == 0 and BLOCK <= end - start <= LARGEST for start, end in pairwise(edges))
        assert all(end - start == BLOCK for start, end in pairwise(edges[:-1]))


def test_short_prompts_have_none() -> None:
    assert [rows_in_blocks(n) for n in (1, 2, BLOCK, BLOCK + 1, 1000)] == [0, 0, 0, BLOCK, 999]


@pytest.mark.parametrize("n_chunk", [1, 7, 63, 64, 65, 127, 128, 129, 500, 5000])
def test_chunks_are_whole_blocks(n_chunk: int) -> None:
    for n_rows in (64, 65, 127, 128, 129, 191, 192, 640, 1000):
        edges, at = Span(0, n_rows).edges, 0
        while at < n_rows:
            end = Span(0, n_rows).chunk_end(at, n_chunk)
            assert end in edges and at < end <= at + max(n_chunk, LARGEST)
            at = end
