"""Blocks of GGML's quantised types as numbers, on whichever device their bytes are. Knows no file and no model.

Layouts are those of ggml's `ggml-common.h`; each function takes (n_blocks, bytes of a block) and gives (n_blocks,
values of a block) in float32. Types that are not here are read by ggml, on the host.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Bytes: TypeAlias = torch.Tensor
"""uint8."""


def dequantise_there(type_number: int, data: Bytes) -> torch.Tensor | None:
    """The float32 values of a tensor's bytes, (n,), where these are; None for a type that is not here."""
    known = BLOCKS.get(type_number)
    return None if known is None else known.read(data.view(-1, known.n_bytes)).flatten()


def _half(blocks: Bytes, first: int) -> torch.Tensor:
    """(n_blocks, 1): a float16 of each."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(pairs: Bytes) -> torch.Tensor:
    """(…, n) -> (…, 2, n): the low halves, then the high ones."""
    return torch.stack([pairs & 15, pairs >> 4], -2)


def _shifted(packed: Bytes, *shifts: int) -> torch.Tensor:
    """(…, n) -> (…, shifts, n): two bits from each place."""
    return torch.stack([packed >> shift & 3 for shift in shifts], -2)


def _bits(packed: Bytes, n: int) -> torch.Tensor:
    """(n_blocks, n / 8) -> (n_blocks, n) of 0 and 1, the lowest bit of each byte first."""
    return torch.stack([packed >> shift & 1 for shift in range(8)], -1).view(len(packed), n)


def _q8_0(blocks: Bytes) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _q4_0(blocks: Bytes) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).flatten(1).float() - 8)


def _q4_1(blocks: Bytes) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).flatten(1).float() + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> torch.Tensor:
    values = _nibbles(blocks[:, 6:]).flatten(1) | _bits(blocks[:, 2:6], 32) << 4
    return _half(blocks, 0) * (values.float() - 16)


def _q5_1(blocks: Bytes) -> torch.Tensor:
    values = _nibbles(blocks[:, 8:]).flatten(1) | _bits(blocks[:, 4:8], 32) << 4
    return _half(blocks, 0) * values.float() + _half(blocks, 2)


def _q2_k(blocks: Bytes) -> torch.Tensor:
    scales, values = blocks[:, :16], _shifted(blocks[:, 16:80].view(-1, 2, 32), 0, 2, 4, 6).reshape(-1, 16, 16)
    steps, least = _half(blocks, 80) * (scales & 15).float(), _half(blocks, 82) * (scales >> 4).float()
    return (steps[..., None] * values.float() - least[..., None]).flatten(1)


def _q3_k(blocks: Bytes) -> torch.Tensor:
    masks, packed = blocks[:, :32], blocks[:, 96:108]
    low, high = _nibbles(packed[:, :8]).flatten(1), _shifted(packed[:, 8:], 0, 2, 4, 6).flatten(1)
    steps = _half(blocks, 108) * ((low | high << 4).float() - 32)
    third = torch.stack([masks >> bit & 1 for bit in range(8)], 1).view(-1, 2, 4, 32)
    values = (_shifted(blocks[:, 32:96].view(-1, 2, 32), 0, 2, 4, 6) | third << 2).reshape(-1, 16, 16)
    return (steps[..., None] * (values.float() - 4)).flatten(1)


def _scales_of_k(packed: Bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """(n_blocks, 12) -> two of (n_blocks, 8): six bits each."""
    first, second, third = packed.split(4, 1)
    return (
        torch.cat([first & 63, third & 15 | first >> 6 << 4], 1).float(),
        torch.cat([second & 63, third >> 4 | second >> 6 << 4], 1).float(),
    )


def _q4_k(blocks: Bytes) -> torch.Tensor:
    steps, least = _scales_of_k(blocks[:, 4:16])
    values = _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return _stepped(blocks, steps, least, values)


def _q5_k(blocks: Bytes) -> torch.Tensor:
    steps, least = _scales_of_k(blocks[:, 4:16])
    fifth = torch.stack([blocks[:, 16:48] >> bit & 1 for bit in range(8)], 1)
    values = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | fifth << 4
    return _stepped(blocks, steps, least, values)


def _stepped(blocks: Bytes, steps: torch.Tensor, least: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    steps, least = _half(blocks, 0) * steps, _half(blocks, 2) * least
    return (steps[..., None] * values.float() - least[..., None]).flatten(1)


def _q6_k(blocks: Bytes) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    values = (low | _shifted(blocks[:, 128:192].view(-1, 2, 32), 0, 2, 4, 6) << 4).reshape(-1, 16, 16)
    steps = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (steps[..., None] * (values.float() - 32)).flatten(1)


class Blocks(NamedTuple):
    """What a type's blocks are."""

    n_bytes: int
    read: Callable[[Bytes], torch.Tensor]


_READERS: dict[str, Callable[[Bytes], torch.Tensor]] = {
    "F32": lambda blocks: blocks.view(torch.float32),
    "F16": lambda blocks: blocks.view(torch.float16).float(),
    "BF16": lambda blocks: blocks.view(torch.bfloat16).float(),
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip

BLOCKS = {
    int(kind): Blocks(GGML_QUANT_SIZES[kind][1], read)
    for kind, read in ((GGMLQuantizationType[name], read) for name, read in _READERS.items())
}
"""By GGML's number."""
