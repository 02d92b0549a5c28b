"""Which rank this process is, before MPI starts: launchers say it in the environment. Knows no MPI."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from pipeinfer.errors import UserError

LAST_TO_LEAVE_S = 0.5
"""Open MPI adds a banner to a failing rank unless it is the last to end."""

LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

HYDRA_KILLS_S = 1.0
"""How long hydra has to kill a rank that asked for the job's end."""

HYDRA_FORWARDS_S = 0.3
"""How long hydra has to hand on what ranks have written; once it kills them it forgets the rest."""

HEAD_SPEAKS_S = 4.0
"""How long rank 0 has to say what is wrong before another rank does."""

RANK_AND_SIZE = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI's mpirun
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH2
    ("PMI_RANK", "PMI_SIZE"),  # hydra (MPICH, Intel MPI), srun --mpi=pmi2
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),  # srun --mpi=pmix
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # any srun
)
"""In order of trust: under mpirun inside `sbatch` or `salloc`, Slurm's variables describe the batch step."""


def rank_from_environment(environ: Mapping[str, str] | None = None) -> int:
    """This process's rank as its launcher gives it; 0 when there is no launcher."""
    return _rank_and_size(environ)[0]


def is_first_here() -> bool:
    """Whether this is the first rank on its host, as far as the launcher says."""
    return next((os.environ[name] == "0" for name in LOCAL_RANK if name in os.environ), True)


def n_ranks_here() -> int:
    """How many ranks are on this host, as far as the launcher says; else 1."""
    found = next((os.environ[name] for name in LOCAL_SIZE if name in os.environ), "")
    return int(found) if found.isdecimal() else 1


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return any(rank in os.environ and size in os.environ for rank, size in RANK_AND_SIZE)


def size_from_environment(environ: Mapping[str, str] | None = None) -> int:
    """The number of ranks as the launcher gives it; 1 when there is no launcher."""
    return _rank_and_size(environ)[1]


def check_size(n_ranks: int, environ: Mapping[str, str] | None = None) -> None:
    """Raises UserError when MPI sees this rank alone (`n_ranks` is 1) though its launcher started several.

    Each of them would do the whole job: the launcher and MPI do not speak the same protocol.
    """
    n_started = size_from_environment(environ)
    if n_ranks == 1 < n_started:
        raise UserError(
            f"{n_started} ranks were started, and MPI joined none of them to another; use the mpirun of the MPI that "
            "is installed here, or under Slurm srun --mpi=pmi2 (MPICH) or srun --mpi=pmix (Open MPI)"
        )


def exit_together(code: int) -> NoReturn:
    """End a job that all ranks leave here, with this exit code and without a word from the launcher.

    Either no rank has initialised MPI, or every rank has finalised it.
    """
    if rank_from_environment() > 0:
        leave(0)
    if code and size_from_environment() > 1:
        time.sleep(LAST_TO_LEAVE_S)
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process with all that it has written.

    Not by way of the interpreter's end: threads of libllama and MPI may still call into what that takes down. But
    through libc's: in an exit handler MPICH tells its launcher that the end is in order.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).exit(code)
    os._exit(code)


def end_job(code: int, abort: Callable[[int], object] | None = None) -> NoReturn:
    """End every rank at once with this exit code, without a word, at any moment: before, within and after MPI_Init.

    hydra takes the request from any of its ranks. Under other launchers `abort`, which is MPI's, ends the others, or
    the launcher does when this process ends, as Open MPI's, which has words of its own for an abort.
    """
    if (control := _hydra_socket()) is not None:
        time.sleep(HYDRA_FORWARDS_S)
        with contextlib.suppress(OSError):
            os.write(control, b"cmd=abort exitcode=%d\n" % code)
            time.sleep(HYDRA_KILLS_S)
    elif abort and "OMPI_COMM_WORLD_RANK" not in os.environ:
        abort(code)
    os._exit(code)


def fail_together(code: int, message: str) -> NoReturn:
    """End a job whose input is wrong with one line: as a rule every rank has found the same and rank 0 says it.

    A rank that finds what rank 0 does not, because its host has another version, speaks for itself.
    """
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
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/comm") as name:
        if name.read().startswith("hydra"):  # Slurm sets PMI_FD too and speaks version 2
            return int(number)
    return int(number) if "HYDI_CONTROL_FD" in os.environ else None


def _rank_and_size(environ: Mapping[str, str] | None) -> tuple[int, int]:
    environ = os.environ if environ is None else environ
    for rank_name, size_name in RANK_AND_SIZE:
        rank, size = environ.get(rank_name, ""), environ.get(size_name, "")
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return int(rank), int(size)
    return 0, 1
