"""LoRA adapters, GGUF files: which tensors of a model they change, and their parts for slices and kernels. Loads
nothing.

Rows are multiplied by A and then by B of a tensor's pair, and added to those that the tensor gives. libggml multiplies
several rows by such matrices in tiles, which add up in another order than for a row alone, where the number of A's
columns (the rank) is a multiple of 4. With an odd rank, by zeros, rows have the bits of a row alone."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeinfer.core.types import AdapterScales
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.contents import FileState
from pipeinfer.models.gguf.header import BLOCKS, STRING, FileHead, Header, Tensor, damaged, read_header, value_of
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of
from pipeinfer.models.gguf.writer import encode_entry, encode_header, encode_number, encode_text, padded, tensor_data

A, B = ".lora_a", ".lora_b"
PASSED_OVER = "_norm.weight"  # libllama passes over tensors whose names end so
TILED, UNTILED = frozenset([0, 1, 30]), frozenset([8])
"""GGML types of which tiles add up otherwise, F32, F16 and BF16, and those of which they do not, Q8_0."""

TILE = 4  # columns
N_DIGITS = 8  # of a digest in the name of numerics
ALPHA, INVOCATION = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
WAY_OUT = "give the adapter that was made for this model"


class Pair(NamedTuple):
    """The change of tensor `base`: `a` of shape (n_in, rank), `b` of (rank, n_out), each a third time for experts."""

    base: str
    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    @property
    def is_tiled(self) -> bool:
        """Whether several rows are multiplied in tiles, other than those of experts."""
        return self.rank % TILE == 0 and len(self.a.shape) == 2 and not {self.a.type, self.b.type} <= UNTILED

    @property
    def is_exact(self) -> bool:
        """Whether all rows can have the bits of a row alone."""
        can_be_odd = BLOCKS[self.b.type][0] == 1
        return {self.a.type, self.b.type} <= TILED | UNTILED and (can_be_odd or not self.is_tiled)


@dataclass(frozen=True)
class Adapter:
    """`alpha`: 0 if it has none. `content`: the GGUF file of one that was `cut`; empty: it is at `path`."""

    path: Path
    architecture: str
    alpha: float
    digest: str  # of the header and samples of every tensor
    pairs: tuple[Pair, ...]
    n_passed_over: int  # tensors
    content: bytes = field(default=b"", repr=False)

    @property
    def ranks(self) -> list[int]:
        return sorted({pair.rank for pair in self.pairs})

    def layer_bytes(self, n_layer: int) -> tuple[int, ...]:
        """Of each layer of a model; the last one's with those of the output head."""
        sizes = [0] * n_layer
        for pair in self.pairs:
            layer = layer_of(pair.base)
            sizes[n_layer - 1 if layer is None else layer] += pair.a.n_bytes + pair.b.n_bytes
        return tuple(sizes)

    def cut(self, first: int, last: int, n_layer: int) -> "Adapter":
        """The adapter of layers [first, last), renumbered from 0, of a model with `n_layer`; with its content. Raises
        UserError if its file cannot be read any more, or has changed."""
        try:
            unchanged = read_adapter(self.path).digest == self.digest
            tensors = [*self._tensors_of(first, last, n_layer)] if unchanged else []
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from None
        if not unchanged:
            raise UserError(f"{self.path} was changed while the job started; start again")
        return parse_content(self.path, _encoded(self.architecture, self.alpha, tensors))

    def _tensors_of(self, first: int, last: int, n_layer: int) -> Iterator[tuple[Tensor, bytes]]:
        for pair in self.pairs:
            layer = layer_of(pair.base)
            if not (last == n_layer if layer is None else first <= layer < last):
                continue
            name = pair.base if layer is None else f"blk.{layer - first}.{pair.base.split('.', 2)[2]}"
            for end, tensor in ((A, pair.a), (B, pair.b)):
                yield replace(tensor, name=name + end), b"".join(tensor_data(tensor, tensor.n_bytes))

    def files(self, untiled: bool) -> Iterator[tuple[int, bytes]]:
        """(rank, GGUF file without alpha) of a slice for each rank that its pairs have. `untiled`: all rows have the
        bits of a row alone."""
        for rank in self.ranks:
            pairs = [pair for pair in self.pairs if pair.rank == rank]
            both = (each for pair in pairs for each in self._data_of(pair, untiled and pair.is_tiled))
            yield rank, _encoded(self.architecture, 0.0, [*both])

    def scale(self, scale: float, rank: int) -> float:
        """The factor of pairs of this rank, rounded as libllama does."""
        factor = np.float32(scale)
        return float(factor * np.float32(self.alpha) / np.float32(rank) if self.alpha else factor)

    def _data_of(self, pair: Pair, is_odd: bool) -> Iterator[tuple[Tensor, bytes]]:
        a, b = (self.content[each.offset : each.offset + each.n_bytes] for each in (pair.a, pair.b))
        if not is_odd:
            yield from ((pair.a, a), (pair.b, b))
            return
        (n_in, rank), n_out = pair.a.shape, pair.b.shape[1]
        a += bytes(pair.a.n_bytes // rank)
        columns = np.frombuffer(b, np.uint8).reshape(n_out, -1)
        b = np.pad(columns, ((0, 0), (0, columns.shape[1] // rank))).tobytes()
        yield replace(pair.a, shape=(n_in, rank + 1), n_bytes=len(a)), a
        yield replace(pair.b, shape=(rank + 1, n_out), n_bytes=len(b)), b


class ScaledAdapter(NamedTuple):
    """An adapter as a job has it."""

    adapter: Adapter
    scale: float


def read_adapter(path: Path) -> Adapter:
    """The adapter by its header. Raises UserError for a file that is none, or none that can be used."""
    try:
        return _read(path, FileState.of(path))
    except OSError:
        return _parse(read_header(path))  # which says what is wrong


@lru_cache(maxsize=16)  # planning asks for every choice
def _read(path: Path, state: FileState) -> Adapter:
    return _parse(read_header(path))


def parse_content(path: Path, content: bytes) -> Adapter:
    """An adapter that was `cut`. `path`: of the whole one."""
    return replace(_parse(read_header(FileHead(path, content, FileState(len(content), 0, 0)))), content=content)


def _parse(header: Header) -> Adapter:
    path, metadata = header.path, header.metadata
    kind, type_ = (value_of(metadata, key, "") for key in ("general.type", "adapter.type"))
    if (kind, type_) != ("adapter", "lora"):
        what = f"general.type {kind!r}" if kind != "adapter" else f"adapter.type {type_!r}"
        way_out = "give one, as llama.cpp's convert_lora_to_gguf.py writes it"
        raise UserError(f"{path} is no LoRA adapter ({what}); {way_out}")
    if INVOCATION in metadata:
        after = f"is to be applied only after certain tokens ({INVOCATION}), which cannot be had here"
        raise UserError(f"{path} {after}; give an adapter without such tokens")
    alpha = value_of(metadata, ALPHA, 0.0)
    if not math.isfinite(alpha):
        raise damaged(path, f"{ALPHA} is {alpha}")
    by_name = {tensor.name: tensor for tensor in header.tensors if not tensor.name.endswith(PASSED_OVER)}
    pairs = []
    for base in sorted({name.removesuffix(A).removesuffix(B) for name in by_name}):
        a, b = by_name.get(base + A), by_name.get(base + B)
        if a is None or b is None:
            lacks = f"has no {base}{B if a else A}" if a or b else f"has {base}, which is no part of an adapter"
            raise UserError(f"{path} {lacks}; convert the adapter again")
        if not len(a.shape) == len(b.shape) in (2, 3) or a.shape[1] != b.shape[0]:
            raise UserError(f"{path}: {_shapes(base, a, b)}, which do not fit each other; convert the adapter again")
        pairs.append(Pair(base, a, b))
    architecture, n_passed_over = value_of(metadata, "general.architecture", ""), len(header.tensors) - len(by_name)
    return Adapter(path, architecture, float(alpha), header.digest, tuple(pairs), n_passed_over)


def _encoded(architecture: str, alpha: float, tensors: Sequence[tuple[Tensor, bytes]]) -> bytes:
    texts = {"general.type": "adapter", "general.architecture": architecture, "adapter.type": "lora"}
    entries = [encode_entry(key, STRING.to_bytes(4, "little") + encode_text(text)) for key, text in texts.items()]
    entries.append(encode_entry(ALPHA, encode_number(alpha)))
    header = encode_header(entries, [(tensor.name, tensor) for tensor, _ in tensors])
    return b"".join([header, *(data.ljust(padded(len(data)), b"\0") for _, data in tensors)])


def _shapes(base: str, a: Tensor, b: Tensor) -> str:
    return f"its tensors for {base} are of shapes {a.shape} and {b.shape}"


# -- with a model


def check_fits(adapter: Adapter, info: ModelInfo) -> None:
    """Raises UserError unless the adapter changes tensors of this model, and none that slices look up by themselves."""
    path, name = adapter.path, info.path.name
    if adapter.architecture != info.architecture:
        kinds = f"is for models of architecture {adapter.architecture!r}, and {name} is of {info.architecture!r}"
        raise UserError(f"{path} {kinds}; {WAY_OUT}")
    tensors = {tensor.name: tensor for tensor in info.tensors}
    for base, a, b in adapter.pairs:
        tensor, layer = tensors.get(base), layer_of(base)
        if tensor is None or (layer or 0) >= info.n_layer:
            raise UserError(f"{path} changes {base}, which the layers of {name} do not have; {WAY_OUT}")
        if layer is None and base != "output.weight":
            raise UserError(f"{path} changes {base}, which is in no layer; merge it into the model's file")
        if (a.shape[0], b.shape[1], *a.shape[2:]) != tensor.shape or a.shape[2:] != b.shape[2:]:
            raise UserError(f"{path}: {_shapes(base, a, b)}, and {name} has it of shape {tensor.shape}; {WAY_OUT}")


def check_cut(adapter: Adapter, info: ModelInfo) -> None:
    """Raises UserError where slices of the model have a changed tensor in another form."""
    names = {pair.base if layer_of(pair.base) is None else pair.base.split(".", 2)[2] for pair in adapter.pairs}
    rescaled = info.layers.architecture.rescaled
    scaled = rescaled.tensor.removesuffix(".scale") if rescaled and info.layers.query_scale != 1 else ""
    for name in ("output.weight", f"{scaled}.weight"):
        if name in names:
            form = f"changes {name}, which slices of {info.path.name} have in another form"
            raise UserError(f"{adapter.path} {form}; give one rank, or merge it into the model's file")


def check_exact(adapter: Adapter) -> None:
    """Raises UserError for types with which a row has other bits beside others."""
    if pair := next((pair for pair in adapter.pairs if not pair.is_exact), None):
        types = f"tensors for {pair.base} are of types with which a row has other bits beside others"
        raise UserError(f"{adapter.path}: its {types}; give it in F32, F16 or BF16, or --numerics fast")


def active_scales(adapters: Sequence[ScaledAdapter]) -> AdapterScales:
    """(number, scale) of the adapters whose scale is not 0."""
    return tuple((number, scale) for number, (_, scale) in enumerate(adapters) if scale)


def check_order(adapters: Sequence[ScaledAdapter], name: str = "--lora") -> None:
    """Raises UserError for more than libllama adds up in one order: it takes them by their addresses. `name`: of what
    applies them."""
    active = [adapter for adapter, scale in adapters if scale]
    n = sum(len(adapter.ranks) for adapter in active)
    if len(active) > 1 and n > 2:
        several = f"{len(active)} adapters with {n} ranks of matrices"
        way_out = "give one, or two with one rank each, or merge some into the model's file"
        raise UserError(f"{name}: {several} are added up in an order that changes from process to process; {way_out}")


def digest_of(adapters: Iterable[ScaledAdapter]) -> str:
    """Of contents and scales; empty: there are none."""
    texts = [f"{adapter.digest} {float(np.float32(scale)).hex()}" for adapter, scale in adapters]
    return sha256(" ".join(texts).encode()).hexdigest()[:N_DIGITS] if texts else ""
