"""MPI: messages in order between two ranks, and what all ranks do together. The only file that imports mpi4py. Knows
bytes, sources and tags; no run and no pipeline. Sends never block, receives are posted ahead, waits are polls."""

import contextlib
import ctypes
import math
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from pipeinfer.cluster.hosts.launch import is_alone
from pipeinfer.errors import JobError, UserError

try:
    import mpi4py

    mpi4py.rc(initialize=False, finalize=False)  # `Link` does both, without holding the interpreter's lock
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    # the error has a line for each searched place; a line about another library than MPI's own is more useful
    first, *others = str(error).splitlines() or [type(error).__name__]
    why = next((line for line in others if "libmpi" not in line or "No such file" not in line), first)
    raise UserError(
        f"no MPI library can be used ({why}); install one, as with pip install 'pipeinfer[mpich]', or load that of "
        "this site, as with module load mpich"
    ) from None

from pipeinfer.cluster.hosts.host import Host
from pipeinfer.cluster.idle import NO_PROGRESS, Idle, Progress
from pipeinfer.cluster.stages.pace import N_STAMP, Courier
from pipeinfer.cluster.wire import Buffer

T = TypeVar("T")

N_LOOKS, REST_S = 16, 5e-4
"""A test of a request lets MPI move one piece of each large message, of about 16 KB over TCP. After REST_S without one
a rank therefore tests N_LOOKS times: 1 MB takes 7 ms, instead of 47 ms with one test a millisecond."""

Comm: TypeAlias = MPI.Comm
MpiRequest: TypeAlias = MPI.Request
NOT_SENT = MPI.REQUEST_NULL
GPU_KINDS = ("cuda", "rocm", "hip")  # as Open MPI and MPICH name them in their queries
N_LOOKS_AWAKE, AWAKE_S = 1000, 0.2  # `wait_awake` does not sleep for so long


class Tag(IntEnum):
    PIPELINE = 1  # runs and the shutdown: what must keep its order shares this tag
    VERDICT = 2
    CANCEL = 3
    REPORT = 4  # a rank's progress while loading, its statistics at the end
    CLOCK = 5
    STREAM = 6
    NOTHING = 7  # never sent
    OUT_OF_BAND = 8  # the activations of the run before it, from a device's memory


class Outbox:
    """Sends that never block: each buffer is kept until its message is sent. `courier`: stamps them in paced jobs."""

    def __init__(self, comm: Comm, courier: Courier | None = None) -> None:
        self.comm, self.courier = comm, courier
        self._pending: deque[tuple[MPI.Request, Any]] = deque()
        self.n_runs = self.n_run_bytes = self.n_out_of_band = 0

    def send_run(self, message: Buffer, dest: int, out_of_band: Any = None) -> MPI.Request:
        """`out_of_band`: its activations in a device's memory, if they are there. Returns the request of `message`."""
        self.n_runs += 1
        self.n_run_bytes += message.nbytes
        request = self.send(message, dest, Tag.PIPELINE)
        if out_of_band is not None:
            self.n_out_of_band += 1
            self.n_run_bytes += out_of_band.nbytes
            self.send(out_of_band, dest, Tag.OUT_OF_BAND)
        return request

    def send(self, message: Any, dest: int, tag: Tag) -> MPI.Request:
        while self._pending and self._pending[0][0].Test():
            self._pending.popleft()
        if self.courier:
            message = self.courier.stamp(message, dest, tag is Tag.PIPELINE)
        request = self.comm.Isend([message, MPI.BYTE], dest, tag)
        self._pending.append((request, message))
        return request

    def take_counts(self) -> tuple[int, int, int]:
        """Since the last call: messages that carried a run, their bytes, and how many had activations out of band."""
        counts = self.n_runs, self.n_run_bytes, self.n_out_of_band
        self.n_runs = self.n_run_bytes = self.n_out_of_band = 0
        return counts

    def flush(self, idle: Idle) -> None:
        """Return when everything is sent."""
        while self._pending:
            idle.until(lambda: _is_done(self._pending[0][0]) or None)
            self._pending.popleft()


@dataclass(eq=False)
class Inbox:
    """Receives that are posted ahead, so that the next message arrives while this one is processed (SiPipe, section
    5.3). With `n_ahead` 0, for ablation studies, a receive is posted when a message's length is known. `courier`: holds
    messages back until they are due, in paced jobs. `allocate`: returns memory for so many bytes."""

    comm: Comm
    source: int
    tag: Tag
    n_bytes: int
    n_ahead: int = 2
    courier: Courier | None = None
    allocate: Callable[[int], Any] = lambda n_bytes: np.empty(n_bytes, np.uint8)

    def __post_init__(self) -> None:
        self.n_bytes += N_STAMP if self.courier else 0
        self._looked_s = -math.inf
        self._due_s: float | None = None  # of the oldest message, once it is here
        self._is_ready = False  # it is here, and due
        self._posted: deque[tuple[MPI.Request, Any]] = deque()
        self._reusable: deque[tuple[MPI.Request, Any]] = deque()
        for _ in range(self.n_ahead):
            self._post(self.allocate(self.n_bytes))

    def _post(self, buffer: Any) -> None:
        self._posted.append((self.comm.Irecv([buffer, MPI.BYTE], self.source, self.tag), buffer))

    def poll(self) -> Any:
        """The next message, or None; in memory that is the caller's until it is handed to `give_back`."""
        if not self.holds():
            return None
        self._is_ready, (_, buffer) = False, self._posted.popleft()
        if not self.n_ahead:
            return buffer
        if self._reusable and self._reusable[0][0].Test():
            self._post(self._reusable.popleft()[1])
        else:
            self._post(self.allocate(self.n_bytes))
        return buffer

    def holds(self) -> bool:
        """Whether `poll` would return a message."""
        if not self._posted and not self._post_unsized():
            return False
        if not self._is_ready:
            request, buffer = self._posted[0]
            self._is_ready = self._is_due(self.courier, request, buffer) if self.courier else self._has_come(request)
        return self._is_ready

    def _post_unsized(self) -> bool:
        """Post a receive for a message of unknown length. Returns False if none has come."""
        status = MPI.Status()
        message = next(filter(None, (self.comm.Improbe(self.source, self.tag, status) for _ in range(N_LOOKS))), None)
        if message is None:
            return False
        buffer = self.allocate(self.n_bytes)
        self._posted.append((message.Irecv([buffer[: status.Get_count(MPI.BYTE)], MPI.BYTE]), buffer))
        return True

    def _has_come(self, request: MPI.Request, status: MPI.Status | None = None) -> bool:
        n_looks = N_LOOKS if time.perf_counter() - self._looked_s > REST_S else 1
        has_come = _is_done(request, n_looks, status)
        self._looked_s = time.perf_counter()
        return has_come

    def _is_due(self, courier: Courier, request: MPI.Request, buffer: Buffer) -> bool:
        if self._due_s is None:
            status = MPI.Status()
            if not self._has_come(request, status):
                return False
            self._due_s = courier.due_s(buffer[: status.Get_count(MPI.BYTE)])
        if courier.clock() < self._due_s:
            return False
        self._due_s = None
        return True

    def give_back(self, buffer: Any, sent: MpiRequest = NOT_SENT) -> None:
        """Reuse the buffer once the message that is being sent from it, if any, is sent."""
        if len(self._reusable) < 4 and self.n_ahead:
            self._reusable.append((sent, buffer))

    def close(self, idle: Idle) -> None:
        """Cancel the receives that are still posted."""
        for request, _ in self._posted:
            request.Cancel()
        while self._posted:
            idle.until(lambda: _is_done(self._posted[0][0]) or None)
            self._posted.popleft()


def _is_done(request: MPI.Request, n_looks: int = N_LOOKS, status: MPI.Status | None = None) -> bool:
    return any(request.Test(status) for _ in range(n_looks))


def progress_between(comm: Comm, hosts: Iterable[Host]) -> Progress:
    """For ranks on these hosts. Within one host a test moves a whole message, so none is needed; none is possible if
    several threads must not call this MPI."""
    if len({host.name for host in hosts}) == 1 or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return NO_PROGRESS

    def look() -> None:
        with contextlib.suppress(MPI.Exception):  # the thread that waits for a message reports it
            comm.Iprobe(MPI.ANY_SOURCE, Tag.NOTHING)

    return Progress(look)


def abort(code: int) -> None:
    """End the other ranks at once, if MPI runs and there are any. MPI prints a line, and may crash in exit handlers."""
    if MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.Get_size() > 1:
        MPI.COMM_WORLD.Abort(code)


class Link:
    """This rank's connection to the others, and the collective steps before and after the pipeline runs. Every wait
    except MPI's own start and end is a poll: the rank leaves its cores to others while it waits, and its threads for
    signals and the watch can always run."""

    def __init__(self) -> None:
        """Start MPI: returns when every rank has called it."""
        # by ctypes, which releases the interpreter's lock: signals are handled while a rank is missing
        self._mpi = ctypes.CDLL(MPI.__file__)
        if not MPI.Is_initialized():
            if is_alone():  # else UCX listens on the network, for nobody
                os.environ.setdefault("UCX_TLS", "self")
            self._mpi.MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
            MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
        self._idle = Idle()
        self.comm, request = MPI.COMM_WORLD.Idup()
        self._wait(request)
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self._outgoing: list[MPI.Request] = []
        self._incoming: tuple[int, MPI.Request] | None = None

    def _wait(self, request: MPI.Request) -> None:
        self._idle.until(lambda: _is_done(request) or None)

    def wait_awake(self, request: MPI.Request) -> None:
        """Return when the request is complete; without sleep at first."""
        asleep_s = time.perf_counter() + AWAKE_S
        while not _is_done(request, N_LOOKS_AWAKE) and time.perf_counter() < asleep_s:
            pass
        self._wait(request)

    def send_awake(self, values: np.ndarray[Any, Any], rank: int) -> None:
        self.wait_awake(self.comm.Isend(values, rank, Tag.CLOCK))

    def receive_awake(self, values: np.ndarray[Any, Any], rank: int) -> None:
        """Into `values`, which `send_awake` of this rank sends."""
        self.wait_awake(self.comm.Irecv(values, rank, Tag.CLOCK))

    # -- what all ranks do together

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        pickled = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.empty(self.size, np.int64)
        self._wait(self.comm.Iallgather(np.array([len(pickled)], np.int64), sizes))
        values = np.empty(sizes.sum(), np.uint8)
        ends = np.cumsum(sizes)
        self._wait(self.comm.Iallgatherv(pickled, [values, (sizes.tolist(), (ends - sizes).tolist()), MPI.BYTE]))
        return [pickle.loads(part.data) for part in np.split(values, ends[:-1])]

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on every rank; on the others `value` does not count."""
        content = bytearray(pickle.dumps(value) if self.rank == 0 else b"")
        size = np.array([len(content)], np.int64)
        self._wait(self.comm.Ibcast(size))
        content.extend(bytes(size[0] - len(content)))
        self._wait(self.comm.Ibcast([content, MPI.BYTE]))
        return cast(T, pickle.loads(content))

    def agree(self, act: Callable[[], T]) -> T:
        """What `act` returns on rank 0, which alone calls it, on every rank. Raises JobError on all ranks if it raises
        UserError."""
        value, message = self.broadcast(_outcome(act) if self.rank == 0 else None)
        if message:
            raise JobError(message)
        return cast(T, value)

    def agree_all(self, act: Callable[[], T]) -> T:
        """What `act` returns on this rank. Raises JobError on all ranks, with the lowest rank's message, if it raises
        UserError on any."""
        value, message = _outcome(act)
        if first := next(filter(None, self.all_gather(message)), ""):
            raise JobError(first)
        return cast(T, value)

    # -- reports

    def report(self, value: object) -> None:
        """Send a value to rank 0 without waiting for its receipt."""
        self._outgoing = [request for request in self._outgoing if not request.Test()]
        self._outgoing.append(self.comm.isend(value, 0, Tag.REPORT))

    def next_report(self) -> tuple[int, Any] | None:
        """On rank 0: (rank, value) of a report, if one has come."""
        if self._incoming is None:
            status = MPI.Status()
            message = self.comm.improbe(MPI.ANY_SOURCE, Tag.REPORT, status)
            if message is None:
                return None
            self._incoming = status.Get_source(), message.irecv()
        rank, request = self._incoming
        for _ in range(N_LOOKS):
            has_come, value = request.test()
            if has_come:
                self._incoming = None
                return rank, value
        return None

    # -- the end

    def finalize(self) -> None:
        """End MPI in order with the others, so that the launcher sees no failure but the exit code."""
        for request in self._outgoing:
            self._wait(request)
        self._wait(self.comm.Ibarrier())  # wait for the last rank here, not within MPI_Finalize
        self._mpi.MPI_Finalize()


def _outcome(act: Callable[[], T]) -> tuple[T | None, str]:
    """(its result, "") or (None, the message of its UserError)."""
    try:
        return act(), ""
    except UserError as error:
        return None, str(error)


def is_gpu_aware() -> bool | None:
    """Whether this MPI reports that it sends from a GPU's memory; None if it does not report. MPI must be started."""
    library = ctypes.CDLL(MPI.__file__)
    asks = [getattr(library, f"MPIX_Query_{kind}_support", None) for kind in GPU_KINDS]
    answers = [bool(ask()) for ask in asks if ask is not None]
    return any(answers) if answers else None
