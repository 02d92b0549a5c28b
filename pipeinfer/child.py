"""Programs and packages that are installed beside this Python; Python child processes: their command line, and work on
untrusted input in one with limited time and memory. Knows no model, no MPI and not the work."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeinfer.errors import HostFault
from pipeinfer.launchers import is_stopped

ROOT = str(Path(__file__).parents[1])
VERSION_TIMEOUT_S = 20.0


def python_command(code: str, *arguments: object) -> list[str]:
    """Run `code` with `arguments` as `sys.argv[1:]`, with this process's `sys.path`. The current directory, which `-c`
    and `-m` add, is left out: its `json.py` must not replace the standard library's."""
    paths = [path for path in sys.path if path]
    if ROOT not in paths:  # `python -m pipeinfer` in the source tree
        paths.insert(0, ROOT)
    return [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}\n{code}", *map(str, arguments)]


def is_open_mpi(mpirun: str = "") -> bool:
    """Whether an mpirun, ours by default, is Open MPI's."""
    words, nothing = [mpirun or own_program("mpirun"), "--version"], subprocess.DEVNULL
    try:
        done = subprocess.run(words, stdin=nothing, capture_output=True, timeout=VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"open mpi" in done.stdout.lower().replace(b"-", b" ")


def own_program(name: str) -> str:
    """A program that is installed beside this Python, by a path that is the same on a job's nodes; else its name."""
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else name


def package_version(package: str) -> str | None:
    """None: it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # takes a while

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def answer_within(module: str, cpu_s: str, n_bytes: str) -> None:
    """Read a JSON object from standard input, and write the answer of the module's function `answer`, within limits of
    seconds of a core and bytes of memory."""
    import resource
    from importlib import import_module

    work = import_module(module)  # before the request is read: the process may have been started ahead
    print(flush=True)  # what ends it from here on is the work
    request = json.load(sys.stdin)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)  # ends it at its limit of time; SIGKILL comes from outside
    limits = ((resource.RLIMIT_CPU, cpu_s, 1), (resource.RLIMIT_AS, n_bytes, 0), (resource.RLIMIT_CORE, 0, 0))
    for name, limit, more in limits:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (int(limit), int(limit) + more))
    json.dump(work.answer(request), sys.stdout)


N_TRIES = 2  # attempts, if the process is killed or stopped from outside
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # exit codes of a process that was ended from outside
HELPER = "a helper process on this host"
CHECK_EVERY_S = 1.0  # seconds between checks whether the process was stopped
START = "import os; os.nice(int(sys.argv[1])); from pipeinfer.child import answer_within; answer_within(*sys.argv[2:])"


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Seconds of a core, seconds, and bytes of memory. `wall_s` is for a process that waits for nothing: long, since
    hosts at work may leave it little of a core. `niceness`: added to this process's, so that work which takes seconds
    leaves the cores to computation."""

    cpu_s: int = 5
    wall_s: float = 120.0
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
        """The answer; or `error`: the limit that was exceeded, as it would be again. Raises HostFault."""
        limits = self.limits
        for _ in range(N_TRIES):
            start_s = time.monotonic()
            try:
                with self._take() as process:
                    output = _output(process, json.dumps(request).encode(), start_s + limits.wall_s)
                if output is None:
                    continue
                answer = json.loads(output)
            except TimeoutError:
                raise HostFault(f"{HELPER} is not done after {limits.wall_s:g} s") from None
            except OSError as error:
                raise HostFault(f"{HELPER} cannot be used: {error.strerror}") from None
            except ValueError:
                if process.returncode in KILLED or not output:
                    continue
                # or it had no memory left to report an error
                return {"error": f"takes more than {limits.cpu_s} s or {limits.n_bytes >> 20} MiB"}
            return answer if isinstance(answer, dict) else {}
        reason = "the host may be short of memory"
        raise HostFault(f"{HELPER} was killed, stopped or not started, {N_TRIES} times; {reason}")

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
    """The output of the process for this input; None if it was stopped from outside. It has ended then. Raises
    TimeoutError."""
    with ThreadPoolExecutor(1) as pool:  # `communicate` with a timeout loses what is unsent of its input
        output = pool.submit(process.communicate, data)
        try:
            while not wait([output], min(CHECK_EVERY_S, max(end_s - time.monotonic(), 0.0))).done:
                if is_stopped(process.pid):
                    return None
                if time.monotonic() >= end_s:
                    raise TimeoutError
            return output.result()[0]
        finally:
            process.kill()
