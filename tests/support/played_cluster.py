"""Clusters that are played: every rank is a thread with a clock of its own, which only evaluations advance, so that all
times are exact."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipeinfer.cluster.hosts.host import Host, Speed
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.planning.deploy import schedule_of
from pipeinfer.job.profiling.speeds import host_speeds, with_layer_times
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.llama.params import LlamaParams

WAIT_S = 60
REAL_CLOCK = time.monotonic


@dataclass
class Played:
    """A rank: where it runs and what it takes, in seconds. `faults`: loads of layers that fail, counted from 0."""

    host: Host
    s_per_byte: float
    gpu_s_per_byte: float = 0.0
    gpu_run_s: float = 0.0
    faults: Sequence[int] = ()
    now_s: float = 0.0
    n_runs: int = 0
    n_loads: int = 0
    told: list[str] = field(default_factory=list)


HERE = threading.local()
"""`rank`: the one that this thread plays, `number` its number, `ranks` all of the job."""


def played_clock() -> float:
    own: Played | None = getattr(HERE, "rank", None)
    return own.now_s if own else REAL_CLOCK()


def played_speed(n_threads: int) -> Speed:
    """Of the host of this thread's rank: what its first rank reaches."""
    first = next(rank for rank in HERE.ranks if rank.host.name == HERE.rank.host.name)
    return Speed(0.1 * n_threads / first.s_per_byte, n_threads / first.s_per_byte)


class PlayedStage:
    """Layers on the CPU or the GPU of the rank that loads them."""

    n_vocab, n_embd = 8, 4

    def __init__(self, file: SliceFile, params: LlamaParams, adapters: Sequence[object] = ()) -> None:
        self.own: Played = HERE.rank
        self.own.n_loads += 1
        on_gpu = params.n_gpu_layers != 0
        self.is_last = file.is_last
        self.s_per_byte = self.own.gpu_s_per_byte if on_gpu else self.own.s_per_byte / params.n_threads
        self.run_s = self.own.gpu_run_s if on_gpu else 1e-5
        self.layer_bytes = file.info.layer_bytes[file.first : file.last]
        self.output_bytes = file.info.output_bytes
        file.close()
        if self.own.n_loads - 1 in self.own.faults:
            raise UserError(f"no such device on {self.own.host.name}")

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        assert HERE.rank is self.own
        n_rows, context = len(batch.tokens), int(batch.positions[0])
        self.own.n_runs += 1
        self.own.now_s += self.run_s
        for index, n_bytes in enumerate(self.layer_bytes):
            self.own.now_s += n_bytes * self.s_per_byte * (0.9 + 0.1 * n_rows) + 1e-9 * n_rows * context
            if self.is_last or index + 1 < len(self.layer_bytes):
                stop()
        if self.is_last:
            self.own.now_s += self.output_bytes * self.s_per_byte * (0.8 + 0.2 * n_rows)
        return np.zeros((1, 1), np.float32)

    def apply(self, ops: Sequence[KvOp]) -> None: ...

    def close(self) -> None: ...


class PlayedLink:
    """Collectives among threads."""

    def __init__(self, size: int) -> None:
        self.size, self._values = size, [None] * size
        self._barrier = threading.Barrier(size, timeout=WAIT_S)

    @property
    def rank(self) -> int:
        number: int = HERE.number
        return number

    def all_gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def broadcast(self, value: Any) -> Any:
        return self.all_gather(value)[0]


@dataclass(frozen=True)
class Found:
    """What the ranks of a job found, the same on all of them, and what it took each of them."""

    hosts: Sequence[Host]
    speeds: Sequence[Speed]
    n_runs: list[int]
    took_s: list[float]


def job(ranks: Sequence[Played], options: RunOptions) -> Found:
    """What `plan` does before it plans, of which `run` does the first part."""
    link, hosts = PlayedLink(len(ranks)), [rank.host for rank in ranks]

    def part(number: int) -> tuple[Any, ...]:
        own = HERE.rank = ranks[number]
        HERE.number, HERE.ranks = number, ranks
        own.now_s, own.n_runs, own.n_loads = 0.0, 0, 0
        crew: Any = SimpleNamespace(link=link, watch=SimpleNamespace(describe=own.told.append), hosts=hosts)
        schedule, target = schedule_of(options, hosts), options.models.target
        timed = with_layer_times(crew, hosts, schedule, target, options.numerics) if schedule else hosts
        return timed, host_speeds(crew.link, hosts)

    with ThreadPoolExecutor(len(ranks)) as threads:
        everyone: list[Any] = list(threads.map(part, range(len(ranks)), timeout=WAIT_S))
    assert all(each == everyone[0] for each in everyone), "all ranks know the same"
    described, speeds = everyone[0]
    return Found(described, speeds, [rank.n_runs for rank in ranks], [round(rank.now_s, 2) for rank in ranks])
