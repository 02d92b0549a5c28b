"""What there is to find out on a GPU, in a few runs of some minutes: `python benchmarks/gpu.py [--parts check,speed]`.

check   layers on the device against those on the CPU: torch's in every type, single rows, chunks, trees, recorded runs
        again; libllama's where its build has a GPU; torch's against transformers', where that is installed. With
        libllama's name of a device: libllama's in some types, and how many rows are exact at once
speed   a model of 1B's or 8B's shape with random weights in bf16: one row of torch's without messages, with recorded
        graphs and without, and begun before the last one's result is there; on 1, 2 and 4 ranks of one GPU time per
        token of one text, throughput of many, and `auto` with a draft
others  the same text by others, in one process: a plain llama under `torch.compile` with a cache of fixed size, and
        transformers, also with the draft (assisted generation), where that is installed

`--device`: torch's, or libllama's name of any that it has (CUDA0, Vulkan0, RPC0 of `--rpc`), for libllama's layers
alone. Beside a figure of one text on torch's stands what reading the weights takes at least. `--quick` tries the script
itself with a tiny model, with `--device cpu` anywhere. Needs no network; a line of JSON a figure goes to `--output`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu_check import check_devices, check_llama
from random_model import SIZES, Size, write_random

from pipeinfer.cluster.timed_runs import evaluate
from pipeinfer.core.interfaces import AsyncStage, Batch
from pipeinfer.job.placement.memory import weight_bytes
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.ggml import has_gpu
from pipeinfer.models.torch.params import BF16, F32, TorchParams, load_torch
from tests.support.jobs import COMMAND, ROOT, environment, launcher

N_CELLS, N_CONTEXT, N_ROWS = 512, 64, 32
PROMPT = "the token of the model"
BROKE_OFF = "broke off"
JOB_S = 240.0
"""What a job may take at most, loading included: a device is lent for minutes."""


@click.command(help=__doc__)
@click.option("--parts", default="check,speed,others", show_default=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("--rpc", default="", help="A server HOST:PORT for each rank, separated by commas.")
@click.option("--sizes", default="1b,8b", show_default=True, help=f"Of {', '.join(SIZES)}.")
@click.option("--ranks", default="1,2,4", show_default=True)
@click.option("--backends", default="torch,llama", show_default=True, help="Of part speed; torch:int8, torch:int4 too.")
@click.option("--tokens", default=128, show_default=True, help="Of a text.")
@click.option("--requests", default=32, show_default=True, help="Of many texts.")
@click.option("--compiler", default="inductor", show_default=True, help="torch.compile's, of part others.")
@click.option("--quick", is_flag=True, help="A tiny model, one rank, few tokens.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep models, traces and pictures here.")
@click.option("--output", type=click.Path(path_type=Path), help="Append figures to this file, a line of JSON each.")
def main(
    parts: str,
    device: str,
    rpc: str,
    sizes: str,
    ranks: str,
    backends: str,
    tokens: int,
    requests: int,
    compiler: str,
    quick: bool,
    folder: Path | None,
    output: Path | None,
) -> None:
    wrong, wanted, servers = 0, set(parts.split(",")), rpc.split(",") if rpc else []
    is_torch = device.partition(":")[0] in ("cuda", "cpu")
    if quick:
        sizes, ranks, tokens, requests = "tiny", "1", 6, 3
    if not is_torch:
        backends, wanted = "llama", wanted - {"others"}
    with tempfile.TemporaryDirectory() as scratch:
        kept = folder or Path(scratch)
        kept.mkdir(parents=True, exist_ok=True)
        if "check" in wanted:
            for found in (
                check_devices(kept, device, quick) if is_torch else in_child(check_llama, kept, device, servers, quick)
            ):
                wrong += not found.get("right", True)
                tell(found, output)
        if wanted & {"speed", "others"}:
            bandwidth = device_bandwidth(device) if is_torch else 0.0
            if is_torch:
                tell({"what": "bandwidth", "device": device, "bytes_per_s": bandwidth}, output)
            for name in sizes.split(","):
                model, draft = models_of(kept, name, SIZES[name])
                figures = list[Iterator[dict[str, Any]]]()
                if "speed" in wanted:
                    at = [n for n in map(int, ranks.split(",")) if not servers or n <= len(servers)]
                    figures = [
                        speeds(model, draft, each, device, servers, at, tokens, requests, kept)
                        for each in backends.split(",")
                    ]
                if "others" in wanted:
                    figures.append(others(model, draft, device, tokens, compiler))
                for found in chain.from_iterable(map(kept_going, figures)):
                    wrong += found["what"] == BROKE_OFF
                    most = limits(read_model_info(model), device, bandwidth, found) if is_torch else {}
                    tell({"size": name, **found, **most}, output)
    sys.exit(1 if wrong else 0)


def in_child(check: Callable[..., list[dict[str, Any]]], *arguments: object) -> list[dict[str, Any]]:
    """In a process of its own: an RPC server has one client at a time, and jobs follow."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(check, *arguments).result()


def kept_going(figures: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of a series that breaks off the reason is the last figure: others are wanted still."""
    try:
        yield from figures
    except Exception as error:
        yield {"what": BROKE_OFF, "why": f"{type(error).__name__}: {error}"[:1000]}


def tell(found: dict[str, Any], output: Path | None) -> None:
    line = json.dumps(found)
    print(line, flush=True)
    if output:
        with open(output, "a") as file:
            file.write(line + "\n")


def models_of(folder: Path, name: str, size: Size) -> tuple[Path, Path]:
    """A model and its first layers as a draft; made once."""
    model, draft = folder / f"{name}.gguf", folder / f"{name}-draft.gguf"
    if not model.exists():
        write_random(model, size)
    if not draft.exists():
        write_random(draft, size, size.n_strong)
    return model, draft


# -- speed


def speeds(
    model: Path,
    draft: Path,
    backend: str,
    device: str,
    servers: Sequence[str],
    ranks: Sequence[int],
    tokens: int,
    requests: int,
    folder: Path,
) -> Iterator[dict[str, Any]]:
    """One text on each number of ranks, many texts, and one with guesses. `servers`: of RPC, one a rank."""
    where = place(backend, device)
    if where is None:
        yield {"what": "skipped", "backend": backend, "why": "libllama has no GPU here"}
        return
    if backend.startswith("torch"):
        yield from row_alone(model, device, backend)
    common = ["-m", str(model), "--numerics", "fast", *where]

    def run(n_ranks: int, words: Sequence[str]) -> dict[str, Any]:
        return run_job(n_ranks, [*words, *(["--rpc", ",".join(servers[:n_ranks])] if servers else [])])

    one = ["-p", PROMPT, "-n", str(tokens), "--ignore-eos", "--temp", "0", "--json"]
    plain = []
    for n_ranks in ranks:
        plain.append(figure("one text", backend, n_ranks, run(n_ranks, ["run", *common, *one, "-md", "none"])))
        yield plain[-1]
    for n_ranks in ranks:
        yield {
            "what": "many texts",
            "backend": backend,
            "ranks": n_ranks,
            **batch(partial(run, n_ranks), common, tokens, requests, folder),
        }
    trace = folder / f"{model.stem}-{backend.replace(':', '-')}.json"
    guessed = run(2, ["run", *common, *one, "-md", str(draft), "--policy", "auto", "--trace", str(trace)])
    subprocess.run(
        [sys.executable, str(ROOT / "plot.py"), str(trace)], check=False, env=environment(), stdout=subprocess.DEVNULL
    )
    rates = {name: guessed["speculation"][name] for name in ("acceptance_rate", "hit_rate")}
    found = figure("auto with a draft", backend, 2, guessed)
    yield found | rates | {"over_one_text": plain[0]["tpot_s"] / found["tpot_s"], "timeline": str(trace)}


def row_alone(model: Path, device: str, backend: str) -> Iterator[dict[str, Any]]:
    """Seconds of one row after some, in this process: what a rank computes, without messages. As graphs that were
    recorded, as it is on GPUs, begun while the last is computed, operation by operation, and with exact numerics."""
    torch = load_torch()
    from pipeinfer.models.torch.stage import TorchStage

    info = read_model_info(model)
    params = TorchParams(
        N_CELLS, 2, N_CONTEXT, 1, len(os.sched_getaffinity(0)), device, type_of(backend, device), padded=True
    )
    for exact in (False, True):
        stage = TorchStage(open_slice(info, 0, info.n_layer), replace(params, exact=exact))
        for recorded in (True, False)[: 1 if exact else 2]:
            if not recorded:
                stage._replays = None
            stage.clear()
            evaluate(stage, N_CONTEXT, n_wanted=1)
            times = []
            for at in range(N_CONTEXT, N_CONTEXT + N_ROWS):
                start_s = time.perf_counter()
                evaluate(stage, 1, at)
                times.append(time.perf_counter() - start_s)
            found = {"what": "one row", "backend": backend, "filled_up": recorded, "exact": exact}
            yield found | {"tpot_s": float(np.median(times))}
            if recorded and not exact:
                yield found | {"begun_ahead": True, "tpot_s": seconds_ahead(stage, N_CONTEXT + N_ROWS)}
        stage.close()
        del stage
        if device != "cpu":
            torch.cuda.empty_cache()  # the jobs after it have the same device


def seconds_ahead(stage: AsyncStage, first: int) -> float:
    """Of rows that are known beforehand, each begun before the last one's result is there, as a full pipeline has
    them."""
    start_s, under_way = time.perf_counter(), deque[Any]()
    for at in range(first, first + N_ROWS):
        batch = Batch(np.array([5], np.int32), np.array([at], np.int32), [(0,)], None, np.ones(1, bool))
        under_way.append(stage.begin(batch, lambda: False))
        if len(under_way) == 2:
            under_way.popleft().result()
    under_way.popleft().result()
    return (time.perf_counter() - start_s) / N_ROWS


def type_of(backend: str, device: str) -> str:
    """What the weights of torch are kept as."""
    return backend.partition(":")[2] or (F32 if device == "cpu" else BF16)


def others(model: Path, draft: Path, device: str, tokens: int, compiler: str) -> Iterator[dict[str, Any]]:
    """One text by torch.compile and by transformers. `distinct`: of its tokens; a text that repeats one is easily
    guessed."""
    from gpu_others import compiled, transformers_figures

    torch = load_torch()
    waits = partial(wait, torch, device)
    for what, figures in (
        ("torch.compile", compiled(model, device, tokens, waits, compiler)),
        ("transformers", transformers_figures(model, draft, device, tokens, waits)),
    ):
        try:
            for found, text in figures:
                yield {**found, "distinct": len(set(text))}
        except Exception as error:  # whatever theirs is, the figures after it are wanted
            yield {"what": what, "distinct": 0, "why": f"{type(error).__name__}: {error}"[:500]}
        if device != "cpu":
            torch.cuda.empty_cache()


def place(backend: str, device: str) -> list[str] | None:
    """The options that put a rank's layers on the device; None where the build cannot."""
    if backend.startswith("torch"):
        return ["--backend", f"torch:{device}{backend[len('torch') :]}"]
    if device == "cpu":
        return ["--backend", "llama"]
    if not device.startswith("cuda"):
        return ["-ngl", "all", "--device", device]
    return ["-ngl", "all"] if has_gpu() else None


def run_job(n_ranks: int, words: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(
        [*launcher(n_ranks), *COMMAND, *words], capture_output=True, text=True, env=environment(), timeout=JOB_S
    )
    if done.returncode:
        raise click.ClickException(f"{' '.join(words)}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def figure(what: str, backend: str, n_ranks: int, found: dict[str, Any]) -> dict[str, Any]:
    timings = found["timings"]
    return {
        "what": what,
        "backend": backend,
        "ranks": n_ranks,
        "tpot_s": timings["tpot_s"],
        "ttft_s": timings["ttft_s"],
        "tokens_per_s": timings["predicted_per_second"],
    }


def batch(
    run: Callable[[Sequence[str]], dict[str, Any]], common: Sequence[str], tokens: int, requests: int, folder: Path
) -> dict[str, Any]:
    """Tokens a second of many texts at a time."""
    source, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{PROMPT} {i}", "seed": i}) + "\n" for i in range(requests)))
    answers.unlink(missing_ok=True)
    words = [
        "batch",
        str(source),
        "-o",
        str(answers),
        *common,
        "-md",
        "none",
        "-n",
        str(tokens),
        "--ignore-eos",
        "--json",
    ]
    summary = run([*words, "-np", str(requests)])
    return {"requests": requests, "tokens_per_s": summary["predicted_per_second"]}


# -- what there is at most


def limits(info: ModelInfo, device: str, bandwidth: float, found: dict[str, Any]) -> dict[str, Any]:
    """Of one text: how long the weights take to be read once, as they are kept, and the share of that speed; guesses
    share a reading, and may be faster."""
    if not found.get("tpot_s"):
        return {}
    backend = found.get("backend", "torch")
    if backend.startswith("torch"):
        n_bytes = weight_bytes(info, 0, info.n_layer, type_of(backend, device), device)
    else:
        n_bytes = weight_bytes(info, 0, info.n_layer, BF16)
    limit_s = n_bytes / bandwidth
    return {"limit_tpot_s": limit_s, "of_limit": limit_s / found["tpot_s"]}


def device_bandwidth(device: str) -> float:
    """Bytes a second that copies on the device read and write together, the best of some."""
    torch = load_torch()
    source = torch.ones((1 << 30 if device != "cpu" else 1 << 27), dtype=torch.uint8, device=device)
    target, found = torch.empty_like(source), []
    for _ in range(8):
        wait(torch, device)
        start_s = time.perf_counter()
        target.copy_(source)
        wait(torch, device)
        found.append(time.perf_counter() - start_s)
    return float(2 * source.numel() / np.min(found))


def wait(torch: Any, device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
