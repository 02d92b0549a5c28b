"""Say which file it was when a mapped file became shorter under a computing thread. Knows no model.

The kernel answers a read beyond the end of a mapped file with SIGBUS, in whatever thread computes. A handler of
Python's own would never run, as that thread cannot go on; one that the C library calls does. Linux only: elsewhere such
a death is reported by the watch alone.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pipeinfer.models.gguf.contents import CHANGED_WHILE_COMPUTING

SA_SIGINFO = 4
N_MASK_BYTES = 128
ADDRESS_AT = 16
"""Where in a siginfo_t, on 64-bit Linux, the address is that could not be read."""


class _Action(ctypes.Structure):
    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_char * N_MASK_BYTES),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


@contextlib.contextmanager
def report_bus_errors(fault: Callable[[str], object]) -> Iterator[None]:
    """Within the block a bus error ends in `fault(line)`, which does not return."""

    @_Handler
    def on_bus_error(number: int, info: int, context: int) -> None:
        try:
            address = ctypes.c_size_t.from_address(info + ADDRESS_AT).value
            fault(describe(file_at(address, Path("/proc/self/maps").read_text(errors="replace").splitlines())))
        finally:
            os._exit(1)

    if sys.platform != "linux" or sys.maxsize < 2**32:
        yield
        return
    sigaction, before = ctypes.CDLL(None).sigaction, _Action()
    action = _Action(ctypes.cast(on_bus_error, ctypes.c_void_p), b"", SA_SIGINFO, None)
    sigaction(int(signal.SIGBUS), ctypes.byref(action), ctypes.byref(before))
    try:
        yield
    finally:
        sigaction(int(signal.SIGBUS), ctypes.byref(before), None)


def describe(path: str) -> str:
    """The line about a file that cannot be read at a place that is mapped."""
    if path.startswith("/") and not path.startswith(("/memfd:", "/dev/shm/")):
        return f"{path} {CHANGED_WHILE_COMPUTING}"
    return f"memory for {path or 'a mapped file'} cannot be had; use more ranks, or a host with more free memory"


def file_at(address: int, maps: Iterable[str]) -> str:
    """The file that is mapped at an address, given the lines of /proc/PID/maps; "" if none is."""
    for line in maps:
        span, _, _, _, _, *path = line.split(maxsplit=5)
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            return path[0] if path else ""
    return ""
