"""End a Slurm step: srun leaves its tasks running when one of them has died. Standard library alone."""

import contextlib
import os
import subprocess

SCANCEL_TIMEOUT_S = 5.0


def end_step() -> None:
    """Kill all tasks of this process's step, if it is in one; this process may be killed too. Raises nothing."""
    step = os.environ.get("SLURM_STEP_ID")
    jobs = {value for name, value in os.environ.items() if name.startswith("SLURM_JOB_ID")}  # each group is a job
    if step and jobs:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                ["scancel", "--signal=KILL", *(f"{job}.{step}" for job in jobs)], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=SCANCEL_TIMEOUT_S,
            )  # fmt: skip
