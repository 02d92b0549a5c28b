"""The messages between ranks and their layout in bytes, with activations in float32 or bf16. Knows no MPI and no model.

| message     | from, to                | content                                                                    |
|-------------|-------------------------|----------------------------------------------------------------------------|
| run         | head, stage after stage | Header, KvOps, SentRows, more sequences; new requests, pickled; features   |
|             |                         | (n_features, n_rows, n_embd) in bf16 of the layers so far that drafts      |
|             |                         | read; the activations (n_rows, n_embd) of a WireType                       |
| out of band | stage to stage          | the activations of the run before it, from one device's memory to another  |
| order       | head, stage after stage | Header: report, or shut down                                               |
| verdict     | last stage, head        | VERDICT; an int32 a row: its token, or how many guesses; the guesses       |
|             |                         | of a draft; features (n_rows, n) in bf16; a ScoredToken and its Likelys a  |
|             |                         | token with log-probabilities                                               |
| prunings    | head, every stage       | an int32: how many PrunedRows follow; 0 ends the pipeline                  |

A run has no activations as the head sends it, when it is cancelled, and where they go out of band. A stage changes the
header, which rows are dropped, features and activations in place, and sends the buffer on. There are features only
where a draft reads them, and none of a cancelled run."""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from enum import Enum, IntEnum
from itertools import starmap
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeinfer.core.blocks import Span
from pipeinfer.core.interfaces import DeviceRows
from pipeinfer.core.runs import KvOp, Opening, OpKind, Run
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.types import FloatArray

Buffer = npt.NDArray[np.uint8]
QUIET = 0x40  # the bit of a bf16 that keeps a NaN from becoming infinite when its lower half is dropped


class WireType(Enum):
    """The type of activations in messages."""

    F32 = "f32"
    BF16 = "bf16"

    def __str__(self) -> str:
        return self.value

    @property
    def n_bytes(self) -> int:
        """Bytes of one number."""
        return 4 if self is WireType.F32 else 2


def activation_bytes(n_rows: int, n_embd: int, wire_type: WireType) -> int:
    """Bytes of `n_rows` activations."""
    return n_rows * n_embd * wire_type.n_bytes


def read_activations(buffer: Buffer, n_embd: int, wire_type: WireType) -> FloatArray:
    """(n_rows, n_embd): a view if the type is float32."""
    if wire_type is WireType.F32:
        return buffer.view(np.float32).reshape(-1, n_embd)
    bits = buffer.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).reshape(-1, n_embd)


def write_activations(values: FloatArray, buffer: Buffer, wire_type: WireType) -> None:
    """`buffer` has `activation_bytes` of (n_rows, n_embd)."""
    if wire_type is WireType.F32:
        buffer.view(np.float32)[:] = values.reshape(-1)
    else:
        buffer.view(np.uint16)[:] = _rounded(values).reshape(-1)


def rounded(values: FloatArray) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bf16, in the same shape."""
    return _rounded(values).astype(np.uint16)


def _rounded(values: FloatArray) -> npt.NDArray[np.uint32]:
    """The nearest bf16, ties to even, in the lower half; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    upper = bits >> np.uint32(16)
    nearest = (bits + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)
    is_nan = np.isnan(values)
    if is_nan.any():
        nearest[is_nan] = upper[is_nan] | np.uint32(QUIET)
    return nearest


MAX_US = 2**31 - 1
SHORT, INT, LONG = np.dtype("<u2"), np.dtype("<i4"), np.dtype("<i8")
MAGIC = 0x50495046  # detects a stray message early
ALL_ROWS = -1
N_PRUNED_ROWS = 128  # of a message of prunings, at most
N_OPEN_BYTES = 360  # of a new request, without its texts, at most


class Kind(IntEnum):
    RUN = 1
    SHUTDOWN = 2
    REPORT = 3  # of figures since the last one


class SentRow(NamedTuple):
    request: int
    token: int
    position: int
    seq: int  # the sequence that it sees
    n_wanted: int  # answers, see Row
    dropped: int  # dead: a stage lacked the cells before it; its activations are void


class PrunedRow(NamedTuple):
    """A row that need not be evaluated."""

    run_id: int
    row: int  # or ALL_ROWS: the run is cancelled


HEADER_FIELDS = [
    ("magic", INT),
    ("kind", INT),
    ("run_id", LONG),
    ("cancelled", INT),
    ("n_ops", INT),
    ("n_rows", INT),
    ("n_extra", INT),
    ("n_open_bytes", INT),  # of the new requests
    ("span_start", INT),  # see Run
    ("span_end", INT),  # 0: there is none
    ("slowest_us", INT),  # of the slowest stage so far
    ("is_out_of_band", SHORT),  # its activations are in the next message, unless it is cancelled
    ("n_features", SHORT),  # layers whose features are there
]
HEADER = np.dtype(HEADER_FIELDS)
NO_SPAN = (0, 0)
OP = np.dtype([(field.name, LONG) for field in fields(KvOp)])
op_values = attrgetter(*OP.names or ())
ROW = np.dtype([(name, INT) for name in SentRow._fields])
EXTRA = np.dtype([("row", INT), ("seq", INT)])  # another sequence that has the row's cell
PRUNED = np.dtype([("run_id", LONG), ("row", INT)])
N_PRUNINGS_BYTES = INT.itemsize + PRUNED.itemsize * N_PRUNED_ROWS
TEXTS = tuple(field.name for field in fields(SamplingParams) if isinstance(field.default, str))


def joined(*parts: bytes) -> Buffer:
    return np.frombuffer(bytearray().join(parts), np.uint8)


def packed(dtype: np.dtype[Any], values: Any) -> bytes:
    """One value, or a sequence of them."""
    return np.array(values, dtype).tobytes()


def view(buffer: Buffer, dtype: np.dtype[Any], at: int, n: int) -> npt.NDArray[Any]:
    """`n` consecutive values; the array shares the buffer's memory."""
    return np.ndarray(n, dtype, buffer, at)


def microseconds(seconds: float) -> int:
    return min(round(1e6 * seconds), MAX_US)


def bytes_before_activations(n_ops: int, n_rows: int, n_extra: int, n_opens: int, n_text: int = 0) -> int:
    """The size of a run's message without activations, at most; exact without new requests."""
    records = OP.itemsize * n_ops + ROW.itemsize * n_rows + EXTRA.itemsize * n_extra
    return HEADER.itemsize + records + N_OPEN_BYTES * n_opens + n_text


def text_bytes(params: SamplingParams) -> int:
    """Of a request's texts."""
    return sum(len(getattr(params, name).encode()) for name in TEXTS)


def feature_bytes(n_rows: int, n_embd: int, n_features: int) -> int:
    """Of the features of so many layers."""
    return activation_bytes(n_rows, n_features * n_embd, WireType.BF16)


class Transaction:
    """A view of a run's message, of which `buffer` may be longer. `rows`: SentRows as a structured array, which may be
    written to. `out_of_band`: activations on a device; `received_memory`: in which they came. `n_joined`: see `join`;
    None: it has no JOIN."""

    def __init__(self, buffer: Buffer, n_embd: int, wire_type: WireType = WireType.F32) -> None:
        self.buffer, self.n_embd, self.wire_type = buffer, n_embd, wire_type
        self._header = np.ndarray((), HEADER, buffer)
        magic, kind, self.run_id, _, n_ops, self.n_rows, n_extra, n_open_bytes, *span, _, _, _ = self._header.tolist()
        assert magic == MAGIC, f"not a transaction: starts with {magic:#x}"
        self.kind = Kind(kind)
        self.out_of_band: DeviceRows | None = None
        self.received_memory: Any = None
        self.n_joined: int | None = None
        self.span = Span(*span) if span[1] else None
        rows_at = HEADER.itemsize + OP.itemsize * n_ops
        extra_at = rows_at + ROW.itemsize * self.n_rows
        self._opens_at = extra_at + EXTRA.itemsize * n_extra
        self._end = self._opens_at + n_open_bytes
        self._ops = view(buffer, OP, HEADER.itemsize, n_ops)
        self.rows = view(buffer, ROW, rows_at, self.n_rows)
        self._extra = view(buffer, EXTRA, extra_at, n_extra)

    @property
    def ops(self) -> list[KvOp]:
        return [KvOp(OpKind(kind), *values) for kind, *values in self._ops.tolist()]

    def join(self, n_blocks: int) -> None:
        """Its one operation is a JOIN: note how many blocks this stage could read."""
        self.n_joined = self._ops["last"][0] = min(n_blocks, int(self._ops["last"][0]))

    @property
    def sent_rows(self) -> Iterator[SentRow]:
        """The rows as SentRows."""
        return starmap(SentRow, self.rows.tolist())

    @property
    def seqs(self) -> list[tuple[int, ...]]:
        """Each row's sequences; the one that it sees is the first."""
        owners: list[tuple[int, ...]] = [(seq,) for seq in self.rows["seq"].tolist()]
        for row, seq in self._extra.tolist():
            owners[row] += (seq,)
        return owners

    @property
    def opens(self) -> dict[int, Opening]:
        opens = pickle.loads(self.buffer[self._opens_at : self._end].data) if self._end > self._opens_at else []
        return {request: Opening(SamplingParams(*values), *others) for request, others, values in opens}

    @property
    def n_features(self) -> int:
        """Layers whose features are there."""
        return int(self._header["n_features"])

    @property
    def _activations_at(self) -> int:
        return self._end + feature_bytes(self.n_rows, self.n_embd, self.n_features)

    @property
    def n_bytes_full(self) -> int:
        return self._activations_at + activation_bytes(self.n_rows, self.n_embd, self.wire_type)

    @property
    def message(self) -> Buffer:
        """What is sent on: a run has its activations unless it is cancelled or they go out of band."""
        if self.kind is not Kind.RUN or self.cancelled:
            return self.buffer[: self._end]
        return self.buffer[: self._activations_at if self._header["is_out_of_band"] else self.n_bytes_full]

    @property
    def comes_out_of_band(self) -> bool:
        """Whether the activations are in another message."""
        return bool(self._header["is_out_of_band"]) and not self.cancelled

    @property
    def out_of_band_memory(self) -> Any:
        """The memory to send as that other message; None if there is none."""
        return self.out_of_band.memory if self.out_of_band is not None and self.comes_out_of_band else None

    @property
    def activations(self) -> FloatArray:
        """(n_rows, n_embd); the buffer must be long enough."""
        return read_activations(self.buffer[self._activations_at : self.n_bytes_full], self.n_embd, self.wire_type)

    @activations.setter
    def activations(self, values: FloatArray) -> None:
        self.set_out_of_band(None)
        write_activations(values, self.buffer[self._activations_at : self.n_bytes_full], self.wire_type)

    @property
    def features(self) -> FloatArray | None:
        """(n_rows, n_features * n_embd), each row's of all layers so far; None if there are none. A copy."""
        if not self.n_features:
            return None
        by_layer = read_activations(self.buffer[self._end : self._activations_at], self.n_embd, WireType.BF16)
        by_row = by_layer.reshape(self.n_features, self.n_rows, self.n_embd).swapaxes(0, 1)
        return by_row.reshape(self.n_rows, self.n_features * self.n_embd)

    def add_features(self, values: FloatArray) -> None:
        """(n_layers, n_rows, n_embd), of further layers. The activations, in whose place they come, are void."""
        start = self._activations_at
        self._header["n_features"] += len(values)
        write_activations(values, self.buffer[start : self._activations_at], WireType.BF16)

    def set_out_of_band(self, values: DeviceRows | None) -> None:
        """Replace the activations by these; None: they are in the message."""
        self.out_of_band = values
        self._header["is_out_of_band"] = values is not None

    @property
    def slowest_s(self) -> float:
        """Seconds that the run took in the slowest stage so far."""
        return 1e-6 * int(self._header["slowest_us"])

    def took(self, seconds: float) -> None:
        """Note the time of a stage's evaluation."""
        self._header["slowest_us"] = max(microseconds(seconds), self._header["slowest_us"])

    @property
    def cancelled(self) -> bool:
        return bool(self._header["cancelled"])

    def cancel(self) -> None:
        """Drop the activations: only the operations still count."""
        self._header["cancelled"] = True


def encode(run: Run, kind: Kind = Kind.RUN) -> Buffer:
    """A run's message as the head sends it: without activations."""
    extra = [(index, seq) for index, row in enumerate(run.rows) for seq in row.seqs[1:]]
    opens = [(request, others, astuple(sampling)) for request, (sampling, *others) in run.opens.items()]
    open_bytes = pickle.dumps(opens, protocol=3) if opens else b""
    open_bytes += bytes(-len(open_bytes) % INT.itemsize)  # aligns the activations
    rows = [(row.request, row.token, row.position, row.seqs[0], row.n_wanted, 0) for row in run.rows]
    counts = len(run.ops), len(rows), len(extra), len(open_bytes)
    header = packed(HEADER, (MAGIC, kind, run.id, 0, *counts, *(run.span or NO_SPAN), 0, 0, 0))
    ops = packed(OP, list(map(op_values, run.ops)))
    return joined(header, ops, packed(ROW, rows), packed(EXTRA, extra), open_bytes)


def encode_order(kind: Kind) -> Buffer:
    """A transaction without a run; it arrives after all earlier messages."""
    return encode(Run(0, []), kind)


def encode_prunings(rows: Mapping[int, Sequence[int] | None]) -> list[Buffer]:
    """Run id -> dead rows, or None for all of them; in messages of N_PRUNINGS_BYTES at most."""
    pruned = [(run_id, row) for run_id, dead in rows.items() for row in ((ALL_ROWS,) if dead is None else dead)]
    parts = (pruned[start : start + N_PRUNED_ROWS] for start in range(0, len(pruned), N_PRUNED_ROWS))
    return [joined(packed(INT, [len(part)]), packed(PRUNED, part)) for part in parts]


def encode_last_prunings() -> Buffer:
    """The end of this pipeline's prunings."""
    return joined(packed(INT, [0]))


def decode_prunings(message: Buffer) -> list[PrunedRow]:
    """Empty for the last message."""
    (n,) = view(message, INT, 0, 1).tolist()
    return list(starmap(PrunedRow, view(message, PRUNED, INT.itemsize, n).tolist()))
