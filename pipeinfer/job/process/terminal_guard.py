"""The process that sets a terminal so that Ctrl-C and Ctrl-Z are keys like others, and sets it back whatever ends.

It runs in a session of its own, which no launcher kills, and imports the standard library alone. Knows no job.
"""

import contextlib
import os
import select
import signal
import termios
from pathlib import Path
from typing import Any

SUSPEND = b"s"
"""What is said on standard input for a Ctrl-Z. Its end is that of the process that started this one."""

LOOK_S = 0.1
LFLAG, CC = 3, 6
OFF = b"\0"


def guard(terminal: int, reader: int) -> None:
    """Until standard input ends. `reader`: the process that reads the terminal. The keys of Ctrl-C and Ctrl-Z are
    written to standard output once the terminal is set."""
    with contextlib.suppress(termios.error):  # the terminal is gone
        _guard(terminal, reader)


def _guard(terminal: int, reader: int) -> None:
    before, ours, is_said = termios.tcgetattr(terminal), None, False
    while True:
        # a shell sets the terminal when the job is suspended, and again when it goes on
        if (found := termios.tcgetattr(terminal)) != ours and _has_terminal(reader):
            if found[LFLAG] & termios.ICANON:  # else only a part of ours was changed
                before = found
            termios.tcsetattr(terminal, termios.TCSANOW, _all_keys(found))
            ours = termios.tcgetattr(terminal)
        if not is_said:
            is_said = True
            with contextlib.suppress(OSError):  # who started this is gone: standard input ends too
                os.write(1, b"".join(before[CC][key] for key in (termios.VINTR, termios.VSUSP)))
        if not select.select([0], [], [], LOOK_S)[0]:
            continue
        said = os.read(0, 1)
        if said and not _can_go_on(reader):
            continue
        if termios.tcgetattr(terminal) == ours:  # else a shell has it already
            termios.tcsetattr(terminal, termios.TCSANOW, before)
        if not said:
            return
        _suspend(reader)


def _all_keys(attributes: list[Any]) -> list[Any]:
    found = [*attributes]
    found[LFLAG] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)  # ISIG stays: Ctrl-\ kills
    found[CC] = [*attributes[CC]]
    for number, value in ((termios.VINTR, OFF), (termios.VSUSP, OFF), (termios.VMIN, 1), (termios.VTIME, 0)):
        found[CC][number] = value
    return found


def _can_go_on(pid: int) -> bool:
    """Whether a process is a shell's job: nobody else would let it go on once it is suspended."""
    with contextlib.suppress(OSError):
        return os.getpgid(pid) != os.getsid(pid)
    return False


def _suspend(pid: int) -> None:
    """Its ranks go on: with SIGTSTP Open MPI's launcher would stop them, and not itself."""
    with contextlib.suppress(OSError):
        os.killpg(os.getpgid(pid), signal.SIGSTOP)


def _has_terminal(pid: int) -> bool:
    """Whether a process runs, and in the foreground of its terminal if it has one."""
    try:
        state, _, group, _, _, foreground, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return False
    return state not in "TZX" and foreground in (group, "-1")
