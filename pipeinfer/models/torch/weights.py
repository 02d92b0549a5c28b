"""The tensors of a slice as torch's, dequantised by ggml on the host, a few rows at a time."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from pipeinfer.models.gguf.header import Tensor, read_header
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.gguf.writer import tensor_data
from pipeinfer.models.llama.token_table import dequantise
from pipeinfer.models.torch.matrices import (
    BLOCK_BYTES,
    GROUP,
    Int4Rows,
    Int8,
    Loaded,
    Weight,
    concatenated,
    from_four_bits,
    read_four_bits,
    to_int4,
    to_int8,
)
from pipeinfer.models.torch.params import CPU, F32, INT4, INT8

PIECE_BYTES = 4 << 20
GGML_BF16 = 30  # GGML's number
HEADS = ("output.weight", "token_embd.weight")  # the output matrix; the second where a slice lacks the first


class Weights:
    """Reads a slice's tensors. `dtype`: of matrices, one of `params`' types; all else is float32."""

    def __init__(self, slice_file: SliceFile, dtype: str, device: torch.device, n_threads: int = 1) -> None:
        is_whole = slice_file.is_first and slice_file.is_last
        tensors = slice_file.info.tensors if is_whole else read_header(slice_file.path).tensors
        self.tensors: Mapping[str, Tensor] = {tensor.name: tensor for tensor in tensors}
        self.dtype, self.device = dtype, device
        self._pool = ThreadPoolExecutor(n_threads)

    def matrix(self, *names: str, order: Callable[[str], torch.Tensor | None] = lambda name: None) -> Weight:
        """Matrices of equal width, one under the other: (sum of their rows, width). `order`: of the rows of each."""
        loaded = []
        for name in names:
            rows, of_rows = self._load_matrix(name), order(name)
            loaded.append(rows if of_rows is None else rows[of_rows.to(self.device)])
        return concatenated(loaded)

    def _load_matrix(self, name: str) -> Loaded:
        """With 4 bits the output matrix has 8 on CPUs, where that kernel is fast; rows of no whole groups have 16."""
        is_head = name in HEADS
        if self.dtype == INT8 or (self.dtype == INT4 and is_head and self.device.type == CPU):
            return self._load_int8(name)
        if self.dtype == INT4 and not is_head and self.tensors[name].shape[0] % GROUP == 0:
            return self._load_int4(name)
        return self._load(name, torch.float32 if self.dtype == F32 else torch.bfloat16)

    def vector(self, name: str) -> torch.Tensor:
        return self._load(name, torch.float32)

    def close(self) -> None:
        self._pool.shutdown()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self.tensors[name]

        def convert(data: memoryview, n_rows: int) -> list[torch.Tensor]:
            if tensor.type == GGML_BF16 and dtype is torch.bfloat16:
                return [torch.frombuffer(data, dtype=dtype)]
            return [_floats(tensor, data)]

        matrix = self._empty(_shape(tensor), dtype)
        self._read(name, [matrix.view(-1, matrix.shape[-1])], convert)
        return matrix

    def _load_int8(self, name: str) -> Int8:
        tensor = self.tensors[name]

        def convert(data: memoryview, n_rows: int) -> list[torch.Tensor]:
            piece = to_int8(_floats(tensor, data).to(self.device))
            return [piece.values, piece.scales]

        shape = _shape(tensor)
        matrix = Int8(self._empty(shape, torch.int8), self._empty(shape[:-1], torch.bfloat16))
        self._read(name, [matrix.values.view(-1, shape[-1]), matrix.scales.view(-1)], convert)
        return matrix

    def _load_int4(self, name: str) -> Int4Rows:
        """The file's numbers if its type has 4 bits, else rounded ones."""
        tensor = self.tensors[name]

        def convert(data: memoryview, n_rows: int) -> list[torch.Tensor]:
            if tensor.type in BLOCK_BYTES:
                piece = from_four_bits(read_four_bits(tensor.type, data), n_rows)
            else:
                piece = to_int4(_floats(tensor, data).to(self.device))
            return [piece.pairs, piece.steps]

        *others, n_in = _shape(tensor)
        pairs = self._empty((*others, n_in // 2), torch.uint8)
        steps = self._empty((*others, n_in // GROUP, 2), torch.bfloat16)
        self._read(name, [pairs.view(-1, n_in // 2), steps.view(-1, n_in // GROUP, 2)], convert)
        return Int4Rows(pairs, steps)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _read(
        self, name: str, targets: Sequence[torch.Tensor], convert: Callable[[memoryview, int], list[torch.Tensor]]
    ) -> None:
        """Fill rows of the targets, converted in threads, some rows at a time. Raises UserError for a shorter file."""
        tensor = self.tensors[name]
        n_rows = tensor.n_elements // tensor.shape[0]
        row_bytes = tensor.n_bytes // n_rows
        step = max(1, PIECE_BYTES // row_bytes)

        def load_rows(first: int) -> None:
            n = min(step, n_rows - first)
            piece = replace(tensor, offset=tensor.offset + first * row_bytes, n_bytes=n * row_bytes)
            with torch.inference_mode():
                for data in tensor_data(piece, piece.n_bytes):
                    for target, values in zip(targets, convert(data, n), strict=True):
                        target[first : first + n] = values.view(-1, *target.shape[1:])

        for _ in self._pool.map(load_rows, range(0, n_rows, step)):
            pass


def _floats(tensor: Tensor, data: memoryview) -> torch.Tensor:
    """(n_rows, width) the values of data of a tensor's rows, on the host."""
    n = len(data) * tensor.n_elements // tensor.n_bytes
    return torch.from_numpy(dequantise(tensor.type, data, n)).view(-1, tensor.shape[0])


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(reversed(tensor.shape))
