"""The tensors of a slice as torch's, dequantised on the way, a few rows at a time: for the CPU, and of rarer types, by
ggml's own conversions, else on the device, to which a file's bytes are the least to copy."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from pipeinfer.models.gguf.four_bits import GROUP, READERS, read_four_bits
from pipeinfer.models.gguf.header import Tensor, read_header
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.gguf.writer import tensor_data
from pipeinfer.models.llama.ggml import dequantise
from pipeinfer.models.torch.matrices import Loaded, Weight, under_each_other
from pipeinfer.models.torch.params import CPU, F32, INT4, INT8
from pipeinfer.models.torch.quantised.dequantise import dequantise_there
from pipeinfer.models.torch.quantised.int4 import Int4Rows, as_in_file, rounded
from pipeinfer.models.torch.quantised.int8 import Int8, quantised

PIECE_BYTES = 4 << 20
BF16 = 30
"""GGML's number."""

HEADS = ("output.weight", "token_embd.weight")
"""What makes logits; the second where a slice has not the first."""


def slice_tensors(slice_file: SliceFile) -> dict[str, Tensor]:
    """Where each tensor of a slice lies, by its name there."""
    is_whole = slice_file.is_first and slice_file.is_last
    tensors = slice_file.info.tensors if is_whole else read_header(slice_file.path).tensors
    return {tensor.name: tensor for tensor in tensors}


class Weights:
    """Reads a slice's tensors when they are asked for. `keep`: what matrices are kept as, one of `params`' types; all
    else stays in float32."""

    def __init__(self, slice_file: SliceFile, keep: str, device: torch.device, n_threads: int = 1) -> None:
        self.tensors: Mapping[str, Tensor] = slice_tensors(slice_file)
        self.keep, self.device = keep, device
        self._pool = ThreadPoolExecutor(n_threads)

    def matrix(self, *names: str, order: Callable[[str], torch.Tensor | None] = lambda name: None) -> Weight:
        """Matrices of equal width, one under the other: (sum of their rows, width). `order`: of the rows of each."""
        return under_each_other([_ordered(self._load_matrix(name), order(name)) for name in names])

    def _load_matrix(self, name: str) -> Loaded:
        """Of those in 4 bits the head has 8, for which there is a fast kernel on CPUs alone; rows that are no whole
        groups of 4 bits have 16."""
        is_head = name in HEADS
        if self.keep == INT8 or (self.keep == INT4 and is_head and self.device.type == CPU):
            return self._load_int8(name)
        if self.keep == INT4 and not is_head and self.tensors[name].shape[0] % GROUP == 0:
            return self._load_int4(name)
        return self._load(name, torch.float32 if self.keep == F32 else torch.bfloat16)

    def vector(self, name: str) -> torch.Tensor:
        return self._load(name, torch.float32)

    def close(self) -> None:
        self._pool.shutdown()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self.tensors[name]
        found = torch.empty(_shape(tensor), dtype=dtype, device=self.device)
        rows = found.view(-1, found.shape[-1])

        def put(own: slice, data: memoryview) -> None:
            rows[own] = self._numbers(tensor, data, dtype)

        self._read(name, put)
        return found

    def _load_int8(self, name: str) -> Int8:
        tensor = self.tensors[name]
        shape = _shape(tensor)
        found = Int8(
            torch.empty(shape, dtype=torch.int8, device=self.device),
            torch.empty(shape[:-1], dtype=torch.bfloat16, device=self.device),
        )
        values, scales = found.values.view(-1, shape[-1]), found.scales.view(-1)

        def put(own: slice, data: memoryview) -> None:
            piece = quantised(self._numbers(tensor, data, torch.float32))
            values[own], scales[own] = piece.values, piece.scales

        self._read(name, put)
        return found

    def _load_int4(self, name: str) -> Int4Rows:
        """As the file has them where its type has 4 bits, else rounded."""
        tensor = self.tensors[name]
        *others, n_in = _shape(tensor)
        found = Int4Rows(
            torch.empty((*others, n_in // 2), dtype=torch.uint8, device=self.device),
            torch.empty((*others, n_in // GROUP, 2), dtype=torch.bfloat16, device=self.device),
        )
        pairs, steps = found.pairs.view(-1, n_in // 2), found.steps.view(-1, n_in // GROUP, 2)

        def put(own: slice, data: memoryview) -> None:
            if tensor.type in READERS:
                piece = as_in_file(read_four_bits(tensor.type, data), own.stop - own.start)
            else:
                piece = rounded(self._numbers(tensor, data, torch.float32))
            pairs[own], steps[own] = piece.pairs, piece.steps

        self._read(name, put)
        return found

    def _numbers(self, tensor: Tensor, data: memoryview, dtype: torch.dtype) -> torch.Tensor:
        """(n_rows, width) what data of a tensor's rows stand for; as they are, where the type is already `dtype`."""
        width = tensor.shape[0]
        if tensor.type == BF16 and dtype is torch.bfloat16:
            return torch.frombuffer(data, dtype=dtype).view(-1, width)
        if self.device.type != CPU:
            there = dequantise_there(tensor.type, torch.frombuffer(data, dtype=torch.uint8).to(self.device))
            if there is not None:
                return there.view(-1, width)
        n = len(data) * tensor.n_elements // tensor.n_bytes
        return torch.from_numpy(dequantise(tensor.type, data, n)).view(-1, width)

    def _read(self, name: str, put: Callable[[slice, memoryview], None]) -> None:
        """`put` gets which rows, and their data. Raises UserError where the file has become shorter."""
        tensor = self.tensors[name]
        n_rows = tensor.n_elements // tensor.shape[0]
        row_bytes = tensor.n_bytes // n_rows
        step = max(1, PIECE_BYTES // row_bytes)

        def load_rows(first: int) -> None:
            """A piece, in whichever thread."""
            n = min(step, n_rows - first)
            piece = replace(tensor, offset=tensor.offset + first * row_bytes, n_bytes=n * row_bytes)
            with torch.inference_mode():
                for data in tensor_data(piece, piece.n_bytes):
                    put(slice(first, first + n), data)

        for _ in self._pool.map(load_rows, range(0, n_rows, step)):
            pass


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(reversed(tensor.shape))


def _ordered(rows: Loaded, order: torch.Tensor | None) -> Loaded:
    if order is None:
        return rows
    return rows[order.to(rows.pairs.device if isinstance(rows, Int4Rows) else rows.device)]
