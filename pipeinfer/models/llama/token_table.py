"""Rows of quantised tensors as ggml reads them, and the token table of a first slice. Knows no context and no batch."""

import ctypes
import math
from typing import Any

import numpy as np

from pipeinfer.core.types import FloatArray, IntArray
from pipeinfer.models.gguf.contents import SourceFile
from pipeinfer.models.gguf.header import F32, Tensor
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.llama import ggml

_ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _TypeTraits(ctypes.Structure):
    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("block_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", _ToFloat),
        ("from_float_ref", ctypes.c_void_p),
    ]


def _to_float(ggml_type: int) -> Any:
    """ggml's conversion of a type's rows, (source, target, number of values); none for F32."""
    traits_of = ggml.ggml().ggml_get_type_traits
    traits_of.argtypes, traits_of.restype = [ctypes.c_int], ctypes.POINTER(_TypeTraits)
    return traits_of(ggml_type).contents.to_float


def dequantise(ggml_type: int, data: bytes | memoryview, n_values: int) -> FloatArray:
    """(n_values,) the values of a tensor's data, whole rows, by ggml's own conversion."""
    if ggml_type == F32:
        return np.frombuffer(data, np.float32, n_values)
    out = np.empty(n_values, np.float32)
    source = np.frombuffer(data, np.uint8)
    _to_float(ggml_type)(source.ctypes.data, out.ctypes.data, n_values)
    return out


class TokenTable:
    """The rows of a token embedding, read from the model file when tokens need them. They have the bits of libllama's
    own lookup. Only rows in use are ever read, and the first slice needs no vocabulary. Read, not mapped: a model file
    that is truncated while the job runs is a fault with a name."""

    def __init__(self, tensor: Tensor, source: SourceFile, scale: float = 1.0) -> None:
        """`source`: the tensor's file, which the table closes. Rows are multiplied by `scale`."""
        self._scale = np.float32(scale)
        self.n_embd, self.n_vocab = tensor.shape
        self._row_bytes = tensor.n_bytes // self.n_vocab
        self._type, self._offset, self._source = tensor.type, tensor.offset, source
        self._convert = _to_float(tensor.type)

    def lookup(self, tokens: IntArray) -> FloatArray:
        """(n_rows,) token ids -> (n_rows, n_embd) embeddings. ValueError for an id outside the vocabulary, ModelFault
        when the file was changed."""
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.n_vocab:
            raise ValueError(f"token ids {tokens.min()}..{tokens.max()} for a vocabulary of {self.n_vocab}")
        out = np.empty((len(tokens), self.n_embd), np.float32)
        address, stride = out.ctypes.data, 4 * self.n_embd
        for i, token in enumerate(tokens.tolist()):
            row = self._source.read(self._row_bytes, self._offset + token * self._row_bytes)
            if self._type == F32:
                out[i] = np.frombuffer(row, np.float32)
            else:
                self._convert(row, address + i * stride, self.n_embd)
        self._source.check()
        return out if self._scale == 1 else out * self._scale

    def close(self) -> None:
        self._source.close()


def token_table(slice_file: SliceFile) -> TokenTable:
    """Of a first slice."""
    info = slice_file.info
    scale = math.sqrt(info.n_embd) if info.layers.architecture.scaled else 1.0
    if slice_file.table:
        (table, source), slice_file.table = slice_file.table, None  # the table closes it from now on
        return TokenTable(table, source, scale)
    tensor = info.tensor("token_embd.weight")
    assert tensor is not None, info.path
    return TokenTable(tensor, info.source(tensor.path), scale)
