"""The messages between ranks and their layout in bytes. Knows no MPI and no model.

| message     | from, to                | content                                                                    |
|-------------|-------------------------|----------------------------------------------------------------------------|
| run         | head, stage after stage | Header, KvOps, SentRows, ExtraSeqs; the new requests, pickled; then the    |
|             |                         | activations (n_rows, n_embd) of a WireType                                 |
| out of band | stage to stage          | the activations of the run before it, from one device's memory to another  |
| order       | head, stage after stage | Header: report, or shut down                                               |
| verdict     | last stage, head        | VerdictHeader; an int32 a row: its token, or how many guesses; the Guesses |
|             |                         | of a draft; a ScoredRow and its Likelys a token with log-probabilities     |
| prunings    | head, every stage       | an int32: how many PrunedRows follow; 0 ends the pipeline                  |

A run has no activations as the head sends it, when it is cancelled, and where they go out of band. A stage changes the
header, which rows are dropped, and the activations in place, and sends the buffer on.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from enum import IntEnum
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeinfer.cluster.messages.activations import WireType, activation_bytes, read_activations, write_activations
from pipeinfer.cluster.messages.logprobs import MAX_TOP, Likely, ScoredToken
from pipeinfer.cluster.messages.records import I32, Buffer, Record
from pipeinfer.core.interfaces import DeviceRows, FloatArray
from pipeinfer.core.kv.blocks import Span
from pipeinfer.core.runs import Guess, GuessVerdict, KvOp, Opening, Run, Verdict
from pipeinfer.core.sampling import SamplingParams

MAGIC = 0x50495046  # refuses a stray message early
MAX_US = 2**31 - 1
ALL_ROWS = -1
N_PRUNED_ROWS = 128  # of a message of prunings, at most
N_OPEN_BYTES = 160  # of a new request, without its texts, at most


class Kind(IntEnum):
    RUN = 1
    SHUTDOWN = 2
    REPORT = 3  # tell what was done since the last one


NO_SPAN = (0, 0)


class Header(NamedTuple):
    magic: I32
    kind: I32
    run_id: int
    cancelled: I32
    n_ops: I32
    n_rows: I32
    n_extra: I32
    n_open_bytes: I32  # of the new requests
    span_start: I32  # see Run
    span_end: I32  # 0: there is none
    slowest_us: I32  # of the slowest stage so far
    is_out_of_band: I32  # its activations are in the next message, unless it is cancelled


class SentRow(NamedTuple):
    request: I32
    token: I32
    position: I32
    seq: I32  # the sequence that it sees
    n_wanted: I32  # answers
    dropped: I32  # dead: a stage lacked the cells before it; its activations are void


class ExtraSeq(NamedTuple):
    row: I32
    seq: I32  # another sequence that has its cell


class VerdictHeader(NamedTuple):
    run_id: int
    cancelled: I32
    slowest_us: I32
    n_rows: I32
    n_more: I32  # a draft's guesses, or the target's rows with log-probabilities


class ScoredRow(NamedTuple):
    row: I32
    n_top: I32  # Likelys that follow
    logprob: float  # of the chosen token


class PrunedRow(NamedTuple):
    """A row that need not be evaluated."""

    run_id: int
    row: I32  # or ALL_ROWS: the run is cancelled


HEADER, OP, ROW, EXTRA = Record(Header), Record(KvOp), Record(SentRow), Record(ExtraSeq)
VERDICT, GUESS, SCORED, LIKELY = Record(VerdictHeader), Record(Guess), Record(ScoredRow), Record(Likely)
PRUNED = Record(PrunedRow)
INT = np.dtype("<i4")
N_PRUNINGS_BYTES = INT.itemsize + PRUNED.n_bytes * N_PRUNED_ROWS
TEXTS = tuple(field.name for field in fields(SamplingParams) if field.type == "str")


def bytes_before_activations(n_ops: int, n_rows: int, n_extra: int, n_opens: int, n_text: int = 0) -> int:
    """The size of a run's message without activations, at most; exact without new requests."""
    records = OP.n_bytes * n_ops + ROW.n_bytes * n_rows + EXTRA.n_bytes * n_extra
    return HEADER.n_bytes + records + N_OPEN_BYTES * n_opens + n_text


def text_bytes(params: SamplingParams) -> int:
    """Of a request's texts."""
    return sum(len(getattr(params, name).encode()) for name in TEXTS)


def verdict_bytes(n_rows: int, n_guesses: int = 0, n_scored: int = 0) -> int:
    """`n_scored`: rows with as many log-probabilities as one can ask for."""
    n_bytes = VERDICT.n_bytes + INT.itemsize * n_rows + GUESS.n_bytes * n_guesses
    return n_bytes + (SCORED.n_bytes + LIKELY.n_bytes * MAX_TOP) * n_scored


class Transaction:
    """A view of a run's message. `buffer` may be longer than the message.

    `rows`: SentRows as a structured array, which may be written to. `out_of_band`: activations on a device.
    """

    __slots__ = ("_end", "_extra_at", "_header", "_opens_at", "_rows_at", "buffer",
                 "kind", "n_embd", "n_rows", "out_of_band", "rows", "run_id", "span", "wire_type")  # fmt: skip

    def __init__(self, buffer: Buffer, n_embd: int, wire_type: WireType = WireType.F32) -> None:
        self.buffer, self.n_embd, self.wire_type = buffer, n_embd, wire_type
        self._header = header = HEADER.read(buffer, 0)
        assert header.magic == MAGIC, f"not a transaction: starts with {header.magic:#x}"
        self.kind, self.run_id = Kind(header.kind), header.run_id
        self.out_of_band: DeviceRows | None = None
        self.n_rows = header.n_rows
        self.span = Span(header.span_start, header.span_end) if header.span_end else None
        self._rows_at = HEADER.n_bytes + OP.n_bytes * header.n_ops
        self._extra_at = self._rows_at + ROW.n_bytes * header.n_rows
        self._opens_at = self._extra_at + EXTRA.n_bytes * header.n_extra
        self._end = self._opens_at + header.n_open_bytes
        self.rows: npt.NDArray[Any] = ROW.view(buffer, self._rows_at, header.n_rows)

    @property
    def ops(self) -> list[KvOp]:
        return list(OP.read_all(self.buffer, HEADER.n_bytes, self._header.n_ops))

    @property
    def sent_rows(self) -> Iterator[SentRow]:
        """The rows as SentRows."""
        return ROW.read_all(self.buffer, self._rows_at, self.n_rows)

    @property
    def seqs(self) -> list[tuple[int, ...]]:
        """Each row's sequences; the one that it sees is the first."""
        owners: list[tuple[int, ...]] = [(seq,) for seq in self.rows["seq"].tolist()]
        for row, seq in EXTRA.read_all(self.buffer, self._extra_at, self._header.n_extra):
            owners[row] += (seq,)
        return owners

    @property
    def opens(self) -> dict[int, Opening]:
        opens = pickle.loads(self.buffer[self._opens_at : self._end].data) if self._header.n_open_bytes else []
        return {request: Opening(SamplingParams(*sampling), n_prompt) for request, n_prompt, *sampling in opens}

    @property
    def n_bytes_full(self) -> int:
        return self._end + activation_bytes(self.n_rows, self.n_embd, self.wire_type)

    @property
    def message(self) -> Buffer:
        """What is sent on: a run has its activations unless it is cancelled or they go out of band."""
        has_activations = self.kind is Kind.RUN and not self.cancelled and not self._header.is_out_of_band
        return self.buffer[: self.n_bytes_full if has_activations else self._end]

    @property
    def comes_out_of_band(self) -> bool:
        """Whether the activations are in another message."""
        return bool(self._header.is_out_of_band) and not self.cancelled

    @property
    def out_of_band_memory(self) -> Any:
        """The memory to send as that other message; None if there is none."""
        return self.out_of_band.memory if self.out_of_band is not None and self.comes_out_of_band else None

    @property
    def activations(self) -> FloatArray:
        """(n_rows, n_embd); the buffer must be long enough."""
        return read_activations(self.buffer[self._end : self.n_bytes_full], self.n_embd, self.wire_type)

    @activations.setter
    def activations(self, values: FloatArray) -> None:
        self.set_out_of_band(None)
        write_activations(values, self.buffer[self._end : self.n_bytes_full], self.wire_type)

    def set_out_of_band(self, values: DeviceRows | None) -> None:
        """Replace the activations by these; None: they are in the message."""
        self.out_of_band = values
        if self._header.is_out_of_band != (is_out_of_band := values is not None):
            self._change(self._header._replace(is_out_of_band=is_out_of_band))

    @property
    def slowest_s(self) -> float:
        """Seconds that the run took in the slowest stage so far."""
        return 1e-6 * self._header.slowest_us

    def took(self, seconds: float) -> None:
        """Note the time of a stage's evaluation."""
        if (us := _us(seconds)) > self._header.slowest_us:
            self._change(self._header._replace(slowest_us=us))

    @property
    def cancelled(self) -> bool:
        return bool(self._header.cancelled)

    def cancel(self) -> None:
        """Drop the activations: only the operations still count."""
        self._change(self._header._replace(cancelled=1))

    def _change(self, header: Header) -> None:
        self._header = header
        HEADER.write(header, self.buffer, 0)


def encode(run: Run, kind: Kind = Kind.RUN) -> Buffer:
    """A run's message as the head sends it: without activations."""
    extra = [ExtraSeq(index, seq) for index, row in enumerate(run.rows) for seq in row.seqs[1:]]
    opens = [(request, new.n_prompt, *astuple(new.sampling)) for request, new in run.opens.items()]
    open_bytes = pickle.dumps(opens, protocol=3) if opens else b""
    open_bytes += bytes(-len(open_bytes) % INT.itemsize)  # aligns the activations
    counts = len(run.ops), len(run.rows), len(extra), len(open_bytes)
    return _message(
        HEADER.pack(Header(MAGIC, kind, run.id, 0, *counts, *(run.span or NO_SPAN), 0, 0)),
        *map(OP.pack, run.ops),
        *(ROW.pack(SentRow(row.request, row.token, row.position, row.seqs[0], row.n_wanted, 0)) for row in run.rows),
        *map(EXTRA.pack, extra),
        open_bytes,
    )


def encode_order(kind: Kind) -> Buffer:
    """A transaction that is not a run; it arrives after all that was sent before."""
    return encode(Run(0, []), kind)


def encode_verdict(verdict: Verdict | GuessVerdict) -> Buffer:
    if isinstance(verdict, Verdict):
        numbers: Sequence[int] = verdict.tokens
        guesses: list[Guess] = []
    else:
        numbers = list(map(len, verdict.guesses))
        guesses = [guess for of_row in verdict.guesses for guess in of_row]
    scored = [(row, token) for row, token in enumerate(numbers) if isinstance(token, ScoredToken)]
    counts = len(numbers), len(guesses) + len(scored)  # one of these is 0
    return _message(
        VERDICT.pack(VerdictHeader(verdict.run_id, verdict.cancelled, _us(verdict.slowest_s), *counts)),
        _packed(numbers), *map(GUESS.pack, guesses), *(_packed_scores(row, token) for row, token in scored),
    )  # fmt: skip


def decode_verdict(message: Buffer) -> Verdict:
    """Inverse of `encode_verdict` for a target's; the buffer may be longer than the message."""
    header = VERDICT.read(message, 0)
    tokens, at = _ints(message, VERDICT.n_bytes, header.n_rows), verdict_bytes(header.n_rows)
    for _ in range(header.n_more):
        row, n_top, logprob = SCORED.read(message, at)
        top = LIKELY.read_all(message, at + SCORED.n_bytes, n_top)
        tokens[row] = ScoredToken(tokens[row], logprob, list(top))
        at += SCORED.n_bytes + LIKELY.n_bytes * n_top
    return Verdict(header.run_id, tuple(tokens), bool(header.cancelled), 1e-6 * header.slowest_us)


def decode_guess_verdict(message: Buffer) -> GuessVerdict:
    """The same for a draft's."""
    header = VERDICT.read(message, 0)
    guesses = GUESS.read_all(message, verdict_bytes(header.n_rows), header.n_more)
    rows = tuple(list(islice(guesses, n)) for n in _ints(message, VERDICT.n_bytes, header.n_rows))
    return GuessVerdict(header.run_id, rows, bool(header.cancelled), 1e-6 * header.slowest_us)


def encode_prunings(rows: Mapping[int, Sequence[int] | None]) -> list[Buffer]:
    """Run id -> dead rows, or None for all of them; in messages of N_PRUNINGS_BYTES at most."""
    pruned = [
        PrunedRow(run_id, row) for run_id, dead in rows.items() for row in ((ALL_ROWS,) if dead is None else dead)
    ]
    parts = (pruned[start : start + N_PRUNED_ROWS] for start in range(0, len(pruned), N_PRUNED_ROWS))
    return [_message(_packed([len(part)]), *map(PRUNED.pack, part)) for part in parts]


def encode_last_prunings() -> Buffer:
    """Says that no prunings follow in this pipeline."""
    return _message(_packed([0]))


def decode_prunings(message: Buffer) -> list[PrunedRow]:
    """Empty for the last message."""
    return list(PRUNED.read_all(message, INT.itemsize, _ints(message, 0, 1)[0]))


def _packed_scores(row: int, token: ScoredToken) -> bytes:
    return SCORED.pack(ScoredRow(row, len(token.top), token.logprob)) + b"".join(map(LIKELY.pack, token.top))


def _message(*parts: bytes) -> Buffer:
    return np.frombuffer(bytearray().join(parts), np.uint8)


def _packed(numbers: Iterable[int]) -> bytes:
    return np.array(list(numbers), INT).tobytes()


def _ints(buffer: Buffer, at: int, n: int) -> list[int]:
    numbers: list[int] = np.ndarray(n, INT, buffer, at).tolist()
    return numbers


def _us(seconds: float) -> int:
    return min(round(1e6 * seconds), MAX_US)
