"""What engine and scheduler cost a run: requests that are answered at once, so that nothing else takes time.

`python benchmarks/engine.py` prints microseconds of processor time a run, for a growing number of open requests and of
stages, so that runs have about as many rows as named.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

from pipeinfer.core.engine import Engine
from pipeinfer.core.levels import Level
from pipeinfer.core.requests import Request
from pipeinfer.core.run_cost import RunCost
from pipeinfer.core.runs import Run, Verdict
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.policies import Iterative

N_TOKENS = 200


class InstantPipeline:
    """Answers a run when the engine has nothing else to do, in the order of submission."""

    def __init__(self, n_stages: int) -> None:
        self.n_stages, self.is_at_head = n_stages, False
        self.n_runs = self.n_rows = self.n_ready = 0
        self._runs: deque[Run] = deque()

    def submit(self, run: Run) -> None:
        self._runs.append(run)
        self.n_runs += 1
        self.n_rows += len(run.rows)

    def poll(self) -> Verdict | None:
        if not self.n_ready:
            return None
        self.n_ready -= 1
        run = self._runs.popleft()
        return Verdict(run.id, (7,) * len(run.rows), slowest_s=1e-9)

    def cancel(self, run_ids: Sequence[int]) -> None:
        raise AssertionError("nothing is guessed here")

    def prune(self, rows: Mapping[int, Sequence[int]]) -> None:
        raise AssertionError("nothing is guessed here")


class Waiter:
    def wait(self, pipelines: Sequence[InstantPipeline], timeout_s: float | None = None) -> None:
        pipelines[0].n_ready = 1


def measure(n_requests: int, n_stages: int) -> tuple[float, float]:
    """(microseconds a run, rows a run)."""
    pipeline = InstantPipeline(n_stages)
    pool = SequencePool(n_requests, n_requests * (N_TOKENS + 2))
    engine = Engine(Level(pipeline, pool), None, Waiter(), time.perf_counter, run_cost=RunCost({1: 1e-9, 8: 1e-9}))
    for request_id in range(n_requests):
        engine.add(Request(request_id, [1], N_TOKENS, SamplingParams(temp=0.0), N_TOKENS + 2), Iterative())
    start_s = time.process_time()
    engine.complete()
    return 1e6 * (time.process_time() - start_s) / pipeline.n_runs, pipeline.n_rows / pipeline.n_runs


def main() -> None:
    for n_requests, n_stages in ((1, 1), (8, 8), (8, 1), (64, 8), (64, 4), (64, 2), (256, 32)):
        found = [measure(n_requests, n_stages) for _ in range(3)]
        us, rows = min(found)
        costs = f"{us:6.1f} us a run of {rows:.1f} rows, {us / rows:.1f} a row"
        print(f"{n_requests:4} requests, {n_stages:2} stages: {costs}")


if __name__ == "__main__":
    main()
