"""What cutting a model into slices costs: time per token of n slices, one after the other, against the whole model.

    python benchmarks/slices.py --slices 2

Builds a random model in a temporary directory. Both are measured in turn, pass by pass, and the median of the ratios
is reported, so that a busy machine slows down both.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeinfer.core.interfaces import Batch
from pipeinfer.models.gguf.slice import open_slice, read_model_info
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from tests.gguf_factory import Shape, write_model


def time_token(stages: Sequence[LlamaStage], position: int, n_rows: int) -> float:
    """Seconds for one batch of n_rows through all stages."""
    tokens = np.full(n_rows, 5 + position % 200, np.int32)
    positions = np.arange(position, position + n_rows, dtype=np.int32)
    batch = Batch(tokens, positions, [(0,)] * n_rows, None, np.ones(n_rows, bool))
    start = time.perf_counter()
    for stage in stages:
        batch.hidden = stage.evaluate(batch, lambda: False)
    return time.perf_counter() - start


@click.command()
@click.option("--layers", default=16, show_default=True)
@click.option("--embd", default=1024, show_default=True, help="Length of a row of the residual stream.")
@click.option("--slices", default=2, show_default=True)
@click.option("--rows", default=1, show_default=True, help="Rows of a batch.")
@click.option("--threads", default=1, show_default=True)
@click.option("--passes", default=150, show_default=True)
@click.option("--type", "type_name", default="Q8_0", show_default=True)
@click.option("--cached/--in-memory", default=False, show_default=True, help="Where the slices lie.")
@click.option("--exact/--fast", default=True, show_default=True)
def main(
    layers: int, embd: int, slices: int, rows: int, threads: int, passes: int, type_name: str, cached: bool, exact: bool
) -> None:
    shape = Shape(n_layer=layers, n_embd=embd, n_head=embd // 64, n_head_kv=embd // 128, n_ff=3 * embd, n_vocab=4096)
    params = LlamaParams(n_cells=rows * passes + 64, n_batch=max(rows, 32), n_threads=threads, exact=exact)
    with tempfile.TemporaryDirectory() as directory:
        info = read_model_info(write_model(Path(directory) / "model.gguf", shape, type_name))
        size_mb = sum(info.layer_bytes) / 1e6
        edges = [layers * i // slices for i in range(slices + 1)]
        whole = [LlamaStage(open_slice(info, 0, layers), params)]
        cache = Path(directory) if cached else None
        chain = [LlamaStage(open_slice(info, a, b, cache), params) for a, b in pairwise(edges)]
        times = np.array([
            (time_token(whole, i * rows, rows), time_token(chain, i * rows, rows)) for i in range(passes)
        ])[passes // 10 :]  # fmt: skip
        for stage in [*whole, *chain]:
            stage.close()
    whole_ms, chain_ms = 1e3 * np.median(times, axis=0)
    ratio = float(np.median(times[:, 1] / times[:, 0]))
    click.echo(f"{layers} layers x {embd} {type_name} ({size_mb:.0f} MB), {rows} row(s), {threads} thread(s), "
               f"{'exact' if exact else 'fast'}: whole {whole_ms:.2f} ms, {slices} slices {chain_ms:.2f} ms, "
               f"ratio {ratio:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
