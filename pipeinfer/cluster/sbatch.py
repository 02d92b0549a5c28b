"""Slurm's commands: submit a script, query its job. Knows nothing of what a job does."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.errors import UserError

TIMEOUT_S = 60.0

ENDED = frozenset({
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobState:
    """`name`: Slurm's; empty once Slurm has forgotten the job. `reason`: why it waits or ended. `code`, `signal`: how
    it ended."""

    name: str
    reason: str = ""
    code: int = 0
    signal: int = 0

    @property
    def ended(self) -> bool:
        return not self.name or self.name in ENDED


def submit_script(script: Path) -> str:
    """The job's id. Raises UserError with what sbatch says."""
    said = _ask("sbatch", "--parsable", str(script)).strip()
    job = said.partition(";")[0]
    if not job.isdecimal():
        raise UserError(f"sbatch gave no job's number but {said!r}")
    return job


def job_state(job: str) -> JobState:
    """Raises UserError when Slurm does not answer."""
    try:
        about = _ask("scontrol", "--oneliner", "show", "job", job)
    except UserError as error:
        if "Invalid job id" in str(error):
            return JobState("")
        raise
    first = about.partition("\n")[0]  # of a heterogeneous job the leader, which runs the script
    values = dict(re.findall(r"(\w+)=(\S*)", first))
    code, _, number = values.get("ExitCode", "0:0").partition(":")
    reason = values.get("Reason", "")
    return JobState(values.get("JobState", ""), "" if reason == "None" else reason, int(code), int(number or 0))


def _ask(*command: str) -> str:
    if not shutil.which(command[0]):
        raise UserError(f"there is no {command[0]} here; submit where Slurm's commands are, or look at --dry-run")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} has not answered for {TIMEOUT_S:g} s; is Slurm's controller up?") from None
    if done.returncode:
        raise UserError(f"{command[0]}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout
