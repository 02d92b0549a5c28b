"""This process's rank before MPI starts, from the launcher's environment; how ranks end. Knows no MPI."""

import contextlib
import ctypes
import fcntl
import os
import stat
import sys
import termios
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from pipeinfer.errors import UserError

LAST_TO_LEAVE_S = 0.5  # Open MPI prints a banner for a failing rank unless it is the last to end
LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
LAUNCHER_PREFIXES = ("PMI", "PALS_", "ALPS_", "MPI_LOCAL", "SLURM_STEP", "FLUX_TASK")  # of any launcher's variables
HYDRA_KILLS_S = 1.0  # time for hydra to kill a rank that asked for the end of the job
HYDRA_FORWARDS_S, HYDRA_BUSY_S = 0.3, 0.5
"""Time for hydra to forward what ranks have written, since it drops the rest when it kills them; more of it while this
rank's pipes have unread bytes."""

LOOK_EVERY_S = 0.01
SHOW_CURSOR = b"\x1b[?25h"
HEAD_SPEAKS_S = 4.0  # time for rank 0 to report an error before another rank does

RANK_AND_SIZE = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI's mpirun
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH2
    ("PMI_RANK", "PMI_SIZE"),  # hydra (MPICH, Intel MPI), srun --mpi=pmi2
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),  # srun --mpi=pmix
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # any srun
)
"""In order of precedence: under mpirun inside `sbatch` or `salloc`, Slurm's variables describe the batch step."""


def rank_from_environment(environ: Mapping[str, str] | None = None) -> int:
    """This process's rank by its launcher; 0 if there is none."""
    return place_from_environment(os.environ if environ is None else environ)[0]


def is_first_here() -> bool:
    """Whether this is the first rank on its host; True if the launcher does not say."""
    return next((os.environ[name] == "0" for name in LOCAL_RANK if name in os.environ), True)


def n_ranks_here() -> int:
    """The number of ranks on this host; 1 if the launcher does not say."""
    size = next((os.environ[name] for name in LOCAL_SIZE if name in os.environ), "")
    return int(size) if size.isdecimal() else 1


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return any(rank in os.environ and size in os.environ for rank, size in RANK_AND_SIZE)


def is_by_open_mpi() -> bool:
    """Whether Open MPI's launcher started this process."""
    return "OMPI_COMM_WORLD_RANK" in os.environ


def is_alone() -> bool:
    """Whether the launcher has started one rank; False where there may be a launcher that is not known."""
    is_known = is_launched() or not any(name.startswith(LAUNCHER_PREFIXES) for name in os.environ)
    return is_known and size_from_environment() == 1


def size_from_environment(environ: Mapping[str, str] | None = None) -> int:
    """The number of ranks by the launcher; 1 if there is none."""
    return place_from_environment(os.environ if environ is None else environ)[1]


def check_size(n_ranks: int, environ: Mapping[str, str] | None = None) -> None:
    """Raises UserError when MPI has one rank (`n_ranks` is 1) though the launcher started several. Each of them would
    do the whole job: the launcher and MPI use different protocols."""
    n_started = size_from_environment(environ)
    if n_ranks == 1 < n_started:
        raise UserError(
            f"{n_started} ranks were started, and MPI joined none of them to another; use the mpirun of the MPI that "
            "is installed here, or under Slurm srun --mpi=pmi2 (MPICH) or srun --mpi=pmix (Open MPI)"
        )


def exit_together(code: int) -> NoReturn:
    """End this rank of a job that all ranks leave, with this exit code and without a message of the launcher. Either no
    rank has initialised MPI, or every rank has finalised it."""
    if rank_from_environment() > 0:
        leave(0)
    if code and size_from_environment() > 1:
        time.sleep(LAST_TO_LEAVE_S)
    leave(code)


def leave(code: int) -> NoReturn:
    """Flush all output and end this process. It skips the interpreter's shutdown, because threads of libllama and MPI
    may still call Python, but runs libc's exit handlers, in which MPICH tells its launcher that the end is in order."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).exit(code)
    os._exit(code)


def end_job(code: int, abort: Callable[[int], object] | None = None) -> NoReturn:
    """End every rank at once with this exit code and without a message, before, within or after MPI_Init. hydra takes
    the request from any of its ranks. Under other launchers MPI's `abort` ends the others. Open MPI's launcher does so
    when this process ends, without the lines that it prints for an abort."""
    if (control := _hydra_socket()) is not None:
        time.sleep(HYDRA_FORWARDS_S)
        end_s = time.monotonic() + HYDRA_BUSY_S
        while any(map(_has_unread, (1, 2))) and time.monotonic() < end_s:
            time.sleep(LOOK_EVERY_S)
        with contextlib.suppress(OSError):
            os.write(control, b"cmd=abort exitcode=%d\n" % code)
            time.sleep(HYDRA_KILLS_S)
    elif abort and not is_by_open_mpi():
        abort(code)
    os._exit(code)


def _has_unread(number: int) -> bool:
    """Whether a file descriptor of this process is a pipe with bytes that its reader has not taken."""
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(number).st_mode):
            n_bytes = fcntl.ioctl(number, termios.FIONREAD, bytes(4))
            return any(n_bytes)
    return False


def show_cursor() -> None:
    """A progress bar may have hidden it."""
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, SHOW_CURSOR)


def fail_together(code: int, message: str) -> NoReturn:
    """End a job with wrong input with one line. Usually every rank finds the same error, and rank 0 prints it. A rank
    prints an error that rank 0 does not find, for instance because its host has another version."""
    rank, by_hydra = rank_from_environment(), _hydra_socket() is not None
    if rank > 0 and not by_hydra:
        leave(0)
    if rank > 0:
        time.sleep(HEAD_SPEAKS_S)  # rank 0's end is this one's
        message = f"rank {rank} (host {os.uname().nodename}): {message}"
    print(f"pipeinfer: {' '.join(message.split())}", file=sys.stderr, flush=True)
    if by_hydra:
        end_job(code)
    exit_together(code)


def _hydra_socket() -> int | None:
    """The socket over which hydra (MPICH, Intel MPI) takes requests of the PMI protocol, version 1."""
    number = os.environ.get("PMI_FD", "")
    if not number.isdecimal():
        return None
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/comm", errors="replace") as name:
        if name.read().startswith("hydra"):  # Slurm sets PMI_FD too and speaks version 2
            return int(number)
    return int(number) if "HYDI_CONTROL_FD" in os.environ else None


def place_from_environment(environ: Mapping[str, str]) -> tuple[int, int, str]:
    """(rank, number of ranks, the variable that has the rank); (0, 1, "") if there is no launcher."""
    for rank_name, size_name in RANK_AND_SIZE:
        rank, size = environ.get(rank_name, ""), environ.get(size_name, "")
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return int(rank), int(size), rank_name
    return 0, 1, ""
