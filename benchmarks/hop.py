"""What a hop costs: `mpirun -np 3 python benchmarks/hop.py`.

Sends one-row runs through real stage code with an instant model, and the same bytes round two rings of mpi4py, in
turns, and prints the median time of a hop of each and ratios. With more ranks than cores the rings, whose ranks wait
busily, say little.

In the bare ring a rank knows what comes. In the naive one it does not, as in the systems that SiPipe (section 5.3)
starts from: a message has name, shape and type of what follows; then a buffer is made and the bytes are received.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from pipeinfer.cluster.head_pipeline import HeadPipeline, HeadWaiter
from pipeinfer.cluster.stages.serve import Pipe, StageLoop
from pipeinfer.cluster.stages.stage import StageWorker
from pipeinfer.cluster.transport import Link
from pipeinfer.cluster.verdicts import decode_verdict, verdict_bytes
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, Opening, Row, Run
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.types import FloatArray

N_EMBD = 4096  # 16 KB of activations a row
N_ROUNDS, N_BLOCK = 40, 50


class InstantModel:
    """A StageModel that has its result ready."""

    n_embd = N_EMBD

    def __init__(self, is_last: bool) -> None:
        self.is_last = is_last
        self._result = np.zeros((1, 8 if is_last else N_EMBD), np.float32)

    def apply(self, ops: Sequence[KvOp]) -> None:
        pass

    def next_position(self, seq: int) -> int:
        return 0

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray:
        stop()
        return self._result


def ring(comm: MPI.Comm, buffer: np.ndarray) -> None:
    """One lap of blocking sends and receives."""
    rank, size = comm.rank, comm.size
    if rank == 0:
        comm.Send(buffer, 1)
        comm.Recv(buffer, size - 1)
    else:
        comm.Recv(buffer, rank - 1)
        comm.Send(buffer, (rank + 1) % size)


def naive_ring(comm: MPI.Comm, array: np.ndarray) -> None:
    """The same, each buffer behind a message that describes it."""
    rank, size = comm.rank, comm.size

    def send(found: np.ndarray, dest: int) -> None:
        comm.send({"hidden": (found.shape, found.dtype.str)}, dest)
        comm.Send(found, dest)

    def receive(source: int) -> np.ndarray:
        shape, dtype = comm.recv(source=source)["hidden"]
        found = np.empty(shape, dtype)
        comm.Recv(found, source)
        return found

    if rank == 0:
        send(array, 1)
        receive(size - 1)
    else:
        send(receive(rank - 1), (rank + 1) % size)


def main() -> None:
    link = Link()
    size, rank = link.size, link.rank
    ring_comm, buffer = link.comm.Dup(), np.zeros(4 * N_EMBD, np.uint8)
    following = rank + 1 if rank + 1 < size else None
    ring_s: list[float] = []
    naive_s: list[float] = []
    stage_s: list[float] = []
    for round_ in range(N_ROUNDS):
        for _ in range(N_BLOCK):
            start_s = time.perf_counter()
            ring(ring_comm, buffer)
            ring_s.append((time.perf_counter() - start_s) / size)
        for _ in range(N_BLOCK):
            start_s = time.perf_counter()
            naive_ring(ring_comm, buffer.view(np.float32).reshape(1, N_EMBD))
            naive_s.append((time.perf_counter() - start_s) / size)
        if rank:
            worker = StageWorker(InstantModel(following is None), time.perf_counter, rank == 1)
            pipe = Pipe(rank - 1, following, 64, N_EMBD)
            StageLoop(link.comm, pipe, worker, lambda outbox, ledger: None).run()
            continue
        pipeline = HeadPipeline(link.comm, range(1, size), None, verdict_bytes(64), decode_verdict)
        waiter = HeadWaiter(lambda: None, pipeline)
        for index in range(N_BLOCK):
            opens = {} if index else {0: Opening(SamplingParams(temp=0.0), 1)}
            start_s = time.perf_counter()
            pipeline.submit(Run(round_ * N_BLOCK + index + 1, [Row(0, 1, 0, (0,))], [], opens))
            while pipeline.poll() is None:
                waiter.wait([pipeline])
            stage_s.append((time.perf_counter() - start_s) / size)
        pipeline.shutdown()
    if rank == 0:
        bare, naive, ours = (1e6 * statistics.median(times) for times in (ring_s, naive_s, stage_s))
        times = f"a hop of the bare ring {bare:.1f} us, of the naive one {naive:.1f}, of stage code {ours:.1f}"
        print(f"{size} ranks, {4 * N_EMBD} bytes: {times}; {naive / bare:.2f} and {ours / bare:.2f} of the bare one")
    link.finalize()


if __name__ == "__main__":
    main()
