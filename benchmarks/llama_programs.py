"""Speeds of llama.cpp's own programs, as they print them, in tokens a second of decoding. Knows no pipeinfer.

`folder` has llama-completion, llama-speculative-simple, llama-batched-bench, llama-server and ggml-rpc-server, built
from the version that llama-cpp-python ships. Raises click.ClickException when a program fails or prints no speed.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import click
from streams import throughput

PROMPT = "Write a function that merges two sorted lists, and explain it."
EVAL = re.compile(r" eval time =.*?([\d.]+) tokens per second")
DECODED = re.compile(r"decoded .*?speed: *([\d.]+) t/s")
START_S = 30.0


def completion(folder: Path, target: Path, n_predict: int, n_threads: int, more: Sequence[str] = ()) -> float:
    words = [
        "-m",
        target,
        "-p",
        PROMPT,
        "-n",
        n_predict,
        "-t",
        n_threads,
        "--temp",
        0,
        "--ignore-eos",
        "-no-cnv",
        *more,
    ]
    return float(EVAL.findall(_output(folder / "llama-completion", words))[-1])


def speculative(folder: Path, target: Path, draft: Path, n_predict: int, n_threads: int) -> float:
    words = [
        "-m",
        target,
        "-md",
        draft,
        "-p",
        PROMPT,
        "-n",
        n_predict,
        "-t",
        n_threads,
        "--temp",
        0,
        "--spec-type",
        "draft-simple",
        "-c",
        1024,
    ]
    return float(DECODED.findall(_output(folder / "llama-speculative-simple", words))[-1])


def remote(folder: Path, target: Path, n_predict: int, n_servers: int) -> float:
    """llama-completion with all layers on servers of a thread each."""
    with _servers(folder / "ggml-rpc-server", n_servers) as addresses:
        return completion(folder, target, n_predict, 1, ["--rpc", ",".join(addresses), "-ngl", "99"])


def batched(folder: Path, target: Path, n_predict: int, n_threads: int, n_texts: int) -> float:
    """Of all texts together, in one cache."""
    words = ["-m", target, "-t", n_threads, "-npp", 32, "-ntg", n_predict, "-npl", n_texts, "-c", 512 * n_texts, "-kvu"]
    *_, last = (line for line in _output(folder / "llama-batched-bench", words).splitlines() if line.startswith("|"))
    return float(last.split("|")[8])


def served(folder: Path, target: Path, n_threads: int, prompts: Sequence[str], n_predict: int) -> float:
    """Of all streams together, from llama-server."""
    port, n_texts = _free_port(), len(prompts)
    words = ["-m", target, "-t", n_threads, "-np", n_texts, "-c", 512 * n_texts, "--port", port, "--no-webui"]
    with subprocess.Popen(
        [folder / "llama-server", *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            _await("llama-server", partial(urllib.request.urlopen, f"http://127.0.0.1:{port}/health", timeout=1))
            return throughput(port, prompts, n_predict)
        finally:
            server.kill()


def _output(program: Path, words: Sequence[object]) -> str:
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise click.ClickException(f"{program.name} {' '.join(map(str, words))}: {done.stderr[-2000:]}")
    return done.stdout + done.stderr


@contextlib.contextmanager
def _servers(program: Path, n: int) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        ports = [_free_port() for _ in range(n)]
        for port in ports:
            server = stack.enter_context(
                subprocess.Popen(
                    [program, "-p", str(port), "-t", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
            stack.callback(server.kill)
        for port in ports:
            _await("ggml-rpc-server", partial(socket.create_connection, ("127.0.0.1", port), 1))
        yield [f"127.0.0.1:{port}" for port in ports]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as own:
        return int(own.getsockname()[1])


def _await(program: str, connect: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    """Return once `connect` raises no OSError any more."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), connect():
            return
        time.sleep(0.1)
    raise click.ClickException(f"{program} is not ready within {START_S:.0f} s")
