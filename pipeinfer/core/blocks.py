"""Where a prompt is cut into blocks, so that its rows always have the same bits. Knows positions, no model.

Exact numerics evaluate guesses with kernels that do not depend on the batch. Prompts can use faster kernels, which do,
if their batches follow from their length alone: blocks of BLOCK rows, the last of up to 2 BLOCK - 1, each evaluated by
itself, in order. A prompt shorter than a block, and the last token of any, the tree's root, are evaluated as guesses.

A text that continues cached cells has its new rows in blocks of their own, if they fill one."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

BLOCK = 64  # rows from which libggml uses tiled kernels
LARGEST = 2 * BLOCK - 1


class Span(NamedTuple):
    """Rows [start, end) of a text, evaluated in blocks from `start` on."""

    start: int
    end: int

    @property
    def edges(self) -> list[int]:
        """The starts of its blocks, and the end of the last one."""
        assert self.end - self.start >= BLOCK, f"{self.end - self.start} rows are no block"
        return [*range(self.start, self.end - BLOCK + 1, BLOCK), self.end]

    def floor(self, at: int) -> int:
        """The start of the block that has row `at`; `at` if none has."""
        if not self.start < at < self.end:
            return at
        n_blocks = (self.end - self.start) // BLOCK
        return self.start + min((at - self.start) // BLOCK, n_blocks - 1) * BLOCK

    def chunk_end(self, at: int, n_chunk: int) -> int:
        """The end of the chunk from row `at` on: as many whole blocks as `n_chunk` rows hold, but at least one."""
        later = [edge for edge in self.edges if edge > at]
        return max((edge for edge in later if edge <= at + n_chunk), default=later[0])


def spans_of(n_tokens: int) -> tuple[Span, ...]:
    """The spans of a prompt by its length."""
    n_rows = rows_in_blocks(n_tokens)
    return (Span(0, n_rows),) if n_rows else ()


def rows_in_blocks(n_tokens: int) -> int:
    """Rows of a prompt that are evaluated in blocks: all but the last, or none."""
    return n_tokens - 1 if n_tokens > BLOCK else 0


def n_alike(there: Sequence[Span], ours: Sequence[Span], n: int) -> int:
    """How many of a text's first `n` rows are evaluated alike with both spans: in the same whole blocks, or in none."""
    for span, other in zip_longest(ours, there):
        if span and other and span.start == other.start:
            shorter, longer = sorted((span, other))
            n_same = n if span == other else shorter.floor(longer.floor(shorter.end))
        else:
            n_same = min(each.start for each in (span, other) if each)
        n = min(n, n_same)
        n = span.floor(n) if span else n
        if span != other:
            break
    return n


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the two texts' common prefix."""
    n = min(len(first), len(second))
    for start in range(0, n, BLOCK):  # slices are compared faster
        if first[start : start + BLOCK] != second[start : start + BLOCK]:
            end = min(n, start + BLOCK)
            at = next((at for at in range(start, end) if first[at] != second[at]), end)
            if at < end:
                return at
    return n


def spans_to_continue(spans: Sequence[Span], n_said: int, n_common: int, n_prompt: int) -> tuple[Span, ...]:
    """Spans of a prompt that shares its first `n_common` tokens with a text of `n_said` tokens and these `spans`, so
    that only new tokens have to be evaluated. They follow from the texts alone, whether anything is cached or not."""
    n_known, result = min(n_common, n_said - 1, n_prompt - 1), list[Span]()  # the last token is not evaluated
    for span in spans:
        if n_known < span.end:
            n_known = span.floor(n_known)
            result += [Span(span.start, n_known)] if n_known > span.start else []
            break
        result.append(span)
    if n_prompt - 1 - n_known >= BLOCK:
        result.append(Span(n_known, n_prompt - 1))
    return tuple(result)
