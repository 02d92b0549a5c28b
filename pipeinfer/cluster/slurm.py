"""Slurm: the script of a job, and the commands that submit it and query its state. Knows nothing of what a job does."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pipeinfer.errors import UserError

TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
MEMORY = re.compile(r"\d+[KMGT]?")
COUNTS = ("nodes", "ntasks", "cpus_per_task")
MOST = 1_000_000
TIMEOUT_S = 60.0
NOTICE_S = 60  # seconds before a job's time is over at which its ranks are told
INDEX = "\0index\0"  # stands in words for a job's index in its array: no word can contain it

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"}
ENDED |= {"OUT_OF_MEMORY"}


@dataclass(frozen=True, slots=True)
class Group:
    """Equal tasks, under sbatch's names; None: Slurm's default."""

    nodes: int | None = None
    ntasks: int | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    gpus_per_task: str | None = None
    partition: str | None = None
    constraint: str | None = None

    @property
    def n_tasks(self) -> int:
        """`ntasks`, or one a node. Raises UserError when neither is given."""
        n_tasks = self.ntasks or self.nodes
        if not n_tasks:
            raise UserError("the number of ranks is missing; give --ntasks, or --nodes for one on each")
        return n_tasks


GROUP_KEYS = tuple(field.name.replace("_", "-") for field in fields(Group))


def parse_group(text: str) -> Group:
    """Parse `nodes=2,cpus-per-task=36,mem=300G`. Raises UserError if it cannot be parsed."""
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not value or key not in GROUP_KEYS or key in values:
            why = f"{part!r} is not KEY=VALUE with a known key, once each"
            raise UserError(f"--group {text!r}: {why}; the keys are {', '.join(GROUP_KEYS)}")
        values[key] = value
    settings: dict[str, Any] = {key.replace("-", "_"): value for key, value in values.items()}
    for name in (each for each in COUNTS if each in settings):
        value = settings[name]
        if not (re.fullmatch("[0-9]{1,7}", value) and 1 <= int(value) <= MOST):
            raise UserError(f"--group {text!r}: {name.replace('_', '-')}={value}; give a whole number from 1 to {MOST}")
        settings[name] = int(value)
    return Group(**settings)


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A command and its resources.

    groups    of tasks, in the order of their ranks; several are a heterogeneous job
    extra     further options of sbatch, as written there
    modules   to load; `setup`: lines of shell before the command
    launcher  srun, with the protocol `mpi` (pmi2, pmix); or mpirun, at the path `mpirun`; `open_mpi`: Open MPI's
    folder    where the job writes; `cwd`: where it runs
    restarts  after a rank or a node is lost, by `pipeinfer supervise`
    requeues  Slurm may start it again; `keeps_text`: what it wrote before stays then
    n_array   jobs of an array, whose index stands in words for INDEX; 0: it is none"""

    name: str
    groups: tuple[Group, ...]
    command: tuple[str, ...]
    folder: Path
    cwd: Path
    time: str | None = None
    account: str | None = None
    qos: str | None = None
    extra: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    launcher: str = "srun"
    mpi: str = "pmi2"
    mpirun: str = "mpirun"
    open_mpi: bool = False
    restarts: int = 0
    requeues: bool = False
    keeps_text: bool = True
    n_array: int = 0

    @property
    def text_file(self) -> Path:
        """What the command writes to standard output; `log_file`: to standard error."""
        return self.folder / f"text{self._suffix}"

    @property
    def log_file(self) -> Path:
        return self.folder / f"log{self._suffix}"

    @property
    def _suffix(self) -> str:
        return f"-{INDEX}" if self.n_array else ""


def script_text(job: SlurmJob) -> str:
    """Raises UserError when a value cannot be written into the script, or the launcher cannot start the groups."""
    lines = ["#!/bin/bash", *_directives(job), "", "set -e"]
    lines += [f"module load {shlex.join(job.modules)}"] if job.modules else []
    if job.requeues and not job.keeps_text:
        text = _quoted(job.text_file)
        lines += [f"[ ! -s {text} ] || cp {text} {text}.before", f": > {text}"]
    lines += [*map(_one_line, job.setup), f"exec {_supervise(job)}{_launch(job)}"]
    return "\n".join(lines) + "\n"


def _directives(job: SlurmJob) -> Iterator[str]:
    """The whole job's directives and the first group's, then those of the other groups."""
    time = _checked("--time", job.time, TIME, "30, 12:00:00 or 1-12:00:00")
    values = {"job-name": job.name, "time": time, "account": job.account, "qos": job.qos, "chdir": str(job.cwd)}
    values |= {"output": _escaped(job.text_file), "error": _escaped(job.log_file)}
    for name, value in values.items():
        if value is not None:
            yield _directive(name, value)
    if job.n_array:
        yield f"#SBATCH --array=0-{job.n_array - 1}"
    if job.restarts:  # else Slurm ends the job when one of its nodes fails
        yield "#SBATCH --no-kill"
    if not job.requeues:  # it would begin anew, and overwrite what it wrote
        yield "#SBATCH --no-requeue"
    else:
        # srun's tasks get the signal from Slurm, other programs by the batch step, of which they are the process
        to_batch = "" if job.launcher == "srun" and not job.restarts else "B:"
        yield from ("#SBATCH --requeue", "#SBATCH --open-mode=append", f"#SBATCH --signal={to_batch}TERM@{NOTICE_S}")
    yield from (f"#SBATCH {_one_line(option)}" for option in job.extra)
    for index, group in enumerate(job.groups):
        if index:
            yield "#SBATCH hetjob"
        yield from _of_group(group)


def _of_group(group: Group) -> Iterator[str]:
    _checked("--mem", group.mem, MEMORY, "64G")
    n_tasks = group.n_tasks
    for field in fields(group):
        value = n_tasks if field.name == "ntasks" else getattr(group, field.name)
        if value is not None:
            yield _directive(field.name.replace("_", "-"), str(value))


def _directive(name: str, value: str) -> str:
    return f"#SBATCH --{name}={shlex.quote(_one_line(value))}"


def _escaped(path: Path) -> str:
    """sbatch expands %."""
    return str(path).replace("%", "%%").replace(INDEX, "%a")


def _quoted(*words: object) -> str:
    """Words of the shell, with the array's index in the place of INDEX."""
    return shlex.join(map(str, words)).replace(INDEX, "'\"$SLURM_ARRAY_TASK_ID\"'")


def _checked(option: str, value: str | None, form: re.Pattern[str], example: str) -> str | None:
    if value is not None and not form.fullmatch(value):
        raise UserError(f"{option} {value} is not in Slurm's form; write it as in {example}")
    return value


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise UserError(f"{text!r} cannot stand in a line of a script; leave out what is no printable character")
    return text


def _supervise(job: SlurmJob) -> str:
    if not job.restarts:
        return ""
    if len(job.groups) > 1:
        reason = f"--restarts {job.restarts}: heterogeneous groups are not started again"
        raise UserError(f"{reason}; leave it out, or give one group")
    return f"{shlex.quote(job.command[0])} supervise --restarts {job.restarts} "


def _launch(job: SlurmJob) -> str:
    command = _quoted(*job.command)
    if job.launcher == "mpirun":
        if len(job.groups) > 1:
            raise UserError("mpirun starts no heterogeneous groups; use --launcher srun, or one group")
        mpirun = shlex.quote(job.mpirun)
        return f"{mpirun} {'--bind-to none ' * job.open_mpi}-np {job.groups[0].n_tasks} {command}"
    # -X: the first signal goes to the ranks, which end in order
    start = f"srun -X --mpi={shlex.quote(_one_line(job.mpi))}"
    if len(job.groups) == 1:
        return f"{start} {_step(job.groups[0])} {command}"
    parts = (f"--het-group={index} {_step(group)} {command}" for index, group in enumerate(job.groups))
    return f"{start} {' : '.join(parts)}"


def _step(group: Group) -> str:
    """The step's tasks and cores: srun does not inherit the cores a task from the allocation."""
    return f"-n {group.n_tasks}" + (f" -c {group.cpus_per_task}" if group.cpus_per_task else "")


def groups_of(plain: Group, groups: Sequence[str]) -> tuple[Group, ...]:
    """The groups given, or the plain one. Raises UserError if both are given, or neither says how many tasks."""
    if groups and plain != Group():
        option = next(field.name for field in fields(plain) if getattr(plain, field.name) is not None)
        both = f"--{option.replace('_', '-')} and --group are given"
        raise UserError(f"{both}; with --group, each group says what it has")
    parsed = tuple(map(parse_group, groups)) or (plain,)
    for group in parsed:
        _ = group.n_tasks
    return parsed


@dataclass(frozen=True, slots=True)
class JobState:
    """`name`: Slurm's; empty for a job that Slurm does not know any more. `reason`: why it waits or ended. `code`,
    `signal`: how it ended."""

    name: str
    reason: str = ""
    code: int = 0
    signal: int = 0

    @property
    def ended(self) -> bool:
        return not self.name or self.name in ENDED


def submit_script(script: Path) -> str:
    """The job's id. Raises UserError with what sbatch says."""
    answer = _query("sbatch", "--parsable", str(script)).strip()
    job = answer.rpartition("\n")[2].partition(";")[0]  # sites may print a banner before it
    if not job.isdecimal():
        raise UserError(f"sbatch gave no job's number but {answer!r}")
    return job


def job_state(job: str) -> JobState:
    """Raises UserError when Slurm does not answer."""
    try:
        description = _query("scontrol", "--oneliner", "show", "job", job)
    except UserError as error:
        if "Invalid job id" in str(error):
            return JobState("")
        raise
    first = description.partition("\n")[0]  # of a heterogeneous job the leader, which runs the script
    values = dict(re.findall(r"(\w+)=(\S*)", first))
    code, _, number = values.get("ExitCode", "0:0").partition(":")
    reason = values.get("Reason", "")
    return JobState(values.get("JobState", ""), "" if reason == "None" else reason, int(code), int(number or 0))


def _query(*command: str) -> str:
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
