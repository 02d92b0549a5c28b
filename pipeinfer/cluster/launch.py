"""Which rank this process is, before MPI starts: launchers say it in the environment. Knows no MPI."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import NoReturn

from pipeinfer.errors import UserError

LAST_TO_LEAVE_S = 0.5
"""Open MPI adds a banner to a failing rank unless it is the last to end."""

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
        sys.exit(0)
    if code and size_from_environment() > 1:
        time.sleep(LAST_TO_LEAVE_S)
    sys.exit(code)


def _rank_and_size(environ: Mapping[str, str] | None) -> tuple[int, int]:
    environ = os.environ if environ is None else environ
    for rank_name, size_name in RANK_AND_SIZE:
        rank, size = environ.get(rank_name, ""), environ.get(size_name, "")
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return int(rank), int(size)
    return 0, 1
