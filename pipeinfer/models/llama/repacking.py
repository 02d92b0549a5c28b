"""The kernels of this host's libggml, tried by multiplying: types of weights that it repacks, how many rows it may
multiply at once so that each has the bits that it has alone, and types of which a row has the same bits in all whole
groups of rows. Knows no model.

A kernel for repacked weights multiplies few rows one by one and more of them several at a time, which adds up in
another order. The limit depends on the processor and the build."""

import ctypes
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np

from pipeinfer.core.types import FloatArray
from pipeinfer.disk_cache import user_cache
from pipeinfer.models.llama import ggml
from pipeinfer.models.llama.amx_probe import CPU, F32, POINTER, InitParams, function
from pipeinfer.models.llama.decoder import can_find, exclude
from pipeinfer.models.llama.params import GROUP, TILED_ROWS, TILED_TYPES

TYPES = (2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 39)
"""GGML types that are repacked on some processor: Q4_0 to Q8_0, the K-quants, IQ4_NL, IQ4_XS and MXFP4."""

GROUP_TYPES = (0, 1, *TYPES, 30)  # with F32, F16 and BF16: types of models' matrices that can be made without a model
N_IN, N_OUT = 1024, 96  # of the matrix that is multiplied
SIZES = (2, 3, 4, 5, 6, 7, 8, 12, 16, 31, 32)  # rows at once
N_GROUPS = (1, 2, 3, 4, 5, 7, 8, 12, 16)  # at once
N_CHOICES = 2  # of rows of each size
N_THREADS = (1, 2)
MEMORY_BYTES = 1 << 20  # for ggml's records of tensors and graphs, not for data


class Repacked(NamedTuple):
    """`type`: ggml's. `n_rows`: at once, as far as was tried. `digest`: of the bits of rows alone; equal on hosts whose
    kernels add up alike."""

    type: int
    n_rows: int
    digest: str


class Grouped(NamedTuple):
    """`type`: ggml's, of which a row has the same bits in all whole groups of so many rows. `digest`: of these bits."""

    type: int
    n_rows: int
    digest: str


T = TypeVar("T")


def _cached(subject: str, read: Callable[..., T], check: Callable[["Kernels"], Iterable[T | None]]) -> tuple[T, ...]:
    """The results of `check`, cached on disk for this build and host; `read`: a cached result, from its fields. Empty
    where libggml must not repack."""
    if not ggml.amx_works():
        return ()
    name, cache_ = ggml.cache_key(subject), user_cache()
    try:
        return tuple(read(*fields) for fields in cache_.get(name))
    except (TypeError, ValueError):
        pass
    results = tuple(each for each in check(Kernels()) if each)
    cache_.put(name, results)
    return results


@cache
def grouped_types() -> tuple[Grouped, ...]:
    """With weights repacked if possible, and with tiled kernels in groups of TILED_ROWS rows alone. Empty where libggml
    must not repack."""
    types = [type for type in GROUP_TYPES if type not in TILED_TYPES or can_find()]
    return _cached(
        "in groups",
        lambda type, n_rows, digest: Grouped(int(type), int(n_rows), str(digest)),
        lambda kernels: itertools.starmap(kernels.check_groups, itertools.product(types, (GROUP, TILED_ROWS))),
    )


@cache
def repacked_types() -> tuple[Repacked, ...]:
    """Empty where libggml repacks nothing, or must not."""
    return _cached(
        "repacked",
        lambda type, n_rows, digest: Repacked(int(type), int(n_rows), str(digest)),
        lambda kernels: map(kernels.check, TYPES),
    )


def repacked_rows() -> dict[str, int]:
    """Rows at once, by the name of the type."""
    return {ggml.type_name(each.type).upper(): each.n_rows for each in repacked_types()}


class Kernels:
    """Multiplications on this host's CPU by a matrix that libggml repacks."""

    def __init__(self) -> None:
        self._base = base = ggml.ggml()
        device_by_type = function(base, "ggml_backend_dev_by_type", ctypes.c_int)
        self._device = device_by_type(CPU)
        self._backend = function(base, "ggml_backend_dev_init", POINTER, POINTER)(self._device, None)
        registered = function(base, "ggml_backend_dev_backend_reg", POINTER)(self._device)
        address_of = function(base, "ggml_backend_reg_get_proc_address", POINTER, ctypes.c_char_p)
        set_threads = address_of(registered, b"ggml_backend_set_n_threads")
        self._set_threads = ctypes.CFUNCTYPE(None, POINTER, ctypes.c_int)(set_threads)
        extra = address_of(registered, b"ggml_backend_dev_get_extra_bufts")
        types = ctypes.CFUNCTYPE(ctypes.POINTER(POINTER), POINTER)(extra)(self._device) if extra else []
        self._extra_buffers = list(itertools.takewhile(bool, (types[at] for at in itertools.count()))) if types else []
        self._plain_buffer = function(base, "ggml_backend_dev_buffer_type", POINTER)(self._device)
        self._new_tensor = function(base, "ggml_new_tensor_2d", POINTER, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        self._mul_mat = function(base, "ggml_mul_mat", POINTER, POINTER, POINTER)

    def check(self, type: int) -> Repacked | None:
        """None if this type is not repacked."""
        generator = np.random.default_rng(type)
        weights, rows = (generator.standard_normal((n, N_IN), np.float32) for n in (N_OUT, SIZES[-1]))
        for buffer_type in self._extra_buffers:  # libllama takes the first that does
            with self._tensors() as context, self._matrix(context, type, weights, buffer_type) as matrix:
                if matrix:
                    return self._check(type, matrix, rows)
        return None

    def _check(self, type: int, matrix: int, rows: FloatArray) -> Repacked:
        alone = np.concatenate([self._multiply(matrix, row[None], 1) for row in rows])
        n_rows = 1
        for size in SIZES:
            if not all(np.array_equal(self._multiply(matrix, rows[:size], n), alone[:size]) for n in N_THREADS):
                break
            n_rows = size
        return Repacked(type, n_rows, hashlib.sha256(alone.tobytes()).hexdigest()[:16])

    def check_groups(self, type: int, group: int) -> Grouped | None:
        """None if a row has other bits in some whole groups. Also of a matrix that is not repacked for its shape."""
        generator = np.random.default_rng(type)
        weights, rows = (generator.standard_normal((n, N_IN), np.float32) for n in (N_OUT, N_GROUPS[-1] * group))
        results = list[bytes]()
        for buffer_type in (*self._extra_buffers, self._plain_buffer):
            with self._tensors() as context, self._matrix(context, type, weights, buffer_type) as matrix:
                if not matrix:
                    continue
                if buffer_type == self._plain_buffer and group < TILED_ROWS:
                    exclude(matrix)
                result = self._check_groups(group, matrix, rows)
                if result is None:
                    return None
                results.append(result.tobytes())
        return Grouped(type, group, hashlib.sha256(b"".join(results)).hexdigest()[:16]) if results else None

    def _check_groups(self, group: int, matrix: int, rows: FloatArray) -> FloatArray | None:
        """The product, if a row is the same in all whole groups."""
        together, generator = self._multiply(matrix, rows, 1), np.random.default_rng(0)
        for n_groups, n_threads, _ in itertools.product(N_GROUPS, N_THREADS, range(N_CHOICES)):
            chosen = generator.permutation(len(rows))[: n_groups * group]
            if not np.array_equal(self._multiply(matrix, rows[chosen], n_threads), together[chosen]):
                return None
        return together

    @contextmanager
    def _tensors(self) -> Iterator[int]:
        """A ggml context without data."""
        context = function(self._base, "ggml_init", InitParams)(InitParams(MEMORY_BYTES, None, True))
        yield context
        function(self._base, "ggml_free", POINTER)(context)

    @contextmanager
    def _allocated(self, context: int, buffer_type: int) -> Iterator[None]:
        """The context's tensors, with memory of this type."""
        allocate = function(self._base, "ggml_backend_alloc_ctx_tensors_from_buft", POINTER, POINTER)
        buffer = allocate(context, buffer_type)
        yield
        function(self._base, "ggml_backend_buffer_free", POINTER)(buffer)

    @contextmanager
    def _matrix(self, context: int, type: int, weights: FloatArray, buffer_type: int) -> Iterator[int]:
        """The weights in memory of this type; 0 if that is not possible."""
        matrix = self._new_tensor(context, type, N_IN, N_OUT)
        with self._allocated(context, buffer_type), self._tensors() as other:
            supports = self._base.ggml_backend_dev_supports_op
            supports.restype, supports.argtypes = ctypes.c_bool, [POINTER, POINTER]
            if supports(self._device, self._mul_mat(other, matrix, self._new_tensor(other, F32, N_IN, 1))):
                data = self._quantised(type, weights)
                self._base.ggml_backend_tensor_set(matrix, data, 0, len(data))
                yield matrix
            else:
                yield 0

    def _quantised(self, type: int, weights: FloatArray) -> bytes:
        row_size, quantise = self._base.ggml_row_size, self._base.ggml_quantize_chunk
        row_size.restype, row_size.argtypes = ctypes.c_size_t, [ctypes.c_int, ctypes.c_int64]
        quantise.restype = ctypes.c_size_t
        quantise.argtypes = [ctypes.c_int, POINTER, POINTER, *[ctypes.c_int64] * 3, POINTER]
        data = ctypes.create_string_buffer(N_OUT * row_size(type, N_IN))
        quantise(type, weights.ctypes.data, data, 0, N_OUT, N_IN, None)
        return data.raw

    def _multiply(self, matrix: int, rows: FloatArray, n_threads: int) -> FloatArray:
        """(n, N_IN) -> (n, N_OUT)"""
        base, out = self._base, np.empty((len(rows), N_OUT), np.float32)
        rows = np.ascontiguousarray(rows)
        with self._tensors() as context:
            entry = self._new_tensor(context, F32, N_IN, len(rows))
            product = self._mul_mat(context, matrix, entry)
            graph = function(base, "ggml_new_graph", POINTER)(context)
            function(base, "ggml_build_forward_expand", POINTER, POINTER)(graph, product)
            with self._allocated(context, self._plain_buffer):
                base.ggml_backend_tensor_set(entry, rows.ctypes.data, 0, rows.nbytes)
                self._set_threads(self._backend, n_threads)
                function(base, "ggml_backend_graph_compute", POINTER, POINTER)(self._backend, graph)
                base.ggml_backend_tensor_get(product, out.ctypes.data, 0, out.nbytes)
        return out
