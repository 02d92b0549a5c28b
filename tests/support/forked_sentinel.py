"""The sentinel of a rank of the tests is forked from it: a Python of its own would import anew what a short job has."""

import os
import subprocess
import time
from typing import NoReturn

from pipeinfer.cluster.watch import sentinel, watch

HIGHEST_FILE = 4096


def fork_sentinels() -> None:
    """From now on, in this process."""
    watch.subprocess = _Subprocess  # type: ignore[assignment]


class _Forked:
    """In place of the Popen of the sentinel, in which nothing is imported anew."""

    def __init__(self, command: list[str], pass_fds: tuple[int, ...], **_: object) -> None:
        self.pid = os.fork()
        if not self.pid:
            _become(command[-1], *pass_fds)

    def wait(self, timeout: float) -> int:
        end_s = time.monotonic() + timeout
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("", timeout)
            time.sleep(0.001)
        return os.waitstatus_to_exitcode(ended[1])

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class _Subprocess:
    """In place of the module."""

    Popen, TimeoutExpired, DEVNULL = _Forked, subprocess.TimeoutExpired, subprocess.DEVNULL


def _become(arguments: str, link: int) -> NoReturn:
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1):
            os.dup2(nothing, number)
        os.closerange(3, link)
        os.closerange(link + 1, HIGHEST_FILE)
        sentinel.main(arguments)
    finally:
        os._exit(0)
