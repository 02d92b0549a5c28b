"""Types in which a cache may keep keys and values, by llama.cpp's names. Knows no model and loads nothing."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class _Type(NamedTuple):
    """ggml's number of it; how many numbers are quantised together, and in how many bytes."""

    ggml: int
    block: int
    n_bytes: int


_TYPES: Mapping[str, _Type] = {
    "f32": _Type(0, 1, 4), "f16": _Type(1, 1, 2), "bf16": _Type(30, 1, 2), "q8_0": _Type(8, 32, 34),
    "q4_0": _Type(2, 32, 18), "q4_1": _Type(3, 32, 20), "iq4_nl": _Type(20, 32, 18), "q5_0": _Type(6, 32, 22),
    "q5_1": _Type(7, 32, 24),
}  # fmt: skip
CACHE_TYPES = tuple(_TYPES)


class KvShape(NamedTuple):
    """What a layer keeps of a token: heads, and the numbers of one's key and value. All 0: nothing."""

    n_heads: int = 0
    key: int = 0
    value: int = 0


class CacheTypes(NamedTuple):
    """Of keys and of values."""

    k: str = "f16"
    v: str = "f16"

    @property
    def ggml(self) -> tuple[int, int]:
        return _TYPES[self.k].ggml, _TYPES[self.v].ggml

    def cell_bytes(self, layers: Sequence[KvShape]) -> tuple[int, ...]:
        """What one token takes in each of the layers."""
        return tuple(_bytes(self.k, n * key) + _bytes(self.v, n * value) for n, key, value in layers)


F16_CACHE = CacheTypes()


def block_length(name: str) -> int:
    """Numbers that are quantised together: a head has a multiple of it."""
    return _TYPES[name].block


def _bytes(name: str, n: int) -> int:
    found = _TYPES[name]
    return -(-n // found.block) * found.n_bytes
