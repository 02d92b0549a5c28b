"""A deeper model that computes (nearly) the same: `python experiments/grow.py --layers 48 -o grown.gguf`.

Every added layer costs what a layer costs. The added layers are copies of the model's own, in turn, but what they add
to the residual stream is scaled down: their output projections are `noise` times the original ones, with random signs;
at 0 they add nothing, and the model computes exactly what it did. With the original model (or its draft) as the draft,
the acceptance rate is that of the original pair without noise, and falls with the noise. Only the scale of each block
is changed: any quantisation stays what it is, nothing is quantised again, and a model of any size goes through in a
stream.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np
import numpy.typing as npt

from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_CTX
from pipeinfer.job.options.values import THREADS, File, Number, Whole
from pipeinfer.job.placement.checks import check_alone, fetch_files
from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.header import BLOCKS, Tensor, read_header
from pipeinfer.models.gguf.model_info import MAX_LAYERS, ModelInfo, layer_of, read_model_info
from pipeinfer.models.gguf.writer import encode_entry, encode_header, tensor_data, write_gguf
from pipeinfer.outputs import check_separate, check_writable, path_of, whole_file

MAX_NOISE = 1000
TOLERANCE, N_TRIALS = 0.03, 12
CHUNK_BYTES = 1 << 24
OUTPUT_PROJECTIONS = ("attn_output", "ffn_down", "ssm_out", "shortconv.out_proj")
"""The tensors that write to the residual stream, in every supported architecture; `ffn_down_exps` of experts too."""

# ggml type: where in a block its half-precision scales (and minima) are, in bytes
SCALES_AT = {
    1: (0,),
    2: (0,),
    3: (0, 2),
    6: (0,),
    7: (0, 2),
    8: (0,),
    10: (80, 82),
    11: (108,),
    12: (0, 2),
    13: (0, 2),
    14: (208,),
    16: (0,),
    17: (0,),
    18: (0,),
    19: (0,),
    20: (0,),
    21: (0,),
    22: (0,),
    23: (0,),
}
F32, BF16 = 0, 30
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the grown model and where its data come from; `scale` is None where they are copied as they are."""

    name: str
    source: Tensor
    scale: float | None
    seed: tuple[int, ...]


def grow(info: ModelInfo, path: Path, n_layer: int, noise: float, seed: int = 0) -> None:
    """Write `info`'s model with `n_layer` layers to `path`, whole or not at all. Raises as `write_grown`, and when the
    file cannot be written."""
    with whole_file(path, "--output") as file:
        write_grown(info, file, n_layer, noise, seed)


def write_grown(info: ModelInfo, file: BinaryIO, n_layer: int, noise: float, seed: int = 0) -> None:
    """The same from the beginning of an open file, which it leaves flushed.

    Raises UserError when the depth, the noise or the model's quantisation does not do, or the model changed since its
    header was read.
    """
    _check(info, n_layer, noise)
    parts = list(_parts(info, n_layer, noise, seed))
    header = encode_header(list(_entries(info, n_layer)), [(part.name, part.source) for part in parts])
    write_gguf(file, header, map(_data, parts))
    file.flush()
    info.check_unchanged()


def scaled(blocks: Bytes, kind: int, factor: float, rng: np.random.Generator) -> Bytes:
    """Blocks of ggml type `kind`, (n_blocks, bytes of a block), times `factor`, each with a random sign."""
    signs = (factor * rng.choice(np.array([-1.0, 1.0], np.float32), len(blocks))).astype(np.float32)
    out = blocks.copy()
    if kind == F32:
        return (out.view(np.float32) * signs[:, None]).view(np.uint8)
    if kind == BF16:
        # a bfloat16 is the upper half of a float32
        wide = np.left_shift(out.view(np.uint16).astype(np.uint32), 16).view(np.float32) * signs[:, None]
        return np.right_shift(wide.view(np.uint32), 16).astype(np.uint16).view(np.uint8)
    for at in SCALES_AT[kind]:
        values = out[:, at : at + 2].copy().view(np.float16).astype(np.float32) * signs[:, None]
        out[:, at : at + 2] = values.astype(np.float16).view(np.uint8)
    return out


def _check(info: ModelInfo, n_layer: int, noise: float) -> None:
    if not info.n_layer < n_layer <= MAX_LAYERS:
        raise UserError(
            f"--layers {n_layer}: the model has {info.n_layer}, a grown one has more, and {MAX_LAYERS} at most"
        )
    if not 0 <= noise <= MAX_NOISE:
        raise UserError(f"--noise {noise:g} must be from 0 (the same function) to {MAX_NOISE}")
    for tensor in info.tensors:
        if noise and _adds(tensor.name) and tensor.type not in (*SCALES_AT, F32, BF16):
            raise UserError(
                f"noise cannot be put into {tensor.name}: its ggml type {tensor.type} has no scale that could be "
                "changed; use --noise 0, or another quantisation"
            )


def _origin(info: ModelInfo, layer: int) -> int:
    """Which layer of the model is the grown one's: after the last they come in turn, but for the dense ones that models
    with experts begin with."""
    step = info.layers.step
    first = -(-info.layers.n_dense // step) * step % info.n_layer
    return layer if layer < info.n_layer else first + (layer - info.n_layer) % (info.n_layer - first)


def _adds(name: str) -> bool:
    return layer_of(name) is not None and name.split(".", 2)[2].startswith(OUTPUT_PROJECTIONS)


def _parts(info: ModelInfo, n_layer: int, noise: float, seed: int) -> Iterator[Part]:
    """The model's tensors as they are, then those of the added layers."""
    by_layer: dict[int, list[Tensor]] = {}
    for tensor in info.tensors:
        layer = layer_of(tensor.name)
        if layer is not None and layer >= info.n_layer:
            continue  # it guesses ahead
        yield Part(tensor.name, tensor, None, ())
        if layer is not None:
            by_layer.setdefault(layer, []).append(tensor)
    for layer in range(info.n_layer, n_layer):
        for index, tensor in enumerate(by_layer[_origin(info, layer)]):
            name = f"blk.{layer}.{tensor.name.split('.', 2)[2]}"
            yield Part(name, tensor, noise if _adds(tensor.name) else None, (seed, layer, index))


def _data(part: Part) -> Iterator[bytes | memoryview]:
    """A tensor's data, some of its blocks at a time."""
    block_bytes, rng = BLOCKS[part.source.type][1], np.random.default_rng(part.seed)
    for piece in tensor_data(part.source, CHUNK_BYTES // block_bytes * block_bytes):
        if part.scale is None:
            yield piece
        elif part.scale == 0:
            # all-zero blocks are zeros in every type that ggml has
            yield bytes(len(piece))
        else:
            blocks = np.frombuffer(piece, np.uint8).reshape(-1, block_bytes)
            yield scaled(blocks, part.source.type, part.scale, rng).tobytes()


def _entries(info: ModelInfo, n_layer: int) -> Iterator[bytes]:
    """The metadata: the model's own as they are in its file, the vocabulary with them, but for what counts layers."""
    copied = info.layers.metadata_of([_origin(info, layer) for layer in range(n_layer)])
    left_out = ("general.alignment", "general.tensor_extra", "split.")
    known = {key: raw for key, raw in copied.items() if not key.startswith(left_out)}
    with open(info.paths[0], "rb") as file:
        for key, (start, end) in read_header(info.paths[0]).spans.items():
            if key not in known:
                continue
            if known[key] != info.metadata[key].raw:
                yield encode_entry(key, known[key])
            else:
                file.seek(start)
                yield file.read(end - start)
    for key, value in known.items():
        if key not in info.metadata:
            yield encode_entry(key, value)


def search_noise(make: Callable[[float], float], wanted: float) -> tuple[float, float]:
    """(noise, rate) of the model that `make(noise)` leaves behind: the nearest to `wanted` of a dozen trials.

    The rate falls with the noise, if not at every step. Raises UserError when no noise gives the rate.
    """
    rate = make(0.0)
    if rate < wanted - TOLERANCE:
        raise UserError(
            f"--acceptance {wanted:g} cannot be reached: without noise the draft is right in {rate:.3f} of the cases; "
            "ask for less, or leave out -md to draft with the original model"
        )
    tried = {0.0: rate}
    low, high, noise = 0.0, math.inf, 0.25
    while min(abs(found - wanted) for found in tried.values()) > TOLERANCE and len(tried) < N_TRIALS:
        tried[noise] = make(noise)
        low, high = (noise, high) if tried[noise] > wanted else (low, noise)
        noise = 2 * low if high == math.inf else (low + high) / 2
    best = min(tried, key=lambda noise: abs(tried[noise] - wanted))
    if best != list(tried)[-1]:
        make(best)
    return best, tried[best]


@click.command(help=__doc__)
@click.option("-m", "--model", type=File(), default=TARGET, help="Model to grow, GGUF. [default: the shipped target]")
@click.option("-o", "--output", type=File(), required=True, help="The grown model's file.")
@click.option("--layers", type=Whole(1, MAX_LAYERS), required=True, help="Layers it shall have.")
@click.option(
    "--noise",
    type=Number(0, MAX_NOISE),
    default=0.0,
    show_default=True,
    help="What added layers add to the residual stream, as a share of what the originals add; 0: the same function.",
)
@click.option(
    "--acceptance", type=Number(0, 1, above=True), help="Search the noise with which the draft is right this often."
)
@click.option(
    "-md", "--model-draft", type=File(), help="Draft to measure with. [with --acceptance: the original model]"
)
@click.option("-n", "--predict", type=Whole(1, MAX_CTX), default=64, show_default=True, help="Tokens a measured text.")
@click.option("-s", "--seed", type=Whole(0), default=0, show_default=True, help="Of the noise.")
@click.option(
    "-t", "--threads", type=THREADS, default=max(1, (os.cpu_count() or 1) // 2), help="[default: half the cores]"
)
def main(**options: Any) -> None:
    try:
        make_grown(**options)
    except UserError as error:
        raise click.UsageError(str(error)) from None


def make_grown(
    model: Path,
    output: Path,
    layers: int,
    noise: float,
    acceptance: float | None,
    model_draft: Path | None,
    predict: int,
    seed: int,
    threads: int,
) -> None:
    """Write the file that the command line asks for, and print its acceptance rate on greedy text if that was measured.
    Raises UserError."""
    if acceptance is not None and noise:
        raise UserError(f"--noise {noise:g} and --acceptance {acceptance:g} both choose the noise; give one of them")
    model, *given = fetch_files([model, *([model_draft] if model_draft else [])])
    info = read_model_info(model)
    draft = given[0] if given else (model if acceptance is not None else None)
    check_separate({"--output": output}, {"--model": info.paths, "--model-draft": [draft] if draft else []})
    check_writable(output, "--output")
    if draft:
        n_cells_grown = predict * layers // info.n_layer  # cells of the model's own depth, as many bytes
        check_alone(info, n_cells_grown, n_rows=32)
    measure = _measuring(model, draft, predict, threads) if draft else None
    with whole_file(output, "--output") as file:

        def make(strength: float) -> float:
            file.seek(0)
            write_grown(info, file, layers, strength, seed)
            return measure(path_of(file)) if measure else float("nan")

        noise, rate = search_noise(make, acceptance) if acceptance is not None else (noise, make(noise))
    size = f"{layers} layers, {output.stat().st_size / 1e6:.1f} MB, noise {noise:.4g}"
    print(f"{output}: {size}" + (f", acceptance rate of {draft} {rate:.3f}" if draft else ""))


def _measuring(model: Path, draft: Path, n_predict: int, n_threads: int) -> Callable[[Path], float]:
    """What gives a grown target's acceptance rate. Raises UserError when the draft's vocabulary is quite another."""
    from pipeinfer.job.inspect.pair_report import TEXTS, acceptance
    from pipeinfer.models.drafts.translation import draft_translation  # loads libllama
    from pipeinfer.models.text.tokenizer import Tokenizer

    tokenizer, translation = Tokenizer(model), draft_translation(model, draft)
    prompts = [tokens for text in TEXTS if (tokens := tokenizer.encode(text))]
    if not prompts:
        raise UserError(
            f"{model} has no tokenizer; the acceptance rate cannot be measured, leave -md and --acceptance out"
        )
    return lambda grown: acceptance(grown, draft, prompts, n_predict, n_threads, translation)


if __name__ == "__main__":
    main()
