"""The GGUF of layers [first, last) of a model, and what a planner needs to know about the model. Computes nothing."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.models.gguf_header import ARRAY, SCALARS, STRING, Header, Tensor, Value, read_header

ARCHITECTURES = ("falcon", "llama", "phi3", "qwen2", "qwen3", "qwen3moe")
"""Those whose chained slices have been tested against the whole model, bit for bit. Mixtral is a `llama`."""

PER_LAYER_KEYS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length", "expert_used_count",
                  "expert_feed_forward_length")  # fmt: skip
MAX_LAYERS = 512
ALIGNMENT = 32
N_STAND_IN = 32
"""Vocabulary of a slice that is not the last: libllama wants a token table, but such a slice never uses it."""

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip


@dataclass(frozen=True)
class ModelInfo:
    """What a model is and what its parts weigh. Bytes are as stored in the file.

    layer_bytes              one entry a layer
    input_bytes              the token table
    output_bytes             the output head and norms; with tied embeddings the token table counts again
    kv_bytes_per_cell        one entry a layer: K and V of one token, 2 bytes an element
    fingerprint              equal on two hosts that hold the same file
    """

    path: Path
    paths: tuple[Path, ...]
    architecture: str
    name: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    quantisation: str
    n_params: int
    layer_bytes: tuple[int, ...]
    input_bytes: int
    output_bytes: int
    kv_bytes_per_cell: tuple[int, ...]
    tied: bool
    fingerprint: str
    metadata: dict[str, Value] = field(repr=False, compare=False)
    tensors: tuple[Tensor, ...] = field(repr=False, compare=False)

    def slice_bytes(self, first: int, last: int) -> int:
        """Memory the weights of layers [first, last) take, with what the ends of the pipeline hold besides."""
        return sum(tensor.n_bytes for _, tensor in _slice_tensors(self, first, last))

    def tensor(self, name: str) -> Tensor | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)


@dataclass
class SliceFile:
    """A GGUF that libllama can load: layers [first, last) of `info`, renumbered from 0.

    `path` is valid until `close()`. The token table is not in a first slice: its rows are read from the model file.
    """

    info: ModelInfo
    first: int
    last: int
    path: Path
    n_bytes: int
    fd: int = -1

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.info.n_layer

    def close(self) -> None:
        """Release the file; what has been loaded from it stays loaded. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def read_model_info(path: str | Path) -> ModelInfo:
    """Read the header of a model, all parts of a split one; UserError when it cannot be used, with the way out."""
    path = Path(path)
    headers = _read_parts(path)
    metadata = headers[0].metadata
    architecture = _text(metadata, "general.architecture", "")
    if architecture not in ARCHITECTURES:
        raise UserError(f"{path}: architecture {architecture!r} cannot be cut into layer slices; "
                        f"supported are {', '.join(ARCHITECTURES)}")  # fmt: skip
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    by_name = {tensor.name: tensor for tensor in tensors}
    table = by_name.get("token_embd.weight")
    n_layer = _number(path, metadata, f"{architecture}.block_count", 0, MAX_LAYERS)
    if n_layer == 0 or table is None or len(table.shape) != 2:
        raise UserError(f"{path} holds no layers or no token table (a vocabulary or an adapter?); give a whole model")
    output = by_name.get("output.weight")
    layer_bytes = _layer_bytes(path, tensors, n_layer)
    n_embd = _number(path, metadata, f"{architecture}.embedding_length", 1, 1 << 20)
    if table.shape[0] != n_embd or (output is not None and output.shape != table.shape):
        raise UserError(f"{path} is damaged: its token table of shape {table.shape} does not fit embeddings of length "
                        f"{n_embd} or its output head; convert the model again")  # fmt: skip
    ends = sum(tensor.n_bytes for tensor in tensors if not tensor.name.startswith("blk."))
    return ModelInfo(
        path=path,
        paths=tuple(header.path for header in headers),
        architecture=architecture,
        name=_text(metadata, "general.name", path.stem),
        n_layer=n_layer,
        n_embd=n_embd,
        n_vocab=table.shape[1],
        n_ctx_train=_number(path, metadata, f"{architecture}.context_length", 1, 1 << 31),
        quantisation=_quantisation(metadata, tensors),
        n_params=sum(tensor.n_elements for tensor in tensors),
        layer_bytes=layer_bytes,
        input_bytes=table.n_bytes,
        output_bytes=ends - (table.n_bytes if output is not None else 0),
        kv_bytes_per_cell=_kv_bytes(path, metadata, architecture, n_layer, n_embd),
        tied=output is None,
        fingerprint=hashlib.sha256("".join(header.digest for header in headers).encode()).hexdigest()[:32],
        metadata=metadata,
        tensors=tensors,
    )


def open_slice(info: ModelInfo, first: int, last: int, cache_dir: Path | None = None) -> SliceFile:
    """Layers [first, last) as a file for libllama: the model itself, else a file in cache_dir, else one in memory.

    A file in cache_dir is named by fingerprint and range, and reused; several processes may ask for it at once.
    """
    if not 0 <= first < last <= info.n_layer:
        raise ValueError(f"layers [{first}, {last}) of {info.n_layer}")
    if (first, last) == (0, info.n_layer):
        return SliceFile(info, first, last, info.path, sum(path.stat().st_size for path in info.paths))
    parts = _slice_tensors(info, first, last)
    head = _encode_header(info, first, last, parts)
    n_bytes = len(head) + sum(_padded(tensor.n_bytes) for _, tensor in parts)
    if cache_dir is None:
        fd = os.memfd_create(f"pipeinfer-{first}-{last}", os.MFD_CLOEXEC)
        slice_file = SliceFile(info, first, last, Path(f"/proc/self/fd/{fd}"), n_bytes, fd)
        try:
            _write(fd, head, parts, f"memory for {n_bytes} bytes of layers {first}-{last - 1}")
        except BaseException:
            slice_file.close()
            raise
        return slice_file
    path = cache_dir / f"{info.fingerprint}-{first}-{last}.gguf"
    if not path.exists() or path.stat().st_size != n_bytes:
        _write_cached(path, head, parts)
    return SliceFile(info, first, last, path, n_bytes)


def _write_cached(path: Path, head: bytes, parts: list[tuple[str, Tensor]]) -> None:
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"slice cache {path.parent} cannot be written: {error.strerror}; give another directory "
                        "or none to keep slices in memory") from None  # fmt: skip
    try:
        _write(fd, head, parts, f"the slice cache {path.parent}")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _write(fd: int, head: bytes, parts: list[tuple[str, Tensor]], place: str) -> None:
    """Header, then tensors. The kernel copies: the model's pages never count as this process's memory."""
    try:
        os.truncate(fd, len(head) + sum(_padded(tensor.n_bytes) for _, tensor in parts))
        os.lseek(fd, 0, os.SEEK_SET)
        at = os.write(fd, head)
        for _, tensor in parts:
            os.lseek(fd, at, os.SEEK_SET)
            _copy(tensor, fd)
            at += _padded(tensor.n_bytes)
    except OSError as error:
        raise UserError(f"no room in {place}: {error.strerror}; use more ranks, or put slices elsewhere") from None


def _copy(tensor: Tensor, fd: int) -> None:
    with open(tensor.path, "rb") as source:
        done = 0
        while done < tensor.n_bytes:
            copied = os.sendfile(fd, source.fileno(), tensor.offset + done, tensor.n_bytes - done)
            if copied == 0:
                raise UserError(f"{tensor.path} became shorter while it was read; start again with a complete file")
            done += copied


def _slice_tensors(info: ModelInfo, first: int, last: int) -> list[tuple[str, Tensor]]:
    """(name in the slice, source) of every tensor of the slice.

    The last slice holds its output head under the name of the token table: libllama then uses that one table as the
    head (as for tied embeddings), so that no second table is needed where tokens never come in.
    """
    if (first, last) == (0, info.n_layer):
        return [(tensor.name, tensor) for tensor in info.tensors]
    parts = []
    for tensor in info.tensors:
        layer = _layer_of(tensor.name)
        if layer is not None and first <= layer < last:
            parts.append((f"blk.{layer - first}.{tensor.name.split('.', 2)[2]}", tensor))
        elif layer is None and tensor.name not in ("token_embd.weight", "output.weight", "output.bias"):
            parts.append((tensor.name, tensor))
        elif tensor.name == "output.bias" and last == info.n_layer:
            parts.append((tensor.name, tensor))
    table = info.tensor("token_embd.weight")
    assert table is not None, info.path
    if last == info.n_layer:
        return [("token_embd.weight", info.tensor("output.weight") or table), *parts]
    rows = min(N_STAND_IN, info.n_vocab)
    stand_in = Tensor(table.name, (table.shape[0], rows), table.type, table.path, table.offset,
                      table.n_bytes // info.n_vocab * rows)  # fmt: skip
    return [("token_embd.weight", stand_in), *parts]


def _encode_header(info: ModelInfo, first: int, last: int, parts: list[tuple[str, Tensor]]) -> bytes:
    keys = dict(_slice_metadata(info, first, last, parts[0][1].shape[1]))
    out = [b"GGUF", struct.pack("<IQQ", 3, len(parts), len(keys))]
    for key, raw in keys.items():
        out += [_encode_text(key), raw]
    at = 0
    for name, tensor in parts:
        shape = tensor.shape
        out += [_encode_text(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.type, at)]
        at += _padded(tensor.n_bytes)
    head = b"".join(out)
    return head.ljust(_padded(len(head)), b"\0")


def _slice_metadata(info: ModelInfo, first: int, last: int, n_vocab: int) -> Iterator[tuple[str, bytes]]:
    """Everything but the vocabulary and the traces of a split, with what counts layers cut to [first, last)."""
    arch = info.architecture
    own = (f"{arch}.block_count", f"{arch}.vocab_size", "general.alignment")
    for key, value in info.metadata.items():
        if key in own or key.startswith(("tokenizer.", "split.", "general.tensor_extra")) or not value.raw:
            continue
        if key.removeprefix(f"{arch}.") in PER_LAYER_KEYS and value.type == ARRAY and isinstance(value.value, tuple):
            kept = value.value[first:last]
            layout = f"<{len(kept)}{SCALARS[value.item_type][1]}"
            yield key, struct.pack("<IIQ", ARRAY, value.item_type, len(kept)) + struct.pack(layout, *kept)
        else:
            yield key, value.raw
    yield f"{arch}.block_count", struct.pack("<II", 4, last - first)
    yield f"{arch}.vocab_size", struct.pack("<II", 4, n_vocab)
    yield "tokenizer.ggml.model", struct.pack("<I", STRING) + _encode_text("none")


def _encode_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(n_bytes: int) -> int:
    return (n_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _layer_of(tensor_name: str) -> int | None:
    match = re.match(r"blk\.(\d{1,4})\.", tensor_name)
    return int(match.group(1)) if match else None


def _read_parts(path: Path) -> list[Header]:
    """The headers of a model's files: one, or all `-0000i-of-0000n` of a split model, in order."""
    head = read_header(path)
    count = head.metadata.get("split.count")
    if count is None or not isinstance(count.value, int) or count.value < 2:
        return [head]
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None or int(match.group(3)) != count.value:
        raise UserError(f"{path} is one of {count.value} parts but is not named so; rename it to "
                        f"NAME-00001-of-{count.value:05}.gguf")  # fmt: skip
    names = [f"{match.group(1)}-{i + 1:05}-of-{count.value:05}.gguf" for i in range(count.value)]
    if path.name != names[0]:
        raise UserError(f"{path} is a later part of a split model; give the first, {names[0]}")
    for name in names:
        if not path.with_name(name).exists():
            raise UserError(f"part {name} of the split model {path} is missing; put it into the same directory")
    return [head, *(read_header(path.with_name(name)) for name in names[1:])]


def _layer_bytes(path: Path, tensors: tuple[Tensor, ...], n_layer: int) -> tuple[int, ...]:
    sizes = [0] * n_layer
    for tensor in tensors:
        layer = _layer_of(tensor.name)
        if layer is not None and layer >= n_layer:
            raise UserError(f"{path} is damaged: tensor {tensor.name} of a model with {n_layer} layers; "
                            "convert the model again")  # fmt: skip
        if layer is not None:
            sizes[layer] += tensor.n_bytes
    if 0 in sizes:
        raise UserError(f"{path}: layer {sizes.index(0)} of {n_layer} has no tensors; give a whole model")
    return tuple(sizes)


def _kv_bytes(path: Path, metadata: dict[str, Value], arch: str, n_layer: int, n_embd: int) -> tuple[int, ...]:
    def per_layer(key: str, default: tuple[int, ...] | None) -> tuple[int, ...]:
        value = metadata[f"{arch}.{key}"].value if f"{arch}.{key}" in metadata else default
        values = value if isinstance(value, tuple) else (value,) * n_layer
        numbers = tuple(item for item in values if isinstance(item, int) and 0 <= item <= 1 << 16)
        if len(numbers) != n_layer:
            raise UserError(f"{path} is damaged: {arch}.{key} is {str(value)[:80]} for {n_layer} layers; "
                            "convert the model again")  # fmt: skip
        return numbers

    heads = per_layer("attention.head_count", None)
    heads_kv = per_layer("attention.head_count_kv", heads)
    # libllama derives the length of a head from the first layer, for all layers
    default = (n_embd // max(heads[0], 1),) * n_layer
    key, value = per_layer("attention.key_length", default), per_layer("attention.value_length", default)
    return tuple(2 * n * (k + v) for n, k, v in zip(heads_kv, key, value, strict=True))


def _quantisation(metadata: dict[str, Value], tensors: tuple[Tensor, ...]) -> str:
    value = metadata["general.file_type"].value if "general.file_type" in metadata else None
    return FILE_TYPES.get(value, "unknown") if isinstance(value, int) else "unknown"


def _text(metadata: dict[str, Value], key: str, default: str) -> str:
    value = metadata[key].value if key in metadata else default
    return value if isinstance(value, str) else default


def _number(path: Path, metadata: dict[str, Value], key: str, low: int, high: int) -> int:
    value = metadata[key].value if key in metadata else None
    if not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"{path}: {key} is {value!r}, {low} to {high} are possible; convert the model again")
    return value
