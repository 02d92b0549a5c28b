"""What exact numerics cost, and what fast ones may change: `python benchmarks/numerics.py [--parts speed,texts]`.

speed   seconds of a whole model's batches with `--numerics exact` over those with `fast`, kernel choices being as
        `pipeinfer` makes them; a process each, in turns
texts   how many greedy texts differ between policies: iterative in one process, pipeinfer on three ranks

On the shipped target grown to more layers (Q8_0), on the shipped target in Q4_K_M as far as its width allows, and on
random weights of a larger width in Q8_0, Q6_K and Q4_K_M. Random weights are near ties more often than trained ones.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from pipeinfer.core.blocks import Span
from pipeinfer.core.interfaces import Batch, StageModel
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.job.loading.stages import load_layers
from pipeinfer.job.options.backends import Backend
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.slice import open_slice, read_model_info
from pipeinfer.models.grow import grow
from pipeinfer.models.llama.params import LlamaParams
from tests.gguf_factory import Shape, quantise, write_model
from tests.jobs import run_json

SIZES = (1, 2, 4, 8, 32)
N_CONTEXT, N_CHUNK = 256, 128
PROMPTS_OF = (512, 2048)  # rows
N_LAYER = 96  # of the grown target: 75 MB
WIDE = Shape(n_layer=6, n_embd=1024, n_head=16, n_head_kv=4, n_ff=2816, n_vocab=4096, peaky=12.0, n_strong=2, weak=0.04)
VERBS = ("read", "write", "find", "count", "parse")
NOUNS = ("file", "line", "word", "item", "name", "path", "node", "token", "value", "key")
PROMPTS = [f"def {verb}_{noun}(self, {noun}):\n    " for noun in NOUNS for verb in VERBS]
Times = dict[str, float]


@click.command(help=__doc__)
@click.option("--parts", default="speed,texts", show_default=True)
@click.option("--models", default="shipped,trained-Q4_K_M,Q8_0,Q6_K,Q4_K_M", show_default=True)
@click.option("--threads", default=len(os.sched_getaffinity(0)), help="Of part speed. [default: the cores]")
@click.option("--rounds", default=3, show_default=True, help="Of part speed.")
@click.option("--prompts", default=50, show_default=True, help=f"Of part texts, {len(PROMPTS)} at most.")
@click.option("--tokens", default=64, show_default=True, help="Of a text.")
@click.option("--numerics", default="fast", show_default=True, help="Of the texts; exact,fast for both.")
@click.option("--ranks", default=3, show_default=True, help="Of policy pipeinfer.")
@click.option("--backend", default="llama", show_default=True, help="Of part speed.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the models here and use them again.")
def main(
    parts: str, models: str, threads: int, rounds: int, prompts: int, tokens: int, numerics: str, ranks: int,
    backend: str, folder: Path | None,
) -> None:  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        kept = folder or Path(scratch)
        kept.mkdir(parents=True, exist_ok=True)
        for name in models.split(","):
            target, draft = make_models(kept, name)
            if "speed" in parts.split(","):
                report_speed(name, target, Backend.parse(backend), threads, rounds)
            if "texts" in parts.split(","):
                # added layers that add nothing make no other text
                judged = TARGET if name == "shipped" else target
                for kind in numerics.split(","):
                    report_texts(name, judged, draft, PROMPTS[:prompts], tokens, ranks, kind)


# -- models


def make_models(folder: Path, name: str) -> tuple[Path, Path]:
    """A target and a draft whose guesses it often accepts; made once."""
    target, draft = folder / f"{name}.gguf", DRAFT
    makers: dict[str, Callable[[], object]] = {
        "shipped": lambda: grow(read_model_info(TARGET), target, N_LAYER, 0.0),
        "trained-Q4_K_M": lambda: quantise(TARGET, target, "Q4_K_M"),
    }
    if name not in makers:
        draft = folder / "wide-draft.gguf"
        if not draft.exists():
            write_model(draft, replace(WIDE, n_layer=WIDE.n_strong), "Q8_0")
    if not target.exists():
        makers.get(name, lambda: write_model(target, WIDE, name))()
    return target, draft


# -- speed


def report_speed(name: str, target: Path, backend: Backend, n_threads: int, rounds: int) -> None:
    """Print a table: milliseconds of both numerics, and their ratio."""
    found = [[in_process(target, backend, exact, n_threads) for exact in (True, False)] for _ in range(rounds)]
    info = read_model_info(target)
    print(f"\n{name}: {info.n_layer} layers x {info.n_embd}, {info.quantisation}, {backend}, {n_threads} threads")
    print("| batch | exact ms | fast ms | exact / fast |\n|---|---|---|---|")
    for size in found[0][0]:
        exact, fast = (1e3 * statistics.median(pair[index][size] for pair in found) for index in (0, 1))
        each = [pair[0][size] / pair[1][size] for pair in found]
        spread = f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
        print(f"| {size} | {exact:.2f} | {fast:.2f} | {spread} |", flush=True)


def in_process(target: Path, backend: Backend, exact: bool, n_threads: int) -> Times:
    """`time_batches` in a process of its own, so that neither finds what the other left."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(time_batches, target, backend, exact, n_threads).result()


def time_batches(target: Path, backend: Backend, exact: bool, n_threads: int) -> Times:
    """Seconds of a prompt, and of batches of some sizes after a context; medians."""
    info = read_model_info(target)
    n_cells = max(PROMPTS_OF) + N_CHUNK
    params = LlamaParams(
        n_cells, n_seq_max=2, n_batch=N_CHUNK, n_outputs_max=max(SIZES), n_threads=n_threads, exact=exact
    )
    model = load_layers(lambda: open_slice(info, 0, info.n_layer, None), params, backend, 0)
    prompts = {f"prompt of {n}": statistics.median(_timed(model, 0, n, exact) for _ in range(3)) for n in PROMPTS_OF}
    _evaluate(model, 0, N_CONTEXT)
    times = {f"{size} row{'s' if size > 1 else ''}": _median_of(model, size) for size in SIZES}
    model.close()
    return times | prompts


def _median_of(model: StageModel, n_rows: int) -> float:
    _timed(model, N_CONTEXT, n_rows)
    return statistics.median(_timed(model, N_CONTEXT, n_rows) for _ in range(12))


def _timed(model: StageModel, start: int, n_rows: int, in_blocks: bool = False) -> float:
    """Seconds of these rows, which are taken back."""
    start_s = time.perf_counter()
    _evaluate(model, start, n_rows, in_blocks)
    took_s = time.perf_counter() - start_s
    model.apply([KvOp(OpKind.REMOVE, 0, first=start), KvOp(OpKind.COMPACT, 0)])
    return took_s


def _evaluate(model: StageModel, start: int, n_rows: int, in_blocks: bool = False) -> None:
    """In chunks; a prompt wants logits of its last row only, and in blocks of none."""
    for first in range(start, start + n_rows, N_CHUNK):
        positions = np.arange(first, min(first + N_CHUNK, start + n_rows), dtype=np.int32)
        wanted = np.full(len(positions), n_rows <= max(SIZES))
        wanted[-1] = not in_blocks
        span = Span(0, n_rows) if in_blocks else None
        batch = Batch(3 + positions % 200, positions, [(0,)] * len(positions), None, wanted, span)
        assert model.evaluate(batch, lambda: False) is not None


# -- texts


def report_texts(
    name: str, target: Path, draft: Path, prompts: Sequence[str], n_tokens: int, n_ranks: int, numerics: str
) -> None:
    """Print how many texts differ between the policies, and where they begin to."""
    firsts, rates = list[int](), list[float]()
    for prompt in prompts:
        common = ["-m", str(target), "-md", str(draft), "-p", prompt, "-n", str(n_tokens), "--numerics", numerics]
        common += ["--temp", "0", "--ignore-eos", "-t", "1"]
        plain = run_json(1, [*common, "--policy", "iterative"])["tokens"]
        ours = run_json(n_ranks, [*common, "--policy", "pipeinfer"])
        rates.append(ours["speculation"]["hit_rate"])
        different = [index for index, pair in enumerate(zip(plain, ours["tokens"], strict=True)) if len(set(pair)) > 1]
        firsts += different[:1]
    where = f", first after {statistics.median(firsts):.0f} tokens (median)" if firsts else ""
    print(
        f"{name}, {numerics}: {len(firsts)} of {len(prompts)} texts of {n_tokens} tokens differ{where}; "
        f"hit rate of the draft {statistics.fmean(rates):.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
