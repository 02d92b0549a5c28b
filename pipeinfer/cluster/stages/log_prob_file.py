"""llama-perplexity's file of what a model predicts in a text, for comparisons with another model. Knows no MPI and no
model.

The file has `_logits_`; the numbers of tokens of a chunk, of the vocabulary and of chunks; and the tokens of all
chunks, all in 32 bits; then a row for each token of each chunk's second half but the first: log-probabilities of the
vocabulary, as a step and the least of them in float32, and in 16 bits how many steps each is above the least."""

import errno
import math
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from pipeinfer.cluster.verdicts import Comparison
from pipeinfer.core.samplers import total_weight
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import UserError
from pipeinfer.outputs import write_error
from pipeinfer.unfinished import open_locked

OPTION, AGAIN = "--kl-divergence-base", "write it again"
TOTALS = 0.9, 1.1  # of a row's probabilities, which are rounded
MAGIC, HEAD = b"_logits_", np.dtype([("magic", "S8"), ("n_ctx", "<i4"), ("n_vocab", "<i4"), ("n_chunks", "<i4")])
UNKNOWN = Comparison(-math.inf, 0.0, False)
LEAST_CHUNK = 4  # tokens: with fewer none is scored
N_STEPS, DEPTH = 65535, np.float32(16)  # logits further below the greatest are written as that far below


class LogProbFile:
    """An open file. `tokens`: (n_chunks, n_ctx), of all chunks as they are in the text."""

    def __init__(self, path: Path, is_new: bool = False) -> None:
        """`is_new`: its rows have yet to be written. Raises UserError for a file that is none, or damaged."""
        try:
            self._file = path.open("r+b" if is_new else "rb", buffering=0)
            head, n_bytes = self._file.read(HEAD.itemsize), path.stat().st_size
        except OSError as error:
            raise UserError(f"{OPTION} {path}: {error.strerror}; rank 0 and the last rank need it") from None
        if head[: len(MAGIC)] != MAGIC or len(head) < HEAD.itemsize:
            raise UserError(f"{OPTION} {path} does not begin with {MAGIC.decode()}; write it without --kl-divergence")
        _, self.n_ctx, self.n_vocab, self.n_chunks = np.frombuffer(head, HEAD)[0].tolist()
        if self.n_ctx < LEAST_CHUNK or self.n_vocab < 1 or self.n_chunks < 1:
            size = f"{self.n_chunks} chunks of {self.n_ctx} tokens, of a vocabulary of {self.n_vocab}"
            raise UserError(f"{OPTION} {path} is damaged: it has {size}; {AGAIN}")
        self._row_bytes = 8 + 4 * ((self.n_vocab + 1) // 2)
        self._rows_at = HEAD.itemsize + 4 * self.n_chunks * self.n_ctx
        n_whole = self._offset(self.n_chunks, self.n_ctx // 2 + 1)
        if not is_new and n_bytes < n_whole:
            raise UserError(f"{OPTION} {path} has {n_bytes} bytes of {n_whole}; {AGAIN}")

    @property
    def tokens(self) -> list[list[int]]:
        """Raises UserError where some are of no vocabulary of this size."""
        data = os.pread(self._file.fileno(), self._rows_at - HEAD.itemsize, HEAD.itemsize)
        tokens = np.frombuffer(data, "<i4").reshape(-1, self.n_ctx)
        if tokens.min() < 0 or tokens.max() >= self.n_vocab:
            reason = f"its tokens are from {tokens.min()} to {tokens.max()}, of a vocabulary of {self.n_vocab}"
            raise UserError(f"{OPTION} {self._file.name} is damaged: {reason}; {AGAIN}")
        return list(tokens.tolist())

    def _offset(self, chunk: int, position: int) -> int:
        """Of the row of the token at that position."""
        first = self.n_ctx // 2 + 1
        return self._rows_at + (chunk * (self.n_ctx - first) + position - first) * self._row_bytes

    def note(self, chunk: int, position: int, logits: FloatArray) -> None:
        """Write the row of the token at `position`, from the logits (n_vocab,) before it."""
        greatest = logits.max()
        least = max(logits.min(), greatest - DEPTH)
        row, step = np.zeros(self._row_bytes // 2, np.uint16), (greatest - least) / np.float32(N_STEPS)
        row[:4].view(np.float32)[:] = step, least - greatest - math.log(total_weight(logits, greatest))
        if step:
            row[4 : 4 + self.n_vocab] = np.rint((np.maximum(logits, least) - least) * (np.float32(1) / step))
        path, data = Path(self._file.name), row.tobytes()
        try:
            if os.pwrite(self._file.fileno(), data, self._offset(chunk, position)) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            path.unlink(missing_ok=True)  # rank 0 may be ended before it can
            raise write_error(path, OPTION, error) from None

    def compare(self, chunk: int, position: int, logits: FloatArray, token: int) -> Comparison:
        """`token`: of the text, at `position`. `UNKNOWN` where the file has no numbers there."""
        data = os.pread(self._file.fileno(), self._row_bytes, self._offset(chunk, position))
        row, greatest = np.frombuffer(data.ljust(self._row_bytes, b"\0"), np.uint16), logits.max()
        step, least = row[:4].view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            base = step * row[4 : 4 + self.n_vocab].astype(np.float32) + least
            total = np.exp(base).sum(dtype=np.float64)
        if len(data) < self._row_bytes or not (np.isfinite(base).all() and TOTALS[0] < total < TOTALS[1]):
            return UNKNOWN  # an error would leave the run unanswered
        counts = base > -DEPTH
        logprobs = logits[counts] - np.float32(greatest + math.log(total_weight(logits, greatest)))
        terms = np.exp(base[counts]) * (base[counts] - logprobs)
        same_top = int(base.argmax()) == int(logits.argmax())
        return Comparison(float(terms.sum(dtype=np.float64)), float(base[token]), same_top)


def create(path: Path, n_vocab: int, chunks: Sequence[Sequence[int]]) -> int:
    """A file of these chunks, all of one length, whose rows have yet to be written; the descriptor that keeps it
    locked. Raises UserError."""
    head = np.array([(MAGIC, len(chunks[0]), n_vocab, len(chunks))], HEAD)
    try:
        fd = open_locked(path)
        try:
            path.write_bytes(head.tobytes() + np.array(chunks, "<i4").tobytes())
        except OSError:
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise write_error(path, OPTION, error) from None
    return fd


def chunk_text(path: Path, chunk: int, is_new: bool) -> str:
    """`SamplingParams.base_chunk`: the chunk that a prompt is compared with or, in a new file, written as."""
    return f"{'+' if is_new else ''}{chunk}:{path}"


def check_compared(chunk: str, comparisons: Sequence[Comparison]) -> None:
    """Raises UserError where the file has no numbers for one of a chunk's."""
    if UNKNOWN in comparisons:
        number, _, path = chunk.partition(":")
        raise UserError(f"{OPTION} {path} is damaged: chunk {int(number) + 1} has no numbers; {AGAIN}")


def compared(chunk: str, position: int, logits: FloatArray, token: int) -> Comparison | None:
    """Compare or write the token at a position, as `chunk` says; None for a new file and in a chunk's first half."""
    number, _, path = chunk.partition(":")
    file = _opened(path, is_new := number.startswith("+"))
    if position <= file.n_ctx // 2:
        return None
    if not is_new:
        return file.compare(int(number), position, logits, token)
    file.note(int(number), position, logits)
    return None


@cache
def _opened(path: str, is_new: bool) -> LogProbFile:
    return LogProbFile(Path(path), is_new)
