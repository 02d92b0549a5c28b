"""The tensors of a slice as torch's, dequantised on the way: by ggml's own conversions, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from pipeinfer.models.gguf.header import Tensor, read_header
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.gguf.writer import tensor_data
from pipeinfer.models.llama.ggml import dequantise
from pipeinfer.models.torch.int8 import Int8, Weight, quantised, under_each_other

PIECE_BYTES = 4 << 20
BF16 = 30  # GGML's number


def slice_tensors(slice_file: SliceFile) -> dict[str, Tensor]:
    """Where each tensor of a slice lies, by its name there."""
    is_whole = slice_file.is_first and slice_file.is_last
    tensors = slice_file.info.tensors if is_whole else read_header(slice_file.path).tensors
    return {tensor.name: tensor for tensor in tensors}


class Weights:
    """Reads a slice's tensors when they are asked for. `keep`: the type of matrices, float32, bf16 or int8; all else
    stays in float32."""

    def __init__(self, slice_file: SliceFile, keep: torch.dtype, device: torch.device, n_threads: int = 1) -> None:
        self.tensors: Mapping[str, Tensor] = slice_tensors(slice_file)
        self.keep, self.device = keep, device
        self._pool = ThreadPoolExecutor(n_threads)

    def matrix(self, *names: str, order: Callable[[str], torch.Tensor | None] = lambda name: None) -> Weight:
        """Matrices of equal width, one under the other: (sum of their rows, width). `order`: of the rows of each."""
        load = self._load_int8 if self.keep is torch.int8 else self._load
        return under_each_other([_ordered(load(name, self.keep), order(name)) for name in names])

    def vector(self, name: str) -> torch.Tensor:
        return self._load(name, torch.float32)

    def close(self) -> None:
        self._pool.shutdown()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = tuple(reversed(self.tensors[name].shape))
        found = torch.empty(shape, dtype=dtype, device=self.device)
        rows = found.view(-1, shape[-1])

        def put(own: slice, piece: torch.Tensor) -> None:
            rows[own] = piece

        self._read(name, dtype, put)
        return found

    def _load_int8(self, name: str, dtype: torch.dtype) -> Int8:
        shape = tuple(reversed(self.tensors[name].shape))
        found = Int8(
            torch.empty(shape, dtype=dtype, device=self.device),
            torch.empty(shape[:-1], dtype=torch.bfloat16, device=self.device),
        )
        values, scales = found.values.view(-1, shape[-1]), found.scales.view(-1)

        def put(own: slice, piece: torch.Tensor) -> None:
            rounded = quantised(piece)
            values[own], scales[own] = rounded.values, rounded.scales

        self._read(name, torch.float32, put)
        return found

    def _read(self, name: str, dtype: torch.dtype, put: Callable[[slice, torch.Tensor], None]) -> None:
        """`put` gets which rows, and what is in them. Raises UserError where the file has become shorter."""
        tensor = self.tensors[name]
        length = tensor.shape[0]
        n_rows = tensor.n_elements // length
        row_bytes = tensor.n_bytes // n_rows
        step = max(1, PIECE_BYTES // row_bytes)

        def load_rows(first: int) -> None:
            """A piece, in whichever thread."""
            n = min(step, n_rows - first)
            piece = replace(tensor, offset=tensor.offset + first * row_bytes, n_bytes=n * row_bytes)
            with torch.inference_mode():
                for data in tensor_data(piece, piece.n_bytes):
                    put(slice(first, first + n), _numbers(tensor.type, data, n * length, dtype).view(n, length))

        for _ in self._pool.map(load_rows, range(0, n_rows, step)):
            pass


def _numbers(kind: int, data: memoryview, n: int, dtype: torch.dtype) -> torch.Tensor:
    """(n,) what the data stand for; as they are, where the type is already the one that is kept."""
    if kind == BF16 and dtype is torch.bfloat16:
        return torch.frombuffer(data, dtype=dtype, count=n)
    return torch.from_numpy(dequantise(kind, data, n))


def _ordered(rows: Weight, order: torch.Tensor | None) -> Weight:
    return rows if order is None else rows[order.to(rows.device)]
