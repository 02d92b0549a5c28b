"""Programs and packages that are installed beside this Python; other processes; Python child processes: their command
line, and the side of a child that answers within limits. Knows no model and no MPI."""

import contextlib
import os
import stat
import subprocess
import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
VERSION_TIMEOUT_S = 20.0
LAUNCHERS = ("mpiexec", "mpirun", "prte", "orte", "hydra", "srun")
TERMINALS = ("/dev/pts/", "/dev/tty")


def python_command(code: str, *arguments: object) -> list[str]:
    """Run `code` with `arguments` as `sys.argv[1:]`, with this process's `sys.path`.

    The current directory, which `-c` and `-m` add, is left out: its `json.py` must not replace the standard library's.
    """
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


def process_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def launcher_at_terminal(number: int = 0) -> int:
    """The launcher on this host that started this process, and whose file descriptor `number` is a terminal, by default
    that where a user types; 0: there is none."""
    pid, launcher = os.getppid(), 0
    with contextlib.suppress(OSError, IndexError):
        while Path(f"/proc/{pid}/comm").read_text().startswith(LAUNCHERS):
            launcher = pid if is_terminal(pid, number) else 0
            pid = int(process_stat(pid)[1])
    return launcher


def is_terminal(pid: int, number: int) -> bool:
    """Whether a file descriptor of a process is a terminal. Raises OSError."""
    return os.readlink(f"/proc/{pid}/fd/{number}").startswith(TERMINALS)


def terminal_width(number: int) -> int:
    """Columns of the terminal that shows what is written to a file descriptor of this process, 1 or 2: its own, or the
    launcher's, which prints what comes from its pipe; 0: it is none, or unknown."""
    with contextlib.suppress(OSError, ValueError):
        if os.isatty(number):
            return int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(number).columns
        if stat.S_ISFIFO(os.fstat(number).st_mode) and (launcher := launcher_at_terminal(number)):
            terminal = os.open(f"/proc/{launcher}/fd/{number}", os.O_RDONLY | os.O_NOCTTY)
            try:
                return os.get_terminal_size(terminal).columns
            finally:
                os.close(terminal)
    return 0


def answer_within(module: str, cpu_s: str, n_bytes: str) -> None:
    """Read a JSON object from standard input, and write the answer of the module's function `answer`, within limits of
    seconds of a core and bytes of memory."""
    import json
    import resource
    from importlib import import_module

    work = import_module(module)  # before the request is read: the process may have been started ahead
    request = json.load(sys.stdin)
    limits = ((resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, n_bytes), (resource.RLIMIT_CORE, 0))
    for name, limit in limits:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (int(limit), int(limit)))
    json.dump(work.answer(request), sys.stdout)
