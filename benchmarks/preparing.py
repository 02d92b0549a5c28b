"""What a stage does before it evaluates a run, which could be done while it evaluates the one before: is it worth that?

`python benchmarks/preparing.py [--layers 118]` sends runs of 1, 16 and 64 requests' tokens, as messages, through both
halves of the shipped model, or of one grown from it, in one process, and prints medians of the time from a message to
libllama's start (operations on the cache, which rows are alive, the batch), of libllama's evaluation, and from its end
to what is sent on. What libllama prepares itself, inside llama_decode, is no part of the first.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from pipeinfer.cluster.activations import WireType, activation_bytes
from pipeinfer.cluster.stage import LocalPrunings, StageWorker
from pipeinfer.cluster.wire import Transaction, encode
from pipeinfer.core.runs import Opening, Row, Run
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.slice import open_slice, read_model_info
from pipeinfer.models.grow import grow
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage

SIZES, N_RUNS, N_WARM = (1, 16, 64), 40, 8


class Watched:
    """libllama, with the times at which the last llama_decode began and ended."""

    def __init__(self, library: object) -> None:
        self._library, self.begun_s, self.ended_s = library, 0.0, 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._library, name)

    def llama_decode(self, *arguments: object) -> int:
        self.begun_s = time.perf_counter()
        code: int = self._library.llama_decode(*arguments)  # type: ignore[attr-defined]
        self.ended_s = time.perf_counter()
        return code


@click.command(help=__doc__)
@click.option("--layers", default=0, help="Of a grown model. [default: the shipped one]")
@click.option("--numerics", type=click.Choice(["fast", "exact"]), default="fast", show_default=True)
def main(layers: int, numerics: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = TARGET
        if layers:
            path = Path(folder) / "grown.gguf"
            grow(read_model_info(TARGET), path, layers, 0.0)
        info = read_model_info(path)
        half = info.n_layer // 2
        params = LlamaParams(4096, max(SIZES) + 1, n_batch=128, n_outputs_max=max(SIZES), exact=numerics == "exact")
        cuts = ((0, half), (half, info.n_layer))
        stages = [LlamaStage(open_slice(info, *cut), params) for cut in cuts]
        print(f"{info.n_layer} layers, {path.stat().st_size / 1e6:.0f} MB, {numerics}, microseconds:")
        for n_rows in SIZES:
            for stage in stages:
                stage.clear()
            measure(n_rows, stages)


def measure(n_rows: int, stages: list[LlamaStage]) -> None:
    workers = [StageWorker(stage, LocalPrunings(), time.perf_counter, stage.is_first) for stage in stages]
    watched = [Watched(stage._lib) for stage in stages]
    for stage, library in zip(stages, watched, strict=True):
        stage._lib = library  # type: ignore[assignment]
    found: list[list[tuple[float, float, float]]] = [[] for _ in stages]
    for position in range(N_RUNS):
        opens = {request: Opening(SamplingParams(temp=0.0), 1) for request in range(n_rows)} if position == 0 else {}
        rows = [Row(request, 300 + request, position, (request,), 1) for request in range(n_rows)]
        bare = encode(Run(position + 1, rows, opens=opens))
        room = np.zeros(activation_bytes(n_rows, stages[0].n_embd, WireType.F32), np.uint8)
        buffer = np.concatenate([bare, room])
        for index, (worker, library) in enumerate(zip(workers, watched, strict=True)):
            start_s = time.perf_counter()
            transaction = Transaction(buffer, worker.model.n_embd)
            worker.process(transaction)
            if not worker.model.is_last:
                buffer = transaction.message.copy()
            end_s = time.perf_counter()
            times = library.begun_s - start_s, library.ended_s - library.begun_s, end_s - library.ended_s
            found[index].append(times)
    for name, runs in zip(("first", "last"), found, strict=True):
        before, evaluating, after = (statistics.median(part) * 1e6 for part in zip(*runs[N_WARM:], strict=True))
        share = 100 * before / (before + evaluating + after)
        print(f"  {n_rows:3} rows, {name:5} stage: before {before:6.0f}, evaluation {evaluating:8.0f}, after "
              f"{after:6.0f}; before is {share:.1f}%")  # fmt: skip
    for stage, library in zip(stages, watched, strict=True):
        stage._lib = library._library  # type: ignore[assignment]


if __name__ == "__main__":
    main()
