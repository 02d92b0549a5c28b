"""A session with the agent on one host, opened as the launcher would open it. Knows no check."""

import contextlib
import fcntl
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeinfer.job.doctor.agent import MARK

CONNECT_S = 8.0  # for a host's system to take the connection: it is tried four times, in 7 s
SILENT_S, LIMIT_S = 20.0, 120.0  # the longest between two signs of a host, as lines of ssh's log, and in all
FACTS_S = 60.0  # the longest between two facts: kernels that are tried first take some seconds
CLOSE_S, LOOK_S = 1.0, 0.5  # how long an agent may take to end; between looks whether an answer is late
PIPE_BYTES = 1 << 18
"""More than is sent to a host before it answers: writing to one that hangs does not wait. A user's pipes together may
be refused more than 64 MiB."""

LINE_BYTES, ERROR_BYTES = 1 << 20, 4000  # the longest line of an answer, and what is kept of errors
BOOT = "import sys,json;exec(json.loads(sys.stdin.readline()))"
FIND_PYTHON = (
    f'echo \'{MARK.strip()} {{"line": ""}}\'; '
    f'for p in "$@"; do command -v "$p" >/dev/null 2>&1 && "$p" -S -u -c "{BOOT}" && exit; done; '
    f'echo "{MARK.strip()} {{}}"'
)
"""The shell's part. An answer before any request: there is no Python."""

OTHER_PYTHONS = ("python3", "/usr/bin/python3", "/usr/local/bin/python3", "python")
OPTIONS = ("BatchMode=yes", f"ConnectTimeout={SILENT_S:.0f}", "ServerAliveInterval=10", "ServerAliveCountMax=3")
LOG = (b"debug1: ", b"OpenSSH_", b"Authenticated to ", b"Transferred: ", b"Bytes per second: ")
"""How lines of `ssh -v` begin."""

CONNECTING, CONNECTED = b"debug1: Connecting to ", b"debug1: Connection established"
GREETED = b"debug1: Remote protocol version"
STEPS = (CONNECTING, CONNECTED, GREETED)
MOST_CHARACTERS = 37  # of a folder for sockets: with the names in it, and what ssh adds, a socket's path has up to 107
AGENT_VARIABLES = {"mpich": "HYDRA_LAUNCHER_EXEC", "openmpi": "OMPI_MCA_plm_rsh_agent"}  # what names a launcher's ssh


class NoAnswer(Exception):
    """The session has no answer. `code`: of the program that carries it; None: the time is over. `errors`: what it
    wrote. `step`: of STEPS, how far ssh came, if it says so."""

    def __init__(self, code: int | None, errors: str, step: bytes = b"") -> None:
        super().__init__(errors)
        self.code, self.errors, self.step = code, errors, step


@contextmanager
def one_connection(launcher: str) -> Iterator[Mapping[str, str]]:
    """The environment in which sessions and the launcher share a connection to each host: keys are agreed upon once,
    which takes both ends 0.15 s of a core. Unchanged where the launcher does not use ssh, the user chose its ssh, or no
    file can be made."""
    name, ssh = AGENT_VARIABLES.get(launcher, ""), shutil.which("ssh")
    with contextlib.ExitStack() as files:
        environ: Mapping[str, str] = os.environ
        with contextlib.suppress(OSError):
            if name and name not in os.environ and ssh:
                is_long = len(tempfile.gettempdir()) > MOST_CHARACTERS
                new_folder = tempfile.TemporaryDirectory("", "pi-", "/tmp" if is_long else None, True)
                folder = files.enter_context(new_folder)
                script = Path(folder, "ssh")
                words = shlex.join([ssh, "-oControlMaster=auto", f'-oControlPath="{folder}/%C"'])
                script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
                script.chmod(0o700)
                environ = os.environ | {name: str(script)} if os.access(script, os.X_OK) else environ
        yield environ


def remote_words(launcher: str, host: str, is_here: bool, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The command line that starts the agent on `host`."""
    words = ["sh", "-c", FIND_PYTHON, "sh", sys.executable, *OTHER_PYTHONS]
    if launcher == "srun":
        return ["srun", "--overlap", "--unbuffered", "-N1", "-n1", "-w", host, *words]
    if is_here:
        return words
    agent = environ.get(AGENT_VARIABLES[launcher], "")
    first = agent.partition(":")[0] if launcher == "openmpi" else agent  # of Open MPI's choices
    ssh = shlex.split(first) or ["ssh"]
    is_ssh = os.path.basename(ssh[0]) == "ssh"
    options = ["-v", *(f"-o{option}" for option in OPTIONS)] if is_ssh else []
    return [*ssh, "-x", *options, host, shlex.join(words)]


class HostSession:
    """One request at a time. A thread reads the answers, so that no host holds up another."""

    def __init__(self, words: Sequence[str]) -> None:
        """Raises NoAnswer where the first word is no program."""
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise NoAnswer(127, f"{words[0]}: {error.strerror}") from None
        assert self._process.stdin
        with contextlib.suppress(OSError, AttributeError):  # another system has none, or it is too much
            fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._lines = queue.SimpleQueue[bytes]()
        self._errors, self._step, self._heard_s = b"", b"", time.monotonic()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()
        self._send(Path(__file__).with_name("agent.py").read_text())

    def ask(
        self,
        action: str,
        wait_s: float = SILENT_S,
        on_line: Callable[[str], object] = lambda line: None,
        most_s: float = LIMIT_S,
        **values: Any,
    ) -> dict[str, Any]:
        """The agent's answer; `on_line`: takes the lines of a program that it runs. Raises NoAnswer, also after
        `wait_s` without a sign of the host, and after `most_s`."""
        self._send({"do": action, **values})
        self._heard_s = start_s = time.monotonic()
        while True:
            now_s, least_s = time.monotonic(), CONNECT_S if self._step == CONNECTING else wait_s
            end_s = min(self._heard_s + least_s, start_s + most_s)
            try:
                line = self._lines.get(timeout=min(LOOK_S, max(0.0, end_s - now_s)))
            except queue.Empty:
                if now_s >= end_s:
                    raise NoAnswer(None, self.errors, self._step) from None
                continue
            if not line:
                self._lines.put(b"")  # for the next request
                code = self._end()
                self._threads[1].join(1)
                raise NoAnswer(code, self.errors)
            answer = _answer(line)
            if answer is None:
                continue
            if "line" in answer:
                on_line(answer["line"])
            elif "error" in answer:
                raise NoAnswer(1, str(answer["error"]))
            else:
                return answer

    @property
    def errors(self) -> str:
        return self._errors.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """The agent ends with its input; what does not is killed, on this host."""
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._end()

    def _end(self) -> int:
        """Its exit code."""
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(CLOSE_S)
            self._process.kill()
        return -signal.SIGKILL

    def _send(self, value: Any) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError):  # it has ended, which the reader finds out
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout
        while line := self._process.stdout.readline(LINE_BYTES):
            self._heard_s = time.monotonic()
            self._lines.put(line)
        self._lines.put(b"")

    def _read_errors(self) -> None:
        assert self._process.stderr
        while line := self._process.stderr.readline(ERROR_BYTES):
            self._heard_s = time.monotonic()
            self._step = next((step for step in STEPS if line.startswith(step)), self._step)
            if not line.startswith(LOG):
                self._errors = (self._errors + line)[-ERROR_BYTES:]


def _answer(line: bytes) -> dict[str, Any] | None:
    """None: a line of a login script, or one that was cut."""
    if not line.startswith(MARK.encode()):
        return None
    with contextlib.suppress(ValueError):
        answer = json.loads(line[len(MARK) :])
        return answer if isinstance(answer, dict) else None
    return None
