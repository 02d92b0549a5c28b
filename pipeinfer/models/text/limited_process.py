"""Work on what strangers give, in a process with little time and memory. Knows not what is done there."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.child import python_command

N_TRIES = 2
"""Of work whose process was killed by somebody else."""

START = "from pipeinfer.models.text.limited_child import main; main(*sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds of a core, seconds, and bytes of memory."""

    cpu_s: int = 5
    wall_s: float = 30.0
    n_bytes: int = 512 << 20


@dataclass(frozen=True)
class LimitedProcess:
    """`module`: has the function `answer`, which is given a JSON object and returns one. Threads may ask."""

    module: str
    limits: Limits = Limits()
    ahead: list[subprocess.Popen[bytes]] = field(default_factory=list, compare=False, repr=False)

    def start_ahead(self) -> None:
        """Start the next process now: that takes longer than most work does."""
        if not self.ahead:
            with contextlib.suppress(OSError):  # who asks will say so
                self.ahead.append(self._start())

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The answer. Else `error` says what is too much, or `broken` what is wrong with this host."""
        limits = self.limits
        for _ in range(N_TRIES):
            start_s = time.monotonic()
            try:
                with self._take() as process:
                    try:
                        said = process.communicate(json.dumps(asked).encode(), limits.wall_s)[0]
                    finally:
                        process.kill()
                found = json.loads(said)
            except subprocess.TimeoutExpired:
                return {"error": f"is not done after {limits.wall_s:g} s"}
            except OSError as error:
                return {"error": f"cannot be done: {error.strerror}"}
            except ValueError:
                # at its limit of time the system kills it too, but no sooner
                if process.returncode == -signal.SIGKILL and time.monotonic() - start_s < limits.cpu_s:
                    continue
                # or it could not even say that there is no memory left
                return {"error": f"takes more than {limits.cpu_s} s or {limits.n_bytes >> 20} MiB"}
            return found if isinstance(found, dict) else {}
        return {"broken": f"is not done: its process was killed, {N_TRIES} times; the host may be short of memory"}

    def _take(self) -> subprocess.Popen[bytes]:
        try:
            return self.ahead.pop()
        except IndexError:
            return self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = python_command(START, self.module, self.limits.cpu_s, self.limits.n_bytes)
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True)
