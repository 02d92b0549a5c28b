"""Start a real server: mpirun and `pipeinfer serve`, on a port that the kernel chooses."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from pipeinfer.cluster.hosts.launch import rank_from_environment, size_from_environment
from tests.support.jobs import COMMAND, descendants, start

LISTENS = "pipeinfer: listening on "


class Served:
    """A server that is ready. Leaving the block stops it, and checks that it ends in order. `by_pid`: its processes are
    those that the launcher starts."""

    def __init__(
        self, n_ranks: int, words: Sequence[str], timeout_s: float = 60, by_pid: bool = False, **client: Any
    ) -> None:
        command = ["serve", "--port", "0", "-t", "1", *words]
        self.job = start(n_ranks, command, warm=not by_pid, start_new_session=True)
        self.lines: list[str] = []
        self._found: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._found.get(timeout=timeout_s)
        assert self.url, self.errors
        self.http = httpx.Client(base_url=self.url, timeout=30, **client)

    @property
    def errors(self) -> str:
        return "".join(self.lines)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def _read(self) -> None:
        assert self.job.stderr
        for line in self.job.stderr:
            self.lines.append(line)
            if line.startswith(LISTENS):
                self._found.put(line.removeprefix(LISTENS).strip())
        self._found.put("")

    def signal(self, number: int) -> None:
        self.job.send_signal(number)

    def pid_of(self, rank: int) -> int:
        """Of a job of several ranks, by pid."""
        return next(pid for pid in descendants(self.job.pid) if rank_of(pid) == rank)

    def wait(self, timeout_s: float = 30) -> int:
        """Its exit code."""
        code = self.job.wait(timeout=timeout_s)
        self._reader.join(timeout=5)
        return code

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.http.close()
        try:
            if self.job.poll() is None:
                self.signal(signal.SIGINT)
                code = self.wait()
                assert kind or code == 130, (code, self.errors)
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.job.kill()
                self.job.wait(timeout=10)

    # -- what clients do

    def complete(self, **asked: Any) -> dict[str, Any]:
        """A completion, which must be served."""
        answer = self.http.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def text(self, **asked: Any) -> str:
        return str(self.complete(**asked)["choices"][0]["text"])

    def stream(self, **asked: Any) -> contextlib.AbstractContextManager[httpx.Response]:
        return self.http.stream("POST", "/v1/completions", json=asked | {"stream": True})

    def until(self, done: Any, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def rank_of(pid: int) -> int | None:
    """Of a process that is a rank of a server."""
    process = Path(f"/proc/{pid}")
    words, pairs = (process / "cmdline").read_bytes(), (process / "environ").read_bytes().decode().split("\0")
    environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    is_rank = b"\0serve\0" in words and size_from_environment(environ) > 1
    return rank_from_environment(environ) if is_rank and words.startswith(COMMAND[0].encode()) else None


def lines_of(answer: httpx.Response) -> Iterator[str]:
    """What the events of a stream say."""
    return (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))


def open_texts(http: httpx.Client, **more: Any) -> list[Any]:
    """What `/slots` says of texts that are open or wait."""
    slots: list[Any] = http.get("/slots?waiting=1", **more).json()
    return [slot for slot in slots if "id_task" in slot]


def sizes(served: Served) -> dict[int, tuple[int, int]]:
    """Of each process of the job, as `size`."""
    return {pid: size(pid) for pid in descendants(served.job.pid)}


def size(pid: int) -> tuple[int, int]:
    """(resident KiB, open files)."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)
    return resident, len(list(Path(f"/proc/{pid}/fd").iterdir()))


def growth(before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]]) -> str:
    """What became of the sizes of the processes that are in both, a line each."""
    return "\n".join(
        f"process {pid}: {before[pid][0] >> 10} -> {resident >> 10} MiB, {before[pid][1]} -> {n_files} files"
        for pid, (resident, n_files) in after.items()
        if pid in before
    )
