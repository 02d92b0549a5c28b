"""Reading models and cutting slices: numbers, files, memory, and errors. What slices compute is in test_llama_stage."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.header import ARRAY, BLOCKS, SCALARS, STRING, UINT32, read_header
from pipeinfer.models.gguf.layers import PER_LAYER_KEYS
from pipeinfer.models.gguf.model_info import FILE_TYPES, read_model_info
from pipeinfer.models.gguf.slice import open_slice, slice_bytes
from pipeinfer.models.gguf.validation import NumberCheck
from pipeinfer.models.llama.ggml import load_library
from tests.support.gguf_factory import Shape, write_model

BIG_VOCAB = Shape(n_layer=3, n_vocab=40000)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("slices") / "model.gguf")


@pytest.fixture(scope="session")
def big_vocab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("slices") / "big-vocab.gguf", BIG_VOCAB)


def test_info_agrees_with_the_reference_reader(model: Path) -> None:
    info = read_model_info(model)
    reader = gguf.GGUFReader(model)
    shape = Shape()
    assert (info.architecture, info.quantisation, info.n_layer) == ("llama", "Q8_0", shape.n_layer)
    assert (info.n_embd, info.n_vocab, info.n_ctx_train) == (shape.n_embd, shape.n_vocab, 8192)
    assert info.n_params == sum(int(tensor.n_elements) for tensor in reader.tensors)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    assert info.layer_bytes[1] == sum(size for name, size in sizes.items() if name.startswith("blk.1."))
    assert info.input_bytes == sizes["token_embd.weight"]
    assert info.output_bytes == sizes["output.weight"] + sizes["output_norm.weight"]
    assert info.kv_bytes_per_cell == (2 * 2 * shape.n_head_kv * shape.head_dim,) * shape.n_layer
    for tensor in reader.tensors:
        mine = info.tensor(tensor.name)
        assert mine is not None and (mine.offset, mine.n_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_our_tables_are_those_of_the_reference() -> None:
    kinds = gguf.GGUFValueType
    assert (kinds.UINT32, kinds.STRING, kinds.ARRAY) == (UINT32, STRING, ARRAY)
    theirs = {int(kind): np.dtype(number) for kind, number in gguf.GGUFReader.gguf_scalar_to_np.items()}
    assert {kind: np.dtype(layout) for kind, layout in SCALARS.items()} == theirs
    sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: BLOCKS[kind] for kind in sizes} == sizes
    prefixes = {"ALL_F32": "F32", "MOSTLY_MXFP4_MOE": "MXFP4"}
    for kind in gguf.LlamaFileType:
        if kind != gguf.LlamaFileType.GUESSED:
            assert FILE_TYPES[kind] == prefixes.get(kind.name, kind.name.removeprefix("MOSTLY_"))
    library = (Path(str(load_library().__file__)).parent / "lib" / "libllama.so").read_bytes()
    assert all(key.encode() in library for key in PER_LAYER_KEYS)


def test_tied_embeddings_count_twice(tmp_path: Path) -> None:
    info = read_model_info(write_model(tmp_path / "tied.gguf", Shape(tied=True)))
    assert info.tied and info.output_bytes == info.input_bytes + 4 * info.n_embd


def test_per_layer_arrays_are_cut(tmp_path: Path) -> None:
    shape = Shape(n_layer=4)
    info = read_model_info(write_model(tmp_path / "a.gguf", shape))
    key = "llama.attention.head_count_kv"
    raw = struct.pack("<IIQ4I", 9, 4, 4, 2, 2, 1, 1)
    value = dataclasses.replace(info.metadata[key], type=9, raw=raw, value=(2, 2, 1, 1), item_type=4, n_items=4)
    info = dataclasses.replace(info, layers=dataclasses.replace(info.layers, metadata={**info.metadata, key: value}))
    part = open_slice(info, 1, 3)
    assert read_header(part.path).metadata[key].value == (2, 1)
    part.close()


def test_arrays_that_are_too_short_are_damage(tmp_path: Path) -> None:
    layers = read_model_info(path := write_model(tmp_path / "a.gguf", Shape(n_layer=4))).layers
    value = layers.metadata[key := "llama.feed_forward_length"]
    for items, is_sound in (((), True), ((8, 8, 8, 8), True), ((8, 8, 8), False), ((8,), False)):
        metadata = {**layers.metadata, key: dataclasses.replace(value, value=items, n_items=len(items))}
        check = NumberCheck(path, dataclasses.replace(layers, metadata=metadata))
        with contextlib.nullcontext() if is_sound else pytest.raises(UserError, match=f"has {len(items)} values for 4"):
            check.all()


def test_fingerprint_follows_the_file(model: Path, tmp_path: Path) -> None:
    info = read_model_info(model)
    copy = tmp_path / "elsewhere.gguf"
    copy.write_bytes(model.read_bytes())
    assert read_model_info(copy).fingerprint == info.fingerprint
    for other in (Shape(n_ff=544), Shape(seed=1)):  # another header; the same header over other weights
        assert read_model_info(write_model(tmp_path / "other.gguf", other)).fingerprint != info.fingerprint
    for tensor in info.tensors:
        data = bytearray(model.read_bytes())
        data[tensor.offset : tensor.offset + tensor.n_bytes] = bytes(tensor.n_bytes)
        copy.write_bytes(data)
        assert read_model_info(copy).fingerprint != info.fingerprint, tensor.name


def test_a_header_is_parsed_once_until_its_file_changes(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", Shape(n_layer=2))
    assert read_header(path) is not read_header(path), "another change could leave the same time"
    os.utime(path, (1, 1))
    header = read_header(path)
    assert read_header(path) is header
    write_model(tmp_path / "other.gguf", Shape(n_layer=3)).replace(path)
    os.utime(path, (1, 1))
    assert len(read_header(path).tensors) > len(header.tensors)
    path.unlink()
    with pytest.raises(UserError, match="does not exist"):
        read_header(path)


def test_whole_model_is_not_copied(model: Path) -> None:
    info = read_model_info(model)
    whole = open_slice(info, 0, info.n_layer)
    assert whole.path == model and whole.is_first and whole.is_last


def test_slices_hold_their_tensors_and_no_more(model: Path) -> None:
    info = read_model_info(model)
    middle = open_slice(info, 1, 3)
    header = read_header(middle.path)
    source = model.read_bytes()
    held = Path(middle.path).read_bytes()
    for tensor in header.tensors:
        original = info.tensor(tensor.name.replace("blk.1.", "blk.2.").replace("blk.0.", "blk.1."))
        assert original is not None
        assert held[tensor.offset :][: tensor.n_bytes] == source[original.offset :][: tensor.n_bytes], tensor.name
    assert {int(tensor.name.split(".")[1]) for tensor in header.tensors if tensor.name.startswith("blk.")} == {0, 1}
    assert header.metadata["tokenizer.ggml.model"].value == "none"
    assert not [key for key in header.metadata if key.startswith("tokenizer.ggml.tok")]
    middle.close()
    middle.close()


@pytest.mark.parametrize(("first", "last", "n_tables"), [(0, 1, 0), (1, 2, 0), (2, 3, 1)])
def test_only_the_last_slice_holds_a_vocabulary(big_vocab: Path, first: int, last: int, n_tables: int) -> None:
    info = read_model_info(big_vocab)
    part = open_slice(info, first, last)
    allocated = os.fstat(part.fd).st_blocks * 512
    limit = info.layer_bytes[first] + n_tables * info.input_bytes + 65536
    assert allocated <= limit and part.n_bytes <= limit
    assert abs(slice_bytes(info, first, last) - part.n_bytes) < 8192
    part.close()


def test_unwritable_cache(model: Path) -> None:
    with pytest.raises(UserError, match=r"slice cache /proc/none cannot be written"):
        open_slice(read_model_info(model), 0, 1, Path("/proc/none"))


def test_split_models(tmp_path: Path, model: Path) -> None:
    write_model(tmp_path / "model.gguf", part_tensors=15)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 2
    info, whole = read_model_info(parts[0]), read_model_info(model)
    assert info.paths == tuple(parts) and info.layer_bytes == whole.layer_bytes and info.n_params == whole.n_params
    mine, theirs = open_slice(info, 1, 4), open_slice(whole, 1, 4)
    assert mine.n_bytes == theirs.n_bytes
    assert {tensor.name for tensor in read_header(mine.path).tensors} == {
        tensor.name for tensor in read_header(theirs.path).tensors
    }
    mine.close()
    theirs.close()
    with pytest.raises(UserError, match=f"give the first, {parts[0].name}"):
        read_model_info(parts[1])
    parts[1].unlink()
    with pytest.raises(UserError, match=f"part {parts[1].name} of the split model .* is missing"):
        read_model_info(parts[0])


def test_unusable_files(tmp_path: Path, model: Path) -> None:
    data = model.read_bytes()
    path = tmp_path / "bad.gguf"
    with pytest.raises(UserError, match="does not exist"):
        read_model_info(path)
    with pytest.raises(UserError, match="is a directory"):
        read_model_info(tmp_path)
    os.mkfifo(pipe := tmp_path / "pipe.gguf")
    with pytest.raises(UserError, match="is a pipe"):
        read_model_info(pipe)
    for content, message in (
        (b"", "not a GGUF"),
        (b"GGML" + data[4:], "not a GGUF"),
        (data[:500], "damaged or cut off: its header wants"),
        (data[:-1000], "cut off: 1000 of"),
        (b"GGUF" + struct.pack(">I", 3) + data[8:], "GGUF version"),
        (data[:8] + b"\xff" * 8 + data[16:], "damaged: 18446744073709551615 tensors"),
        (data.replace(b"llama", b"lamda"), "architecture 'lamda' is not known here; those .* are afmoe, .*llama"),
        (data.replace(b"llama", b"rwkv7"), "'rwkv7', cannot be cut into layer slices: .*; take another model"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message) as caught:
            read_model_info(path)
        assert "\n" not in str(caught.value)


def test_a_vocabulary_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "vocab.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="no layers or no token table"):
        read_model_info(path)


FUZZ = """
import random, sys
from pathlib import Path
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.validation import NumberCheck
from pipeinfer.models.gguf.slice import open_slice
source = Path(sys.argv[1]); data = source.read_bytes(); n_header = int(sys.argv[2])
path = source.with_name("fuzz.gguf"); random.seed(0); refused = 0
for i in range(400):
    bad = bytearray(data)
    for _ in range(random.choice((1, 1, 4, 32))):
        bad[random.randrange(n_header)] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))
    if i % 4 == 0:
        bad = bad[: random.randrange(len(bad))]
    path.write_bytes(bad)
    try:
        info = read_model_info(path)
        open_slice(info, 0, 1).close()
    except UserError as error:
        refused += 1
        assert "\\n" not in str(error), error
print(refused)
"""


def test_damaged_headers_end_in_user_errors(tmp_path: Path) -> None:
    path = write_model(tmp_path / "small.gguf", Shape(n_layer=2))
    n_header = min(tensor.offset for tensor in read_header(path).tensors)
    run = subprocess.run(
        [sys.executable, "-c", FUZZ, str(path), str(n_header)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert 100 < int(run.stdout) < 400


def test_no_library_is_loaded_for_planning(model: Path) -> None:
    code = (
        "import sys; from pipeinfer.models.gguf.model_info import read_model_info; import pipeinfer.models.llama.stage;"
        f"read_model_info({str(model)!r}); assert not {{'llama_cpp', 'mpi4py'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("shape", "key", "layout", "number", "words"),
    [
        (Shape(), "llama.attention.head_count_kv", "<I", 0, "there are 4 heads for 0 of keys and values"),
        (Shape("qwen2"), "qwen2.rope.dimension_count", "<I", 32, "heads have 64 and 64 values, 32 of them rotated"),
        (Shape(n_expert=4), "llama.expert_used_count", "<I", 5, "5 of 4 experts are used"),
        (Shape(n_expert=4), "llama.expert_count", "<I", 1 << 20, "2 of 1048576 experts are used"),
        (Shape(), "llama.attention.layer_norm_rms_epsilon", "<f", -1.0, "epsilon is -1.0"),
        (Shape(), "llama.attention.layer_norm_rms_epsilon", "<f", float("nan"), "epsilon is nan"),
    ],
)
def test_numbers_that_libllama_would_end_the_process_on(
    tmp_path: Path, shape: Shape, key: str, layout: str, number: float, words: str
) -> None:
    path = write_model(tmp_path / "bad.gguf", shape)
    end = read_header(path).spans[key][1]
    data = bytearray(path.read_bytes())
    data[end - 4 : end] = struct.pack(layout, number)
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"bad.gguf is damaged: .*{words}; copy"):
        read_model_info(path)
