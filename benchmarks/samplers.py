"""What the last stage gains when threads choose its tokens: `python benchmarks/samplers.py [--vocab 128256]`.

Makes the last slice of a random-weight model, gives it runs of rows of as many requests, and prints the milliseconds a
run: on the clock, which takes two free cores, and of the stage's own thread, which hardly depends on other load. What
there is to gain is what a run takes above one of greedy rows.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from pipeinfer.cluster.samplers import Samplers
from pipeinfer.cluster.stage import LocalPrunings, StageWorker, Transaction, room_for
from pipeinfer.cluster.wire import encode
from pipeinfer.core.runs import Opening, Row, Run
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.models.gguf.slice import open_slice, read_model_info
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from tests.gguf_factory import Shape, write_model

WAYS = {
    "greedy": SamplingParams(seed=1, temp=0.0),
    "default options": SamplingParams(seed=1),
    "with a penalty": SamplingParams(seed=1, repeat_penalty=1.1),
    "top-p alone": SamplingParams(seed=1, top_k=0, min_p=0.0),
}


@click.command(help=__doc__)
@click.option("--vocab", default=128_256)
@click.option("--layers", default=24)
@click.option("--rows", default=8)
@click.option("--runs", default=24)
@click.option("--rounds", default=5)
@click.option("--samplers", default=1)
def main(vocab: int, layers: int, rows: int, runs: int, rounds: int, samplers: int) -> None:
    found: dict[tuple[str, int], list[tuple[float, float]]] = {(way, n): [] for way in WAYS for n in (0, samplers)}
    with last_stage(vocab, layers, rows) as model:
        for _ in range(rounds):  # all in turns: what a machine gives changes by more than what is to be told apart
            for (way, n_threads), times in found.items():
                model.clear()
                times.append(measure(model, WAYS[way], n_threads, rows, runs))
    for (way, n_threads), times in found.items():
        wall_s, own_s = (statistics.median(some) for some in zip(*times, strict=True))
        print(f"{way:16} {n_threads} samplers: {1e3 * wall_s:7.2f} ms a run, own thread {1e3 * own_s:7.2f}")


@contextmanager
def last_stage(vocab: int, layers: int, rows: int) -> Iterator[LlamaStage]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, Shape(n_layer=layers, n_embd=256, n_head=4, n_head_kv=2, n_ff=704, n_vocab=vocab))
        info = read_model_info(path)
        params = LlamaParams(
            n_cells=4096, n_seq_max=rows + 1, n_batch=64, n_outputs_max=rows, n_threads=1, n_gpu_layers=0, exact=True
        )
        stage = LlamaStage(open_slice(info, layers // 2, layers, None), params)
        yield stage
        stage.close()


def measure(model: LlamaStage, params: SamplingParams, n_threads: int, rows: int, runs: int) -> tuple[float, float]:
    """Seconds a run, from the first to the last verdict: on the clock, and of this thread."""
    worker = StageWorker(model, LocalPrunings(), time.perf_counter, is_first=False)
    samplers = Samplers(n_threads, lambda: True) if n_threads else None
    worker.samplers = samplers
    transactions = [transaction_of(number, params, rows, model.n_embd) for number in range(runs)]
    worker.process(transactions[0])
    start_s, start_own_s = time.perf_counter(), time.thread_time()
    for transaction in transactions[1:]:
        worker.process(transaction)
        while samplers and samplers.ready():
            pass
    if samplers:
        samplers.close()
    return (time.perf_counter() - start_s) / (runs - 1), (time.thread_time() - start_own_s) / (runs - 1)


def transaction_of(number: int, params: SamplingParams, rows: int, n_embd: int) -> Transaction:
    """The next token of each of so many requests, with some residual."""
    run = Run(number + 1, [Row(request, 5, number, (request,)) for request in range(rows)])
    if not number:
        run.opens = dict.fromkeys(range(rows), Opening(params, 1))
    transaction = room_for(encode(run), n_embd)
    transaction.activations[:] = np.random.default_rng(number).normal(size=transaction.activations.shape)
    return transaction


if __name__ == "__main__":
    main()
