"""How a run travels: one flat buffer per hop. Knows bytes; knows no MPI and no model.

A transaction is int32 words: a header, the operations, the rows, further (row, sequence) pairs, the sampling of newly
opened requests; then the activations as float32, (n_rows, n_embd), absent from the head and from cancelled runs. What a
stage passes on differs from what it received in the flags and the activations only, so it writes both in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from pipeinfer.interfaces import FloatArray, IntArray
from pipeinfer.runs import NO_TOKEN, Guess, GuessVerdict, KvOp, OpKind, Run, Verdict
from pipeinfer.sampling import SamplingParams

Buffer = npt.NDArray[np.uint8]


class Kind(IntEnum):
    RUN = 1
    SHUTDOWN = 2
    PAUSE = 3  # the runs of one measurement are over: report, and get ready for the next


class RowFlag(IntFlag):
    WANTED = 1
    DROPPED = 2  # a stage had no cells for the guesses before it: it is dead, and its activations are void


_MAGIC = 0x50495046  # refuses a stray message early
N_HEADER = 11
"""Magic, kind, run id (two words), cancelled, n_ops, n_rows, n_extra, n_opens, µs in the slowest stage, n_prompt."""

N_OP = 5  # kind, src, dst, first, last
N_ROW = 5  # request, token, position, sequence, flags
N_VERDICT = 6  # run id (two words), cancelled, µs in the slowest stage, n_rows, width; then tokens, or guesses
MAX_US = 2**31 - 1
N_OPEN = 20  # request, one spare word, then the sampling parameters as nine float64


def words_before_activations(n_ops: int, n_rows: int, n_extra: int, n_opens: int) -> int:
    return N_HEADER + N_OP * n_ops + N_ROW * n_rows + 2 * n_extra + N_OPEN * n_opens


class Transaction:
    """A view on a transaction's buffer; nothing is copied. `buffer` may be longer than the message."""

    __slots__ = ("_end", "_words", "buffer", "cancelled", "kind", "n_embd", "n_prompt", "n_rows", "opens_at", "rows",
                 "run_id")  # fmt: skip

    def __init__(self, buffer: Buffer, n_embd: int) -> None:
        self.buffer, self.n_embd = buffer, n_embd
        self._words = words = buffer[: len(buffer) & ~3].view(np.int32)
        magic, kind, low, high, cancelled, n_ops, self.n_rows, n_extra, n_opens, _, self.n_prompt = words[
            :N_HEADER
        ].tolist()
        assert magic == _MAGIC, f"not a transaction: starts with {magic:#x}"
        self.kind, self.cancelled, self.run_id = Kind(kind), bool(cancelled), joined(low, high)
        rows_at = N_HEADER + N_OP * n_ops
        self.opens_at = rows_at + N_ROW * self.n_rows + 2 * n_extra
        self._end = self.opens_at + N_OPEN * n_opens
        self.rows: IntArray = words[rows_at : rows_at + N_ROW * self.n_rows].reshape(-1, N_ROW)

    @property
    def ops(self) -> list[KvOp]:
        words = self._words[N_HEADER : N_HEADER + N_OP * int(self._words[5])].reshape(-1, N_OP)
        return [KvOp(OpKind(kind), src, dst, first, last) for kind, src, dst, first, last in words.tolist()]

    @property
    def seqs(self) -> list[tuple[int, ...]]:
        """Each row's sequences, the one it sees first."""
        owners: list[tuple[int, ...]] = [(seq,) for seq in self.rows[:, 3].tolist()]
        extra = self._words[self.opens_at - 2 * int(self._words[7]) : self.opens_at]
        for row, seq in extra.reshape(-1, 2).tolist():
            owners[row] += (seq,)
        return owners

    @property
    def opens(self) -> dict[int, SamplingParams]:
        found = {}
        for start in range(self.opens_at, self._end, N_OPEN):
            seed, temp, top_k, top_p, min_p, last_n, *penalties = (
                self._words[start + 2 : start + N_OPEN].copy().view(np.float64).tolist()
            )
            params = SamplingParams(int(seed), temp, int(top_k), top_p, min_p, int(last_n), *penalties)
            found[int(self._words[start])] = params
        return found

    @property
    def n_bytes_full(self) -> int:
        return 4 * (self._end + self.n_rows * self.n_embd)

    @property
    def message(self) -> Buffer:
        """What travels on: with the activations, unless the run is cancelled or this is no run."""
        has_activations = self.kind is Kind.RUN and not self.cancelled
        return self.buffer[: self.n_bytes_full if has_activations else 4 * self._end]

    @property
    def activations(self) -> FloatArray:
        """(n_rows, n_embd), writable; the buffer must be long enough."""
        return self._words[self._end : self._end + self.n_rows * self.n_embd].view(np.float32).reshape(-1, self.n_embd)

    @property
    def slowest_s(self) -> float:
        """Seconds that the run took the slowest of the stages that evaluated it."""
        return 1e-6 * int(self._words[9])

    def took(self, seconds: float) -> None:
        """A stage has evaluated the run in so long."""
        self._words[9] = max(int(self._words[9]), _us(seconds))

    def cancel(self) -> None:
        """From here on the transaction carries its operations only."""
        self.cancelled = True
        self._words[4] = 1


def encode(run: Run, kind: Kind = Kind.RUN) -> Buffer:
    """The transaction of a run as the head sends it: without activations."""
    extra = [(index, seq) for index, row in enumerate(run.rows) for seq in row.seqs[1:]]
    words: list[int] = [_MAGIC, kind, *halves(run.id), 0, len(run.ops), len(run.rows), len(extra), len(run.opens), 0,
                        run.n_prompt]  # fmt: skip
    for op in run.ops:
        words += astuple(op)
    for row in run.rows:
        words += (row.request, row.token, row.position, row.seqs[0], RowFlag.WANTED if row.wanted else 0)
    for pair in extra:
        words += pair
    packed = np.array(words, np.int32)
    if run.opens:
        packed = np.concatenate([packed, *(_encode_open(request, params) for request, params in run.opens.items())])
    return packed.view(np.uint8)


def _encode_open(request: int, params: SamplingParams) -> IntArray:
    # float64 holds every 32-bit seed exactly
    values = np.array(astuple(params), np.float64)
    return np.concatenate([np.array([request, 0], np.int32), values.view(np.int32)])


def encode_shutdown(kind: Kind = Kind.SHUTDOWN) -> Buffer:
    return encode(Run(0, []), kind)


def encode_verdict(verdict: Verdict | GuessVerdict) -> Buffer:
    """A target's verdict has a token for each row; a draft's `width` tokens, then their probabilities as float32."""
    if isinstance(verdict, Verdict):
        n_rows, width, body = len(verdict.tokens), 0, np.array(verdict.tokens, np.int32)
    else:
        n_rows, width = len(verdict.guesses), max(map(len, verdict.guesses), default=0)
        body = _encode_guesses(verdict.guesses, width)
    header = [*halves(verdict.run_id), verdict.cancelled, _us(verdict.slowest_s), n_rows, width]
    return np.concatenate([np.array(header, np.int32), body]).view(np.uint8)


def decode_verdict(message: Buffer) -> Verdict:
    """Inverse of `encode_verdict` for a target's; the buffer may be longer than the message."""
    run_id, cancelled, slowest_s, n_rows, _, body = _decode_header(message)
    return Verdict(run_id, tuple(body[:n_rows].tolist()), cancelled, slowest_s)


def decode_guess_verdict(message: Buffer) -> GuessVerdict:
    """The same for a draft's."""
    run_id, cancelled, slowest_s, n_rows, width, body = _decode_header(message)
    n = n_rows * width
    tokens = body[:n].reshape(n_rows, width).tolist()
    shares = body[n : 2 * n].view(np.float32).reshape(n_rows, width).tolist()
    guesses = (
        [Guess(token, share) for token, share in zip(*row, strict=True) if token != NO_TOKEN]
        for row in zip(tokens, shares, strict=True)
    )
    return GuessVerdict(run_id, tuple(guesses), cancelled, slowest_s)


def _encode_guesses(guesses: Sequence[Sequence[Guess]], width: int) -> IntArray:
    tokens = np.full((len(guesses), width), NO_TOKEN, np.int32)
    shares = np.zeros((len(guesses), width), np.float32)
    for row, found in enumerate(guesses):
        tokens[row, : len(found)] = [guess.token for guess in found]
        shares[row, : len(found)] = [guess.probability for guess in found]
    return np.concatenate([tokens.ravel(), shares.view(np.int32).ravel()])


def _decode_header(message: Buffer) -> tuple[int, bool, float, int, int, IntArray]:
    words = message[: len(message) & ~3].view(np.int32)
    low, high, cancelled, us, n_rows, width = words[:N_VERDICT].tolist()
    return joined(low, high), bool(cancelled), 1e-6 * us, n_rows, width, words[N_VERDICT:]


def _us(seconds: float) -> int:
    return min(round(1e6 * seconds), MAX_US)


def halves(number: int) -> tuple[int, int]:
    """A 64-bit number as two signed words, the lower first."""
    low, high = np.array([number], np.int64).view(np.int32).tolist()
    return low, high


def joined(low: int, high: int) -> int:
    return high << 32 | low & 0xFFFFFFFF
