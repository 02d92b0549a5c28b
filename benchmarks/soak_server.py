"""Thousands of requests to a real server, some of them abandoned: every finished text is that of the request alone.

`python benchmarks/soak_server.py --requests 10000` starts `pipeinfer serve` on two ranks; plain, streamed and chats,
greedy and sampled, short and with long beginnings in common, with stop strings and penalties, from many clients at a
time. What was left behind is printed.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.serving import Served, growth, lines_of, sizes

N_DIFFERENT = 60
IDLE_S = 6.0  # until connections on which nothing is asked any more are closed


def request(number: int) -> tuple[str, dict[str, Any]]:
    """(path, what is asked)"""
    rng = random.Random(number)
    text = "def read_lines(path):\n    return " * rng.choice((1, 1, 1, 8, 30)) + "ab"[: number % 3]
    asked: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "seed": number, "temperature": rng.choice((0, 0.7, 1.2))}
    asked |= {"stop": rng.choice(("\n", "self", ")"))} if rng.random() < 0.2 else {}
    asked |= {"repeat_penalty": 1.2, "presence_penalty": 0.1} if rng.random() < 0.2 else {}
    if rng.random() < 0.15:
        said = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "y"},
        ]
        return "/v1/chat/completions", asked | {"messages": said[: rng.choice((1, 3))]}
    return "/v1/completions", asked | {"prompt": text}


def whole(http: httpx.Client, path: str, asked: dict[str, Any]) -> str:
    choice = http.post(path, json=asked).raise_for_status().json()["choices"][0]
    return str(choice.get("text") or choice.get("message", {}).get("content", ""))


def streamed(http: httpx.Client, path: str, asked: dict[str, Any], n_pieces: int) -> str | None:
    """None when it was left after so many pieces."""
    text = ""
    with http.stream("POST", path, json=asked | {"stream": True}) as answer:
        for number, line in enumerate(lines_of(answer.raise_for_status())):
            if number == n_pieces:
                return None
            choice = json.loads(line)["choices"][0] if line != "[DONE]" else {}
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


@click.command(help=__doc__)
@click.option("--requests", "n_requests", default=10_000, show_default=True)
@click.option("--clients", default=24, show_default=True)
@click.option("--abandoned", default=0.1, show_default=True, help="The share that is left before its end.")
def main(n_requests: int, clients: int, abandoned: float) -> None:
    with Served(2, ["--parallel", "16"]) as served:
        alone = [whole(served.http, *request(number)) for number in range(N_DIFFERENT)]
        before, start_s, local = sizes(served), time.monotonic(), threading.local()

        def ask(number: int) -> str:
            """What became of it."""
            if not hasattr(local, "http"):
                local.http = httpx.Client(base_url=served.url, timeout=60)
            rng = random.Random(-number)
            which, leaves = rng.randrange(N_DIFFERENT), rng.random() < abandoned
            path, asked = request(which)
            if leaves and rng.random() < 0.5:
                with contextlib.suppress(httpx.TimeoutException):
                    local.http.post(path, json=asked, timeout=rng.random() * 0.2)
                return "abandoned"
            if leaves or rng.random() < 0.5:
                text = streamed(local.http, path, asked, n_pieces=rng.randint(0, 5) if leaves else -1)
            else:
                text = whole(local.http, path, asked)
            assert text is None or text == alone[which], f"request {which}: {text!r} is not {alone[which]!r}"
            return "abandoned" if text is None else "finished"

        with ThreadPoolExecutor(clients) as pool:
            try:
                done = Counter(pool.map(ask, range(n_requests)))
            finally:
                pool.shutdown(cancel_futures=True)
        wall_s = time.monotonic() - start_s
        served.until(lambda: not served.http.get("/slots").json(), timeout_s=30)
        time.sleep(IDLE_S)
        print(f"{n_requests} requests in {wall_s:.0f} s, {clients} at a time: {done['finished']} finished, every text "
              f"that of the request alone, {done['abandoned']} abandoned")  # fmt: skip
        print(growth(before, sizes(served)))


if __name__ == "__main__":
    main()
