"""Records of fixed size in a flat buffer: little-endian fields without gaps. Knows no message.

A record is a NamedTuple or dataclass whose annotations are its layout: `I32` takes 4 bytes; `int`, `bool`, an IntEnum
and `float` take 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from itertools import starmap
from operator import attrgetter
from struct import Struct
from typing import Annotated, Any, Generic, TypeVar, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]
I32 = Annotated[int, "i"]
T = TypeVar("T")


class Record(Generic[T]):
    """The layout of one type's values. Raises TypeError for a field that has no fixed size."""

    def __init__(self, kind: Callable[..., T]) -> None:
        hints = get_type_hints(kind, include_extras=True)
        codes = [_code(name, hint) for name, hint in hints.items()]
        self._make = kind
        self.dtype = np.dtype([(name, f"<{code}") for name, code in zip(hints, codes, strict=True)])
        self.n_bytes = self.dtype.itemsize
        self._struct = Struct("<" + "".join(codes))
        self._fields_of: Callable[[T], tuple[Any, ...]] = attrgetter(*hints)  # two fields at least
        self._conversions = [(at, hint) for at, hint in enumerate(hints.values()) if _needs_conversion(hint)]

    def pack(self, value: T) -> bytes:
        return self._struct.pack(*self._fields_of(value))

    def write(self, value: T, buffer: Buffer, at: int) -> None:
        self._struct.pack_into(buffer.data, at, *self._fields_of(value))

    def read(self, buffer: Buffer, at: int) -> T:
        values = list(self._struct.unpack_from(buffer.data, at))
        for column, convert in self._conversions:
            values[column] = convert(values[column])
        return self._make(*values)

    def read_all(self, buffer: Buffer, at: int, n: int) -> Iterator[T]:
        """`n` consecutive records."""
        found = self._struct.iter_unpack(buffer[at : at + n * self.n_bytes].data)
        if not n or not self._conversions:
            return starmap(self._make, found)
        columns: list[Iterable[Any]] = list(zip(*found, strict=True))
        for column, convert in self._conversions:
            columns[column] = map(convert, columns[column])
        return map(self._make, *columns)

    def view(self, buffer: Buffer, at: int, n: int) -> npt.NDArray[Any]:
        """The same as a structured array that shares the buffer's memory."""
        return np.ndarray(n, self.dtype, buffer, at)


def _code(name: str, hint: Any) -> str:
    if code := get_args(hint):
        return str(code[1])
    if isinstance(hint, type) and issubclass(hint, (int, float)):
        return "q" if issubclass(hint, int) else "d"
    raise TypeError(f"{name}: {hint} has no fixed size; a record has int, bool, IntEnum and float fields")


def _needs_conversion(hint: Any) -> bool:
    return isinstance(hint, type) and (hint is bool or issubclass(hint, IntEnum))
