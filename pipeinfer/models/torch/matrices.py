"""A matrix, whatever its numbers are kept as: float32, bf16, or whole numbers of 8 or 4 bits; and rows multiplied by
it, also in groups of a fixed size, so that a row's bits do not depend on the number of rows. Knows no layer.

4 bits have a scale and an offset for every 32 numbers of a row. GGUF's types of 4 bits keep their numbers, others are
rounded. Rows that they multiply are bf16, and so are scales and offsets: torch's kernels, one for CPUs and one for
GPUs, take them so. Neither depends on the number of rows.

Kernels that multiply matrices sum in an order that follows from the number of rows; with one number, padded with zeros,
there is one order. Whether a row's place in its group matters is tried with the model's matrices (`rows_together`):
libraries document no order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, quants
from torch.nn.functional import linear, pad, silu

from pipeinfer.core.types import FloatArray
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.header import BLOCKS
from pipeinfer.models.torch.params import CUDA

GROUP = 32
MIDDLE = 8  # subtracted from a number before it is multiplied with its scale
LARGEST_INT4 = 15
ROWS = 64  # the kernels take matrices with whole multiples of 16 rows; on CPUs each 64 are packed by themselves
PACKED_PIECE = 1 << 24  # numbers that are packed at a time on a CPU: 4 bytes each meanwhile
ALLOWED = 0.02

Q4_0, Q4_1, Q4_K = (int(GGMLQuantizationType[name]) for name in ("Q4_0", "Q4_1", "Q4_K"))
BLOCK_BYTES = {type: BLOCKS[type][1] for type in (Q4_0, Q4_1, Q4_K)}

ByteArray = npt.NDArray[np.uint8]


class FourBits(NamedTuple):
    """The numbers of a group stand for (number - MIDDLE) * scale + offset.

    numbers         (n_groups, GROUP), 0 to 15
    scale, offset   (n_groups,)"""

    numbers: ByteArray
    scale: FloatArray
    offset: FloatArray


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """Before they are packed. pairs: (…, n_out, n_in / 2) uint8, the first number of each pair in the upper half;
    steps: (…, n_out, n_in / GROUP, 2) bf16, scales and offsets."""

    pairs: torch.Tensor
    steps: torch.Tensor

    def __getitem__(self, index: torch.Tensor) -> "Int4Rows":
        return Int4Rows(self.pairs[index], self.steps[index])


@dataclass(frozen=True, slots=True)
class Int4:
    """packed: in the layout of the device's kernel; steps: (…, n_in / GROUP, padded n_out, 2) bf16. Those of experts
    are stacked."""

    packed: torch.Tensor
    steps: torch.Tensor
    n_out: int

    @property
    def shape(self) -> torch.Size:
        """Of one matrix."""
        return torch.Size((self.n_out, GROUP * self.steps.shape[-3]))

    @property
    def device(self) -> torch.device:
        return self.steps.device

    def __getitem__(self, expert: int) -> "Int4":
        return Int4(self.packed[expert], self.steps[expert], self.n_out)


def read_four_bits(ggml_type: int, data: bytes | memoryview) -> FourBits:
    """Whole rows of one of `BLOCK_BYTES`' types, without loss."""
    blocks = np.frombuffer(data, np.uint8).reshape(-1, BLOCK_BYTES[ggml_type])
    scale = _floats(blocks[:, :2])
    if ggml_type == Q4_0:
        return FourBits(_nibbles(blocks[:, 2:]), scale, np.zeros_like(scale))
    least = _floats(blocks[:, 2:4])
    if ggml_type == Q4_1:
        return FourBits(_nibbles(blocks[:, 4:]), scale, least + MIDDLE * scale)
    # eight groups a block, whose scales and least values are 6 bits times one number of the block
    steps, depths = quants.Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    scale = (scale[:, None] * steps).astype(np.float32).reshape(-1)
    depth = (least[:, None] * depths).astype(np.float32).reshape(-1)
    return FourBits(_nibbles(blocks[:, 16:].reshape(len(blocks), -1, GROUP)), scale, MIDDLE * scale - depth)


def _nibbles(data: ByteArray) -> ByteArray:
    """(…, n) bytes -> (n_groups, GROUP): the lower four bits of each n bytes, then the upper ones."""
    return np.stack([data & np.uint8(15), data >> np.uint8(4)], -2).reshape(-1, GROUP)


def _floats(data: ByteArray) -> FloatArray:
    """(n, 2) bytes, a float16 each -> (n,)."""
    return np.ascontiguousarray(data).view(np.float16)[:, 0].astype(np.float32)


def from_four_bits(groups: FourBits, n_out: int) -> Int4Rows:
    """The numbers of a file, with scales and offsets rounded to bf16."""
    steps = torch.stack([torch.from_numpy(groups.scale), torch.from_numpy(groups.offset)], -1)
    return Int4Rows(_pairs(torch.from_numpy(groups.numbers).view(n_out, -1)), steps.bfloat16().view(n_out, -1, 2))


def to_int4(rows: torch.Tensor) -> Int4Rows:
    """(n_out, n_in) in float32, each to the nearest of 16 numbers between its group's least and largest."""
    groups = rows.view(len(rows), -1, GROUP)
    least, largest = groups.aminmax(dim=-1)
    scale = ((largest - least) / LARGEST_INT4).bfloat16()
    offset = (least + MIDDLE * scale.float()).bfloat16()
    whole = (groups - offset.float()[..., None]) / torch.where(scale > 0, scale, 1).float()[..., None]
    numbers = (whole.round() + MIDDLE).clamp(0, LARGEST_INT4).to(torch.uint8)
    return Int4Rows(_pairs(numbers.view(rows.shape)), torch.stack([scale, offset], -1))


def _pairs(numbers: torch.Tensor) -> torch.Tensor:
    return numbers[..., ::2] << 4 | numbers[..., 1::2]


def pack_int4(rows: Int4Rows) -> Int4:
    """One matrix, or a stack of several, in the layout of the kernels."""
    if rows.pairs.dim() == 3:
        each = [pack_int4(Int4Rows(*parts)) for parts in zip(rows.pairs, rows.steps, strict=True)]
        return Int4(torch.stack([one.packed for one in each]), torch.stack([one.steps for one in each]), each[0].n_out)
    n_out = len(rows.pairs)
    n_missing = -n_out % ROWS
    pairs, steps = pad(rows.pairs, (0, 0, 0, n_missing)), pad(rows.steps, (0, 0, 0, 0, 0, n_missing))
    return Int4(_pack_pairs(pairs), steps.transpose(0, 1).contiguous(), n_out)


def _pack_pairs(pairs: torch.Tensor) -> torch.Tensor:
    if pairs.device.type != "cpu":
        n_tiles = next(n for n in (8, 4, 2) if 2 * pairs.shape[1] % (16 * n) == 0)  # of 16 numbers each
        return torch.ops.aten._convert_weight_to_int4pack(pairs, n_tiles)
    pieces = []
    for part in pairs.split(ROWS * max(1, PACKED_PIECE // (2 * ROWS * pairs.shape[1]))):
        numbers = torch.stack([part >> 4, part & 15], -1).view(len(part), -1)
        pieces.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1))
    return torch.cat(pieces)


def multiply_int4(rows: torch.Tensor, weight: Int4) -> torch.Tensor:
    """(n_rows, n_in) bf16 -> (n_rows, n_out) in float32."""
    kernel = torch.ops.aten._weight_int4pack_mm
    if rows.device.type == "cpu":
        kernel = torch.ops.aten._weight_int4pack_mm_for_cpu
    return kernel(rows, weight.packed, GROUP, weight.steps)[:, : weight.n_out].float()


def check_device(device: torch.device) -> None:
    """Multiply a small matrix: not every GPU has kernels, and their layouts are documented nowhere. Raises UserError
    where the product is wrong."""
    generator = torch.Generator().manual_seed(0)
    matrix, rows = (torch.randn((n, 256), generator=generator) for n in (ROWS, 3))
    int4_rows = to_int4(matrix)
    numbers = torch.stack([int4_rows.pairs >> 4, int4_rows.pairs & 15], -1).view(ROWS, -1, GROUP).float()
    scale, offset = int4_rows.steps.float()[..., None].unbind(-2)
    expected = rows @ ((numbers - MIDDLE) * scale + offset).view(ROWS, -1).T
    try:
        weight = pack_int4(Int4Rows(int4_rows.pairs.to(device), int4_rows.steps.to(device)))
        product = multiply_int4(rows.bfloat16().to(device), weight).cpu()
        reason = "its products are wrong"
    except RuntimeError as error:
        product, reason = torch.zeros_like(expected), str(error).strip().partition("\n")[0]
    if (product - expected).norm() > ALLOWED * expected.norm():
        where = f"on {device} with torch {torch.__version__}"
        raise UserError(f"--backend torch:int4 does not work {where}: {reason}; use torch:int8 or torch:bf16")


HAS_WIDE_SUMS = hasattr(torch.ops.aten.mm, "dtype")
"""Whether torch returns a GPU's sums of bf16 in float32: not rounded, so that logits keep their order."""

LARGEST_INT8 = 127
FEW_ROWS = 16  # up to so many torch's kernel is as fast as the other way, or faster (measured)
KERNEL_WIDTH = 32  # numbers of a row that the kernel takes at a time, beyond its end too: other widths crash it
PIECE = 1 << 22  # numbers that are bf16 at a time: little memory, and in the cache when they are used


@dataclass(frozen=True, slots=True)
class Int8:
    """values: (…, n_out, n_in) int8; scales: (…, n_out) bf16, the factor of each row's values. Rows that they multiply
    are bf16. Few rows go through torch's kernel for CPUs, which reads a byte a weight; more, and all on GPUs, are
    multiplied with a piece of the matrix at a time in bf16."""

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __getitem__(self, index: int | torch.Tensor) -> "Int8":
        return Int8(self.values[index], self.scales[index])


Weight: TypeAlias = torch.Tensor | Int8 | Int4
Loaded: TypeAlias = torch.Tensor | Int8 | Int4Rows


def concatenated(parts: Sequence[Loaded]) -> Weight:
    """Matrices of equal width and one kind, one under the other."""
    first = parts[0]
    if isinstance(first, Int8):
        return first if len(parts) == 1 else Int8(_joined(parts, "values"), _joined(parts, "scales"))
    if isinstance(first, Int4Rows):
        return pack_int4(first if len(parts) == 1 else Int4Rows(_joined(parts, "pairs"), _joined(parts, "steps")))
    return first if len(parts) == 1 else torch.cat([part for part in parts if isinstance(part, torch.Tensor)])


def _joined(parts: Sequence[Loaded], name: str) -> torch.Tensor:
    return torch.cat([getattr(part, name) for part in parts])


def multiply(rows: torch.Tensor, weight: Weight) -> torch.Tensor:
    """(n_rows, n_in) -> (n_rows, n_out) in float32; rows are rounded to the type of the weight's kernels."""
    if isinstance(weight, torch.Tensor):
        rows = rows.to(weight.dtype)
        if HAS_WIDE_SUMS and rows.device.type == CUDA and rows.dtype is torch.bfloat16:
            return torch.mm(rows, weight.t(), out_dtype=torch.float32)
        return linear(rows, weight).float()
    if isinstance(weight, Int8):
        return _multiply_int8(rows.bfloat16(), weight)
    return multiply_int4(rows.bfloat16(), weight)


def to_int8(rows: torch.Tensor) -> Int8:
    """(n_out, n_in) in float32, each row rounded to 255 numbers."""
    scales = (rows.abs().amax(-1) / LARGEST_INT8).bfloat16()
    steps = rows / torch.where(scales > 0, scales, 1).float()[..., None]
    return Int8(steps.round().clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8), scales)


def _multiply_int8(rows: torch.Tensor, weight: Int8) -> torch.Tensor:
    """(n_rows, n_in) bf16 -> (n_rows, n_out) in float32."""
    if rows.device.type == "cpu" and len(rows) <= FEW_ROWS and rows.shape[1] % KERNEL_WIDTH == 0:
        return torch._weight_int8pack_mm(rows, weight.values, weight.scales).float()
    step = max(1, PIECE // weight.values.shape[1])
    pieces = zip(weight.values.split(step), weight.scales.split(step), strict=True)
    return torch.cat([linear(rows, values.bfloat16()).float() * scales.float() for values, scales in pieces], 1)


SIZES = (8, 4, 2)  # of groups; the first that computes every row alike is taken, else rows are computed one by one
THREADS = (1, 2, 3, 4, 8)  # numbers of threads that must compute alike
LEAST_TRIED, LEAST_TRIED_F32 = 1 << 16, 1 << 12
"""Products of rows and a matrix: rounding to bf16 hides most differences of sums, and a float32 shows each."""
ONE_THREAD = 32768
"""Elementwise operations on up to so many numbers have one thread. Beyond, where a thread begins depends on their
number, and its last numbers may be computed without vectors, with another rounding of exponentials."""


def in_groups(
    size: int, compute: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], *rows: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The results of `compute` for rows, (n_rows, …) each, in groups of `size`; all at once if that is 0."""
    n_rows = len(rows[0])
    if not size:
        return _tuple(compute(*rows))
    results = []
    for first in range(0, n_rows, size):
        group = [each[first : first + size] for each in rows]
        n_missing = size - len(group[0])
        padded = [pad(each, (*[0, 0] * (each.dim() - 1), 0, n_missing)) if n_missing else each for each in group]
        results.append(_tuple(compute(*padded)))
    return tuple(torch.cat(parts)[:n_rows] for parts in zip(*results, strict=True))


def _tuple(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def gated_apart(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, each row by itself and in pieces that no number of threads divides."""
    product = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    for row in range(len(gate)):
        for first in range(0, gate.shape[1], ONE_THREAD):
            piece = slice(first, first + ONE_THREAD)
            product[row, piece] = silu(gate[row, piece]) * up[row, piece]
    return product


def rows_together(matrices: Sequence[Weight], n_threads: int) -> int:
    """The number of rows that may be multiplied at once so that each has the same bits in every place, beside any other
    rows and with any number of threads; 1 if there is none. Leaves `n_threads` set."""
    try:
        return next((size for size in SIZES if all(_is_exact(each, size, n_threads) for each in matrices)), 1)
    finally:
        torch.set_num_threads(n_threads)


def _is_exact(matrix: Weight, size: int, n_threads: int) -> bool:
    """Whether any `size` rows have one result each, as far as so many products tell."""
    generator = torch.Generator().manual_seed(size)
    is_f32 = isinstance(matrix, torch.Tensor) and matrix.dtype is torch.float32
    n_products = LEAST_TRIED_F32 if is_f32 else LEAST_TRIED
    batches = (
        torch.randn(size, matrix.shape[1], generator=generator) for _ in range(0, n_products, size * matrix.shape[0])
    )
    return all(_is_exact_for(matrix, rows.to(matrix.device), n_threads) for rows in batches)


def _is_exact_for(matrix: Weight, rows: torch.Tensor, n_threads: int) -> bool:
    """Whether each row has one result: in order, rotated, alone among zeros, and on more threads."""
    size = len(rows)
    torch.set_num_threads(n_threads)
    expected, alone = multiply(rows, matrix), torch.zeros_like(rows)
    alone[size - 1] = rows[0]
    if not torch.equal(multiply(alone, matrix)[size - 1], expected[0]):
        return False
    if not all(torch.equal(multiply(rows.roll(shift, 0), matrix).roll(-shift, 0), expected) for shift in range(size)):
        return False
    for other in THREADS:  # the same on every rank, so that all come to one answer
        torch.set_num_threads(other)
        if not torch.equal(multiply(rows, matrix), expected):
            return False
    return True
