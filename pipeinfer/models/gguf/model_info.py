"""What a GGUF model is and how large its parts are, from its headers alone. Cuts nothing and loads nothing."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.architectures import ARCHITECTURES
from pipeinfer.models.gguf.contents import FileState, SourceFile, check_unchanged, sample_digest
from pipeinfer.models.gguf.header import FileHead, Header, Tensor, Value, read_header, sample_extents, value_of
from pipeinfer.models.gguf.layers import EXTRA, F16_CACHE, CacheTypes, KvShape, Layers
from pipeinfer.models.gguf.validation import NumberCheck

MAX_LAYERS = 512
ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
SHORT, LONG = "short", "long"  # which of the two; the second in names of numerics too
N_CTX_SHORT = "rope.scaling.original_context_length"  # a key of the metadata, behind the architecture's name
OTHER_TYPES = {"mmproj": "a projector of images or sounds", "adapter": "an adapter (LoRA)"}
OWN_HEAD = Path("mtp")  # in the place of a draft's path: the head in the target's own file
_FILE_TYPES = """F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K
IQ2_XXS IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 - - - TQ1_0 TQ2_0 MXFP4
NVFP4 Q1_0 Q2_0"""
FILE_TYPES = {number: name for number, name in enumerate(_FILE_TYPES.split()) if name != "-"}


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A draft that reads its target's residual stream. `target_layers`: the layers of the target whose inputs it reads,
    in its order; the number of layers: the last output."""

    target_layers: tuple[int, ...]
    n_embd_target: int  # length of the target's residual stream
    n_tokens: int  # the target's tokens that it can guess
    lacks: tuple[str, ...]  # tensors that it takes from the target
    is_mtp: bool = False  # it came with the target, in its file or beside it

    @property
    def shift(self) -> int:
        """Positions by which a token's cell is before the token."""
        return 0 if self.is_mtp else 1

    @property
    def layers_read(self) -> tuple[int, ...]:
        """The layers of the target whose outputs it reads, ascending."""
        return tuple(sorted(layer - 1 for layer in self.target_layers))

    @property
    def order(self) -> tuple[int, ...]:
        """The index of each of `target_layers` among `layers_read`."""
        return tuple(self.layers_read.index(layer - 1) for layer in self.target_layers)


def layers_read(heads: Iterable[DraftHead | None]) -> tuple[int, ...]:
    """The layers of the target that the one head among drafts reads; none without one."""
    return next((head.layers_read for head in heads if head), ())


@dataclass(frozen=True, slots=True)
class ModelHeaders:
    """The heads of a model's files, for hosts that get its weights from another host."""

    files: tuple[FileHead, ...]
    fingerprint: str


@dataclass(frozen=True)
class ModelInfo:
    """A model by its headers. Bytes are as stored. `borrowed`: those of `tensors` that are in another model's file."""

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
    layer_bytes: tuple[int, ...]  # one entry a layer
    input_bytes: int  # the token table
    output_bytes: int  # the output head and norms; with tied embeddings the token table counts again
    kv_shapes: tuple[KvShape, ...]  # one entry a layer: a token's keys and values
    tied: bool
    fingerprint: str  # of headers and samples of every tensor: equal on two hosts with the same files
    layers: Layers = field(repr=False, compare=False)  # the possible slices and their metadata
    states: tuple[FileState, ...] = field(repr=False, compare=False)  # of each path when its header was read
    tensors: tuple[Tensor, ...] = field(repr=False, compare=False)
    borrowed: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)
    head: DraftHead | None = None  # of a draft that reads its target's residual stream
    rope_factors: str = ""  # which of two sets is used, SHORT or LONG; empty: there is one, or none was chosen

    @property
    def metadata(self) -> Mapping[str, Value]:
        return self.layers.metadata

    @property
    def n_bytes(self) -> int:
        """Of the files when their headers were read; of a head in the target's file, its tensors'."""
        if self.head and self.head.is_mtp:
            return sum(tensor.n_bytes for tensor in self.tensors)
        return sum(state.n_bytes for state in self.states)

    def __hash__(self) -> int:
        return hash(self.fingerprint)  # of all fields it takes long, and plans are full of caches

    @cached_property
    def kv_bytes_per_cell(self) -> tuple[int, ...]:
        """One entry a layer: key and value of one token in the default type."""
        return F16_CACHE.cell_bytes(self.kv_shapes)

    def cell_bytes(self, first: int, last: int, types: CacheTypes = F16_CACHE) -> int:
        """Of one token's keys and values in layers [first, last)."""
        before = _cell_bytes_before(self, types)
        return before[last] - before[first]

    @property
    def n_ctx_short(self) -> int:
        """Tokens for which its short rope factors are made, where it has them and long ones (LongRoPE); else 0."""
        key = f"{self.architecture}.{N_CTX_SHORT}"
        has_both = any(tensor.name in ROPE_FACTORS for tensor in self.tensors)
        return value_of(self.metadata, key, self.n_ctx_most) if has_both else 0

    @property
    def n_ctx_most(self) -> int:
        """Tokens for which it was trained, with the long factors if it has two sets."""
        return value_of(self.metadata, f"{self.architecture}.context_length", self.n_ctx_train)

    def with_factors(self, is_long: bool) -> "ModelInfo":
        """With the long or the short rope factors, if it has both: for all contexts of a job, whatever their sizes.
        The short ones are for texts of `n_ctx_short` tokens at most."""
        if not self.n_ctx_short:
            return self
        n_ctx = self.n_ctx_most if is_long else min(self.n_ctx_most, self.n_ctx_short)
        return replace(self, rope_factors=LONG if is_long else SHORT, n_ctx_train=n_ctx)

    def tensor(self, name: str) -> Tensor | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)

    def check_unchanged(self) -> None:
        """UserError unless the files are those whose headers were read."""
        for path, state in zip(self.paths, self.states, strict=True):
            check_unchanged(path, state)

    def check_rewinds(self, otherwise: str) -> None:
        """UserError, ending with `otherwise`, if a sequence cannot lose its newest tokens."""
        if not self.layers.rewinds:
            state = f"is a {self.architecture} model: its layers keep a state, which cannot go back to an earlier token"
            raise UserError(f"{self.path} {state}; {otherwise}")

    def source(self, path: Path) -> SourceFile:
        """One of `paths`, to compute from. Raises UserError if it has changed."""
        extents = sample_extents(tensor for tensor in self.tensors if tensor.path == path)
        return SourceFile(path, lambda fd: sample_digest(fd, extents), self.states[self.paths.index(path)])

    def read_headers(self) -> ModelHeaders:
        """Raises UserError if a file cannot be read any more, or has changed."""
        files = []
        for path, state in zip(self.paths, self.states, strict=True):
            end = min((tensor.offset for tensor in self.tensors if tensor.path == path), default=state.n_bytes)
            try:
                with open(path, "rb") as file:
                    files.append(FileHead(path, file.read(end), state))
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error.strerror}") from None
        self.check_unchanged()
        return ModelHeaders(tuple(files), self.fingerprint)


@lru_cache(maxsize=64)  # a planner asks for every way to cut
def _cell_bytes_before(info: ModelInfo, types: CacheTypes) -> tuple[int, ...]:
    """In the layers before each, and in all."""
    return tuple(accumulate(types.cell_bytes(info.kv_shapes), initial=0))


def check_is_model(path: Path, metadata: dict[str, Value]) -> None:
    """Raises UserError for a GGUF file that is an addition to a model: a projector or an adapter."""
    type_ = value_of(metadata, "general.type", "model")
    if type_ in OTHER_TYPES:
        kind = f"{OTHER_TYPES[type_]} (general.type {type_!r})"
        way_out = "give the model that it belongs to" + ", and this with --lora" * (type_ == "adapter")
        raise UserError(f"{path} is {kind}, which makes no text by itself; {way_out}")


def read_model_info(source: str | Path | ModelHeaders) -> ModelInfo:
    """A model by its path, or its headers from another host; all parts of a split one. UserError if it is unusable."""
    if isinstance(source, ModelHeaders):
        return replace(model_of([read_header(file) for file in source.files]), fingerprint=source.fingerprint)
    return model_of(read_parts(Path(source)))


def model_of(headers: Sequence[Header]) -> ModelInfo:
    """A model by its parsed headers. Raises UserError if it cannot be used."""
    path, metadata = headers[0].path, headers[0].metadata
    check_is_model(path, metadata)
    architecture = value_of(metadata, "general.architecture", "")
    if not architecture:
        raise UserError(f"{path}: it names no architecture (general.architecture), so it is damaged or no model")
    if architecture not in ARCHITECTURES:
        names = ", ".join(sorted(name for name, each in ARCHITECTURES.items() if not each.refused))
        possible = f"those that can be cut into layer slices are {names}"
        raise UserError(f"{path}: architecture {architecture!r} is not known here; {possible}")
    by_name = {tensor.name: tensor for header in headers for tensor in header.tensors}
    table = by_name.get("token_embd.weight")
    n_blocks = whole_number(path, metadata, f"{architecture}.block_count", 0, MAX_LAYERS)
    n_layer = n_blocks - value_of(metadata, f"{architecture}.{EXTRA}", 0)  # these guess ahead
    layers = Layers(architecture, ARCHITECTURES[architecture], metadata, n_layer)
    if refusal := layers.refusal():
        reason = f"cannot be cut into layer slices: {refusal}"
        raise UserError(f"{path}, of architecture {architecture!r}, {reason}; take another model")
    if n_layer <= 0 or table is None or len(table.shape) != 2:
        raise UserError(f"{path} holds no layers or no token table (a vocabulary or an adapter?); give a whole model")
    output = by_name.get("output.weight")
    info = describe(headers, layers, n_blocks, table.shape[1], table, output)
    if table.shape[0] != info.n_embd or (output is not None and output.shape != table.shape):
        wrong = f"does not fit embeddings of length {info.n_embd} or its output head"
        raise _to_convert(f"{path} is damaged: its token table of shape {table.shape} {wrong}")
    return info


def describe(
    headers: Sequence[Header], layers: Layers, n_blocks: int, n_vocab: int, table: Tensor | None, output: Tensor | None
) -> ModelInfo:
    """A model of these layers of a file with `n_blocks`. `output`: None if it is the table, or there is none. Raises
    UserError for impossible numbers."""
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
        name=value_of(metadata, "general.name", path.stem),
        n_layer=layers.n,
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_ctx_train=whole_number(path, metadata, f"{layers.name}.context_length", 1, 1 << 31),
        quantisation=FILE_TYPES.get(value_of(metadata, "general.file_type", -1), "unknown"),
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


@cache  # planning calls it with the same names for every possible cut
def layer_of(tensor_name: str) -> int | None:
    match = re.match(r"blk\.(\d{1,4})\.", tensor_name)
    return int(match.group(1)) if match else None


def read_parts(path: Path) -> list[Header]:
    """The headers of a model's files: one, or all `-0000i-of-0000n` of a split model, in order."""
    first = read_header(path)
    n_parts = value_of(first.metadata, "split.count", 1)
    if n_parts < 2:
        return [first]
    paths = part_paths(path)
    if len(paths) != n_parts:
        name = f"NAME-00001-of-{n_parts:05}.gguf"
        raise UserError(f"{path} is one of {n_parts} parts but is not named so; rename it to {name}")
    if path.name != paths[0].name:
        raise UserError(f"{path} is a later part of a split model; give the first, {paths[0].name}")
    for part in paths:
        if not os.path.exists(part):
            raise UserError(f"part {part.name} of the split model {path} is missing; put it into the same directory")
    return [first, *map(read_header, paths[1:])]


def part_paths(path: Path) -> list[Path]:
    """The paths of a model's parts by its name: all `-0000i-of-0000n` of a split one, in order, else the file."""
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
            raise _to_convert(f"{path} is damaged: tensor {tensor.name} of a model with {n_blocks} layers")
        if layer is not None:
            sizes[layer] += tensor.n_bytes
    if 0 in sizes[:n_layer]:
        raise UserError(f"{path}: layer {sizes.index(0)} of {n_layer} has no tensors; give a whole model")
    return tuple(sizes[:n_layer])


def kv_shapes_of(path: Path, layers: Layers, n_blocks: int, n_embd: int) -> tuple[KvShape, ...]:
    """A token's keys and values in each layer. Raises UserError."""

    def per_layer(key: str, default: int | None) -> tuple[int, ...]:
        values = layers.of_layers(key, default)
        numbers = tuple(item for item in values if isinstance(item, int) and 0 <= item <= 1 << 16)
        entry = layers.metadata.get(f"{layers.name}.{key}")
        if len(numbers) != layers.n or (entry is not None and entry.n_items not in (0, n_blocks)):
            shown = str(entry and entry.value)[:80]
            raise _to_convert(f"{path} is damaged: {layers.name}.{key} is {shown} for {n_blocks} layers")
        return numbers

    heads = per_layer("attention.head_count", None)
    heads_kv = per_layer("attention.head_count_kv", None) if layers.has("attention.head_count_kv") else heads
    # libllama derives the length of a head from the first layer, for all layers
    default = n_embd // max(heads[0], 1)
    key, value = per_layer("attention.key_length", default), per_layer("attention.value_length", default)
    if layers.shares_values:
        value = per_layer("attention.indexer.key_length", 0)  # not values, but an indexer's keys in their place
    cells = zip(heads_kv, key, value, layers.attentive, strict=True)
    return tuple(KvShape(n, k, v) if attends else KvShape() for n, k, v, attends in cells)


def _to_convert(fault: str) -> UserError:
    return UserError(f"{fault}; convert the model again")


def whole_number(path: Path, metadata: dict[str, Value], key: str, low: int, high: int) -> int:
    """A number of the metadata within these limits. Raises UserError."""
    value = metadata[key].value if key in metadata else None
    if not isinstance(value, int) or not low <= value <= high:
        raise _to_convert(f"{path}: {key} is {value!r}, {low} to {high} are possible")
    return value
