"""Thousands of clients that err, lie, leave and dawdle against a real server: no fault, no leak, no other is stalled.

`python benchmarks/fuzz_server.py --cases 10000` starts `pipeinfer serve` on two ranks, and asks all the time, beside
the noise, for a text with a seed, which must always be the same. Names the case that goes wrong.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.server_fuzz import faults_of, run_case
from tests.support.serving import Served, growth, sizes

PROBE = {"prompt": "def read_lines(path):\n", "max_tokens": 12, "seed": 5}


def probe(served: Served, text: str, stop: threading.Event, times_s: list[float]) -> None:
    while not stop.is_set():
        start_s = time.monotonic()
        assert served.text(**PROBE) == text, "another text"
        times_s.append(time.monotonic() - start_s)
        time.sleep(0.1)


def run_cases(served: Served, numbers: Iterable[int], n_clients: int) -> Counter[str]:
    """How many there were of each kind. The first that goes wrong ends them all."""
    with ThreadPoolExecutor(n_clients) as pool:
        try:
            return Counter(pool.map(lambda number: run_case(served, number), numbers))
        finally:
            pool.shutdown(cancel_futures=True)


@click.command(help=__doc__)
@click.option("--cases", default=10_000, show_default=True)
@click.option("--first", default=0, show_default=True, help="The case to begin with.")
@click.option("--clients", default=24, show_default=True, help="Clients at a time.")
def main(cases: int, first: int, clients: int) -> None:
    options = ["--parallel", "8", "--queue", "16", "--timeout", "5", "--log-format", "none"]
    with Served(2, options) as served, ThreadPoolExecutor(1) as beside:
        text, stop, times_s = served.text(**PROBE), threading.Event(), list[float]()
        list(map(lambda number: run_case(served, number), range(-50, 0)))  # what is allocated once is there
        before, start_s = sizes(served), time.monotonic()
        probing = beside.submit(probe, served, text, stop, times_s)
        try:
            kinds = run_cases(served, range(first, first + cases), clients)
        finally:
            stop.set()
        wall_s = time.monotonic() - start_s
        probing.result()
        served.until(lambda: not served.http.get("/slots").json(), timeout_s=30)
        time.sleep(6)  # until what fell silent is cut off
        after = sizes(served)
        assert served.text(**PROBE) == text
        print(f"{cases} cases in {wall_s:.0f} s, 0 faults: {', '.join(f'{n} {kind}' for kind, n in kinds.items())}")
        p50, p99 = np.percentile(times_s, (50, 99))
        print(f"{len(times_s)} probes, all the same text; {p50:.2f} s (p50), {p99:.2f} s (p99)")
        print(growth(before, after))
        assert faults_of(served) == "", faults_of(served)[:5000]


if __name__ == "__main__":
    main()
