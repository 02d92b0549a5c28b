"""What a GGUF model is and what its parts weigh, from its header alone. Cuts nothing and loads nothing."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.architectures import ARCHITECTURES
from pipeinfer.models.gguf.cache_types import F16_CACHE, KvShape
from pipeinfer.models.gguf.check_numbers import NumberCheck
from pipeinfer.models.gguf.contents import FileState, SourceFile, check_unchanged, sample_digest
from pipeinfer.models.gguf.head import Head
from pipeinfer.models.gguf.header import Header, Tensor, Value, read_header, sample_spans
from pipeinfer.models.gguf.layers import EXTRA, Layers

MAX_LAYERS = 512
OTHER_KINDS = {"mmproj": "a projector of images or sounds", "adapter": "an adapter (LoRA)"}

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
    kv_shapes                one entry a layer: what it keeps of a token
    layers                   what they are, and which of them can be a slice
    fingerprint              equal on two hosts that hold the same file: of its header and samples of every tensor
    states                   of each path when its header was read: whether it was written to since, on this host
    borrowed                 those of `tensors` that are in another model's file
    head                     of a draft that reads its target's residual stream
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
    kv_shapes: tuple[KvShape, ...]
    tied: bool
    fingerprint: str
    layers: Layers = field(repr=False, compare=False)
    states: tuple[FileState, ...] = field(repr=False, compare=False)
    tensors: tuple[Tensor, ...] = field(repr=False, compare=False)
    borrowed: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)
    head: Head | None = None

    @property
    def metadata(self) -> Mapping[str, Value]:
        return self.layers.metadata

    @property
    def n_bytes(self) -> int:
        """Of the file when its header was read, all parts of a split one; of a part of another's file, its own."""
        if self.head and self.head.own:
            return sum(tensor.n_bytes for tensor in self.tensors)
        return sum(state.n_bytes for state in self.states)

    @property
    def kv_bytes_per_cell(self) -> tuple[int, ...]:
        """One entry a layer: key and value of one token, where nothing else is asked for."""
        return F16_CACHE.cell_bytes(self.kv_shapes)

    def tensor(self, name: str) -> Tensor | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)

    def check_unchanged(self) -> None:
        """UserError unless the files are those whose headers were read."""
        for path, state in zip(self.paths, self.states, strict=True):
            check_unchanged(path, state)

    def check_rewinds(self, otherwise: str) -> None:
        """UserError, which ends with `otherwise`, where a sequence cannot lose its newest tokens."""
        if not self.layers.rewinds:
            raise UserError(f"{self.path} is a {self.architecture} model: its layers keep a state, which cannot go "
                            f"back to an earlier token; {otherwise}")  # fmt: skip

    def source(self, path: Path) -> SourceFile:
        """One of `paths`, to compute from. Raises UserError when it has changed."""
        spans = sample_spans(tensor for tensor in self.tensors if tensor.path == path)
        return SourceFile(path, lambda fd: sample_digest(fd, spans), self.states[self.paths.index(path)])


def check_is_model(path: Path, metadata: dict[str, Value]) -> None:
    """Raises UserError for a GGUF file of another kind, which belongs to a model."""
    kind = _text(metadata, "general.type", "model")
    if kind in OTHER_KINDS:
        raise UserError(f"{path} is {OTHER_KINDS[kind]} (general.type {kind!r}), which makes no text by itself; give "
                        "the model that it belongs to")  # fmt: skip


def read_model_info(path: str | Path) -> ModelInfo:
    """Read the header of a model, all parts of a split one; UserError when it cannot be used, with the way out."""
    return model_of(read_parts(Path(path)))


def model_of(headers: Sequence[Header]) -> ModelInfo:
    """The same of headers that were read."""
    path, metadata = headers[0].path, headers[0].metadata
    check_is_model(path, metadata)
    architecture = _text(metadata, "general.architecture", "")
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(name for name, each in ARCHITECTURES.items() if not each.refused))
        raise UserError(f"{path}: architecture {architecture!r} is not known here; those that can be cut into layer "
                        f"slices are {known}")  # fmt: skip
    by_name = {tensor.name: tensor for header in headers for tensor in header.tensors}
    table = by_name.get("token_embd.weight")
    n_blocks = whole_number(path, metadata, f"{architecture}.block_count", 0, MAX_LAYERS)
    extra = metadata.get(f"{architecture}.{EXTRA}")  # for guessing ahead, not for the next token
    n_layer = n_blocks - (extra.value if extra is not None and isinstance(extra.value, int) else 0)
    layers = Layers(architecture, ARCHITECTURES[architecture], metadata, n_layer)
    if layers.refusal():
        raise UserError(f"{path}, of architecture {architecture!r}, cannot be cut into layer slices: "
                        f"{layers.refusal()}; take another model")  # fmt: skip
    if n_layer <= 0 or table is None or len(table.shape) != 2:
        raise UserError(f"{path} holds no layers or no token table (a vocabulary or an adapter?); give a whole model")
    output = by_name.get("output.weight")
    info = describe(headers, layers, n_blocks, table.shape[1], table, output)
    if table.shape[0] != info.n_embd or (output is not None and output.shape != table.shape):
        raise UserError(f"{path} is damaged: its token table of shape {table.shape} does not fit embeddings of length "
                        f"{info.n_embd} or its output head; convert the model again")  # fmt: skip
    return info


def describe(
    headers: Sequence[Header], layers: Layers, n_blocks: int, n_vocab: int, table: Tensor | None, output: Tensor | None
) -> ModelInfo:
    """Of the layers of a file with `n_blocks` of them. `output`: None where the table is it too, or there is none.
    Raises UserError for numbers that cannot be."""
    path, metadata = headers[0].path, headers[0].metadata
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    NumberCheck(path, layers).all()
    n_embd = whole_number(path, metadata, f"{layers.name}.embedding_length", 1, 1 << 20)
    ends = sum(tensor.n_bytes for tensor in tensors if not tensor.name.startswith("blk."))
    input_bytes = table.n_bytes if table is not None else 0
    tied = output is None and table is not None
    return ModelInfo(
        path=path,
        paths=tuple(header.path for header in headers),
        architecture=layers.name,
        name=_text(metadata, "general.name", path.stem),
        n_layer=layers.n,
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_ctx_train=whole_number(path, metadata, f"{layers.name}.context_length", 1, 1 << 31),
        quantisation=_quantisation(metadata),
        n_params=sum(tensor.n_elements for tensor in tensors),
        layer_bytes=_layer_bytes(path, tensors, layers.n, n_blocks),
        input_bytes=input_bytes,
        output_bytes=ends - (0 if tied else input_bytes),
        kv_shapes=kv_shapes_of(path, layers, n_blocks, n_embd),
        tied=tied,
        fingerprint=hashlib.sha256("".join(header.digest for header in headers).encode()).hexdigest()[:32],
        layers=layers,
        states=tuple(header.state for header in headers),
        tensors=tensors,
    )


@cache  # a planner asks of the same names for every way to cut
def layer_of(tensor_name: str) -> int | None:
    match = re.match(r"blk\.(\d{1,4})\.", tensor_name)
    return int(match.group(1)) if match else None


def read_parts(path: Path) -> list[Header]:
    """The headers of a model's files: one, or all `-0000i-of-0000n` of a split model, in order."""
    head = read_header(path)
    count = head.metadata.get("split.count")
    if count is None or not isinstance(count.value, int) or count.value < 2:
        return [head]
    paths = part_paths(path)
    if len(paths) != count.value:
        raise UserError(f"{path} is one of {count.value} parts but is not named so; rename it to "
                        f"NAME-00001-of-{count.value:05}.gguf")  # fmt: skip
    if path.name != paths[0].name:
        raise UserError(f"{path} is a later part of a split model; give the first, {paths[0].name}")
    for part in paths:
        if not part.exists():
            raise UserError(f"part {part.name} of the split model {path} is missing; put it into the same directory")
    return [head, *map(read_header, paths[1:])]


def part_paths(path: Path) -> list[Path]:
    """Where the parts of a model are by its name: all `-0000i-of-0000n` of a split one, in order, else the file."""
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    n_parts = int(match.group(3))
    return [path.with_name(f"{match.group(1)}-{i + 1:05}-of-{n_parts:05}.gguf") for i in range(n_parts)]


def _layer_bytes(path: Path, tensors: tuple[Tensor, ...], n_layer: int, n_blocks: int) -> tuple[int, ...]:
    sizes = [0] * n_blocks
    for tensor in tensors:
        layer = layer_of(tensor.name)
        if layer is not None and layer >= n_blocks:
            raise UserError(f"{path} is damaged: tensor {tensor.name} of a model with {n_blocks} layers; "
                            "convert the model again")  # fmt: skip
        if layer is not None:
            sizes[layer] += tensor.n_bytes
    if 0 in sizes[:n_layer]:
        raise UserError(f"{path}: layer {sizes.index(0)} of {n_layer} has no tensors; give a whole model")
    return tuple(sizes[:n_layer])


def kv_shapes_of(path: Path, layers: Layers, n_blocks: int, n_embd: int) -> tuple[KvShape, ...]:
    """What each of the layers keeps of a token. Raises UserError."""

    def per_layer(key: str, default: int | None) -> tuple[int, ...]:
        values = layers.of_layers(key, default)
        numbers = tuple(item for item in values if isinstance(item, int) and 0 <= item <= 1 << 16)
        given = layers.metadata.get(f"{layers.name}.{key}")
        if len(numbers) != layers.n or (given is not None and given.n_items not in (0, n_blocks)):
            shown = str(given and given.value)[:80]
            raise UserError(f"{path} is damaged: {layers.name}.{key} is {shown} for {n_blocks} layers; "
                            "convert the model again")  # fmt: skip
        return numbers

    heads = per_layer("attention.head_count", None)
    heads_kv = per_layer("attention.head_count_kv", None) if layers.has("attention.head_count_kv") else heads
    # libllama derives the length of a head from the first layer, for all layers
    default = n_embd // max(heads[0], 1)
    key, value = per_layer("attention.key_length", default), per_layer("attention.value_length", default)
    if layers.shares_values:
        value = per_layer("attention.indexer.key_length", 0)  # not values, but what an indexer keeps in their place
    cells = zip(heads_kv, key, value, layers.attentive, strict=True)
    return tuple(KvShape(n, k, v) if attends else KvShape() for n, k, v, attends in cells)


def _quantisation(metadata: dict[str, Value]) -> str:
    value = metadata["general.file_type"].value if "general.file_type" in metadata else None
    return FILE_TYPES.get(value, "unknown") if isinstance(value, int) else "unknown"


def _text(metadata: dict[str, Value], key: str, default: str) -> str:
    value = metadata[key].value if key in metadata else default
    return value if isinstance(value, str) else default


def whole_number(path: Path, metadata: dict[str, Value], key: str, low: int, high: int) -> int:
    """Of the metadata, within these limits. Raises UserError."""
    value = metadata[key].value if key in metadata else None
    if not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"{path}: {key} is {value!r}, {low} to {high} are possible; convert the model again")
    return value
