"""Process untrusted input in a child with limited time and memory. Does not know the work."""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.child import process_stat, python_command

N_TRIES = 2  # attempts, if the process is killed or stopped from outside
CHECK_EVERY_S = 1.0  # seconds between checks whether the process was stopped
START = "import os; os.nice(int(sys.argv[1])); from pipeinfer.child import answer_within; answer_within(*sys.argv[2:])"


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Seconds of a core, seconds, and bytes of memory. `niceness`: added to this process's, so that work which takes
    seconds leaves the cores to computation."""

    cpu_s: int = 5
    wall_s: float = 30.0
    n_bytes: int = 512 << 20
    niceness: int = 0


@dataclass(frozen=True)
class LimitedProcess:
    """`module`: its function `answer` takes a JSON object and returns one. Thread-safe."""

    module: str
    limits: ProcessLimits = ProcessLimits()
    ahead: list[subprocess.Popen[bytes]] = field(default_factory=list, compare=False, repr=False)

    def start_ahead(self) -> None:
        """Start the next process now: that takes longer than most work."""
        if not self.ahead:
            with contextlib.suppress(OSError):  # `ask` reports it
                self.ahead.append(self._start())

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer; or `error`: the limit that was exceeded; or `broken`: what is wrong with this host."""
        limits = self.limits
        for _ in range(N_TRIES):
            start_s = time.monotonic()
            try:
                with self._take() as process:
                    try:
                        output = _output(process, json.dumps(request).encode(), start_s + limits.wall_s)
                    finally:
                        process.kill()
                if output is None:
                    continue
                answer = json.loads(output)
            except subprocess.TimeoutExpired:
                return {"error": f"is not done after {limits.wall_s:g} s"}
            except OSError as error:
                return {"error": f"cannot be done: {error.strerror}"}
            except ValueError:
                # at its CPU limit the system kills it too, but not before
                if process.returncode == -signal.SIGKILL and time.monotonic() - start_s < limits.cpu_s:
                    continue
                # or it had no memory left to report an error
                return {"error": f"takes more than {limits.cpu_s} s or {limits.n_bytes >> 20} MiB"}
            return answer if isinstance(answer, dict) else {}
        reason = f"its process was killed or stopped, {N_TRIES} times; the host may be short of memory"
        return {"broken": f"is not done: {reason}"}

    def _take(self) -> subprocess.Popen[bytes]:
        try:
            return self.ahead.pop()
        except IndexError:
            return self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = python_command(START, self.limits.niceness, self.module, self.limits.cpu_s, self.limits.n_bytes)
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True)


def _output(process: subprocess.Popen[bytes], data: bytes, end_s: float) -> bytes | None:
    """The output of the process for this input; None if it was stopped from outside. Raises TimeoutExpired."""
    unsent: bytes | None = data
    while True:
        remaining_s = end_s - time.monotonic()
        try:
            return process.communicate(unsent, min(CHECK_EVERY_S, max(remaining_s, 0.0)))[0]
        except subprocess.TimeoutExpired:
            unsent = None
            if _is_stopped(process.pid):
                return None
            if remaining_s <= CHECK_EVERY_S:
                raise


def _is_stopped(pid: int) -> bool:
    return process_stat(pid)[:1] in (["T"], ["t"])
