"""Matrices as whole numbers of 4 bits with a scale and an offset for every 32 of a row. Knows no layer.

Rows that they multiply are bf16, and so are scales and offsets: torch's kernels, one for CPUs and one for GPUs, take
them so. Neither looks at how many rows there are.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.four_bits import GROUP, MIDDLE, FourBits

LARGEST = 15
ROWS = 64
"""The kernels take matrices with whole multiples of 16 rows; on CPUs each 64 are packed by themselves."""

PIECE = 1 << 24
"""Numbers that are packed at a time on a CPU: 4 bytes each meanwhile."""

ALLOWED = 0.02


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """Before they are packed. pairs: (…, n_out, n_in / 2) uint8, the number that comes first in the upper half;
    steps: (…, n_out, n_in / GROUP, 2) bf16, scales and offsets."""

    pairs: torch.Tensor
    steps: torch.Tensor

    def __getitem__(self, index: torch.Tensor) -> "Int4Rows":
        return Int4Rows(self.pairs[index], self.steps[index])


@dataclass(frozen=True, slots=True)
class Int4:
    """packed: as the device's kernel wants it; steps: (…, n_in / GROUP, n_out filled up, 2) bf16. Experts' lie behind
    each other."""

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


def rounded(rows: torch.Tensor) -> Int4Rows:
    """(n_out, n_in) in float32, each to the nearest of 16 numbers between its group's least and largest."""
    groups = rows.view(len(rows), -1, GROUP)
    least, largest = groups.aminmax(dim=-1)
    scale = ((largest - least) / LARGEST).bfloat16()
    offset = (least + MIDDLE * scale.float()).bfloat16()
    whole = (groups - offset.float()[..., None]) / torch.where(scale > 0, scale, 1).float()[..., None]
    numbers = (whole.round() + MIDDLE).clamp(0, LARGEST).to(torch.uint8)
    return Int4Rows(_pairs(numbers.view(rows.shape)), torch.stack([scale, offset], -1))


def as_in_file(found: FourBits, n_out: int) -> Int4Rows:
    """The numbers of a file, whose scales and offsets are rounded to bf16."""
    steps = torch.stack([torch.from_numpy(found.scale), torch.from_numpy(found.offset)], -1)
    return Int4Rows(_pairs(torch.from_numpy(found.numbers).view(n_out, -1)), steps.bfloat16().view(n_out, -1, 2))


def _pairs(numbers: torch.Tensor) -> torch.Tensor:
    return numbers[..., ::2] << 4 | numbers[..., 1::2]


def packed(rows: Int4Rows) -> Int4:
    """What can be multiplied with: of a matrix, or of several behind each other."""
    if rows.pairs.dim() == 3:
        each = [packed(Int4Rows(*parts)) for parts in zip(rows.pairs, rows.steps, strict=True)]
        return Int4(torch.stack([one.packed for one in each]), torch.stack([one.steps for one in each]), each[0].n_out)
    n_out = len(rows.pairs)
    n_missing = -n_out % ROWS
    pairs, steps = pad(rows.pairs, (0, 0, 0, n_missing)), pad(rows.steps, (0, 0, 0, 0, 0, n_missing))
    return Int4(_packed(pairs), steps.transpose(0, 1).contiguous(), n_out)


def _packed(pairs: torch.Tensor) -> torch.Tensor:
    if pairs.device.type != "cpu":
        n_tiles = next(n for n in (8, 4, 2) if 2 * pairs.shape[1] % (16 * n) == 0)  # of 16 numbers each
        return torch.ops.aten._convert_weight_to_int4pack(pairs, n_tiles)
    step = ROWS * max(1, PIECE // (2 * ROWS * pairs.shape[1]))
    return torch.cat([_packed_on_cpu(part) for part in pairs.split(step)])


def _packed_on_cpu(pairs: torch.Tensor) -> torch.Tensor:
    numbers = torch.stack([pairs >> 4, pairs & 15], -1).view(len(pairs), -1)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1)


def multiply_int4(rows: torch.Tensor, weight: Int4) -> torch.Tensor:
    """(n_rows, n_in) bf16 -> (n_rows, n_out) in float32."""
    kernel = torch.ops.aten._weight_int4pack_mm
    if rows.device.type == "cpu":
        kernel = torch.ops.aten._weight_int4pack_mm_for_cpu
    return kernel(rows, weight.packed, GROUP, weight.steps)[:, : weight.n_out].float()


def check_device(device: torch.device) -> None:
    """Multiply a small matrix: kernels are not there for every GPU, and how they want it packed is nowhere promised.

    Raises UserError where the product is not what it should be.
    """
    generator = torch.Generator().manual_seed(0)
    matrix, rows = (torch.randn((n, 256), generator=generator) for n in (ROWS, 3))
    kept = rounded(matrix)
    numbers = torch.stack([kept.pairs >> 4, kept.pairs & 15], -1).view(ROWS, -1, GROUP).float()
    scale, offset = kept.steps.float()[..., None].unbind(-2)
    expected = rows @ ((numbers - MIDDLE) * scale + offset).view(ROWS, -1).T
    try:
        weight = packed(Int4Rows(kept.pairs.to(device), kept.steps.to(device)))
        found = multiply_int4(rows.bfloat16().to(device), weight).cpu()
        why = "its products are wrong"
    except RuntimeError as error:
        found, why = torch.zeros_like(expected), str(error).strip().partition("\n")[0]
    if (found - expected).norm() > ALLOWED * expected.norm():
        raise UserError(f"--backend torch:int4 does not work on {device} with torch {torch.__version__}: {why}; "
                        "use torch:int8 or torch:bf16")  # fmt: skip
