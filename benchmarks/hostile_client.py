"""One client asks what costs most, thousands of times: do others wait for it, does anything grow?

`python benchmarks/hostile_client.py --cases 10000` starts `pipeinfer serve`. Two clients stream, a third one asks for
`/health`; how long these wait is measured alone first, then beside the hostile client, which has an address of its own.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import click
import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.server_fuzz import faults_of
from tests.support.server_hostile import abuse
from tests.support.serving import Served, growth, lines_of, sizes

STREAM = {"prompt": "def read_lines(path):\n", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
N_STREAMS = 2
N_WARM_UP = 10


class Watched:
    """Clients that are served all the time. `waits_s`: what each wait of theirs took, by kind."""

    def __init__(self, served: Served) -> None:
        self.served, self.stop = served, threading.Event()
        self.waits_s: dict[str, list[float]] = {}
        self.begin()

    def begin(self) -> None:
        """Forget what was measured before."""
        self.waits_s = {"/health": [], "token": []}

    def ask_health(self) -> None:
        with httpx.Client(base_url=self.served.url, timeout=120) as client:
            while not self.stop.wait(0.02):
                start_s = time.monotonic()
                assert client.get("/health").status_code == 200
                self.waits_s["/health"].append(time.monotonic() - start_s)

    def stream(self) -> None:
        with httpx.Client(base_url=self.served.url, timeout=120) as client:
            while not self.stop.is_set():
                with client.stream("POST", "/v1/completions", json={**STREAM, "stream": True}) as answer:
                    last_s = time.monotonic()
                    for at, _ in enumerate(lines_of(answer)):
                        now_s = time.monotonic()
                        if at:  # the first token waits for a place
                            self.waits_s["token"].append(now_s - last_s)
                        last_s = now_s

    def show(self, name: str) -> None:
        for kind, waits_s in self.waits_s.items():
            p50, p99, p999 = (1e3 * np.percentile(waits_s, share) for share in (50, 99, 99.9))
            n_late = sum(wait_s > 0.1 for wait_s in waits_s)
            print(
                f"{name:8} {kind:8} {len(waits_s):7} waits: {p50:6.1f} ms (p50) {p99:6.1f} (p99) {p999:6.1f} (p99.9) "
                f"{1e3 * max(waits_s):6.1f} (longest), {n_late} above 100 ms",
                flush=True,
            )


def abuse_until(port: int, end_s: float, number: int) -> int | None:
    return abuse(port, number) if time.monotonic() < end_s else None


@click.command(help=__doc__)
@click.option("--cases", default=10_000, show_default=True)
@click.option("--first", default=0, show_default=True, help="The case to begin with.")
@click.option("--at-a-time", default=4, show_default=True, help="Cases of the hostile client.")
@click.option("--alone", "alone_s", default=30.0, show_default=True, help="Seconds without it.")
@click.option("--for", "limit_s", default=3600.0, show_default=True, help="Seconds with it at most.")
@click.option("--ranks", default=1, show_default=True)
@click.argument("words", nargs=-1)
def main(
    cases: int, first: int, at_a_time: int, alone_s: float, limit_s: float, ranks: int, words: tuple[str, ...]
) -> None:
    options = ["--parallel", "4", "--queue", "256", "-c", "2048", "--log-format", "none", *words]
    with Served(ranks, options) as served, ExitStack() as stack:
        watched = Watched(served)
        pool = stack.enter_context(ThreadPoolExecutor(N_STREAMS + 1))
        stack.callback(watched.stop.set)
        watching = [pool.submit(watched.ask_health), *(pool.submit(watched.stream) for _ in range(N_STREAMS))]
        list(map(lambda number: abuse(served.port, number), range(-N_WARM_UP, 0)))  # what is allocated once is there
        watched.begin()
        time.sleep(alone_s)
        watched.show("alone")
        watched.begin()
        before, begin_s = sizes(served), time.monotonic()

        ask = partial(abuse_until, served.port, begin_s + limit_s)
        with ProcessPoolExecutor(at_a_time, get_context("spawn")) as hostile:  # what it does is nobody else's wait
            found = Counter(status for status in hostile.map(ask, range(first, first + cases)) if status is not None)
        print(
            f"{found.total()} cases in {time.monotonic() - begin_s:.0f} s: "
            f"{', '.join(f'{n} times {status}' for status, n in sorted(found.items()))}"
        )
        watched.show("beside")
        watched.stop.set()
        for each in watching:
            each.result()
        print(growth(before, sizes(served)))
        assert faults_of(served) == "", faults_of(served)[:5000]


if __name__ == "__main__":
    main()
