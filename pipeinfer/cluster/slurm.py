"""The script for Slurm's sbatch. Makes text from settings; calls no Slurm and writes no file."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pipeinfer.errors import UserError

TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
MEMORY = re.compile(r"\d+[KMGT]?")
COUNTS = ("nodes", "ntasks", "cpus_per_task")
MOST = 1_000_000


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
        found = self.ntasks or self.nodes
        if not found:
            raise UserError("the number of ranks is missing; give --ntasks, or --nodes for one on each")
        return found


GROUP_KEYS = tuple(field.name.replace("_", "-") for field in fields(Group))


def parse_group(text: str) -> Group:
    """Parse `nodes=2,cpus-per-task=36,mem=300G`. Raises UserError if it cannot be parsed."""
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not value or key not in GROUP_KEYS or key in values:
            raise UserError(f"--group {text!r}: {part!r} is not KEY=VALUE with a known key, once each; the keys are "
                            f"{', '.join(GROUP_KEYS)}")  # fmt: skip
        values[key] = value
    given: dict[str, Any] = {key.replace("-", "_"): value for key, value in values.items()}
    for name in COUNTS:
        if name in given:
            given[name] = _count(text, name, given[name])
    return Group(**given)


def _count(text: str, name: str, value: str) -> int:
    if not (re.fullmatch("[0-9]{1,7}", value) and 1 <= int(value) <= MOST):
        raise UserError(f"--group {text!r}: {name.replace('_', '-')}={value}; give a whole number from 1 to {MOST}")
    return int(value)


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A command and its resources.

    groups    of tasks, in the order of their ranks; several are a heterogeneous job
    extra     further options of sbatch, as written there
    modules   to load; `setup`: lines of shell before the command
    launcher  srun, with the protocol `mpi` (pmi2, pmix); or mpirun, with the path `mpirun`; `open_mpi`: it is Open
    MPI's folder    where the job writes; `cwd`: where it runs
    restarts  after a rank or a node is lost, by `pipeinfer supervise`
    """

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

    @property
    def text_file(self) -> Path:
        """What the command writes to standard output; `log_file`: to standard error."""
        return self.folder / "text"

    @property
    def log_file(self) -> Path:
        return self.folder / "log"


def script_text(job: SlurmJob) -> str:
    """Raises UserError when a value cannot be written into the script, or the launcher cannot start the groups."""
    lines = ["#!/bin/bash", *_directives(job), "", "set -e"]
    lines += [f"module load {shlex.join(job.modules)}"] if job.modules else []
    lines += [*map(_one_line, job.setup), f"exec {_supervise(job)}{_launch(job)}"]
    return "\n".join(lines) + "\n"


def _directives(job: SlurmJob) -> Iterator[str]:
    """The whole job's directives and the first group's, then those of the other groups."""
    for name, value in (
        ("job-name", job.name), ("time", _checked("--time", job.time, TIME, "30, 12:00:00 or 1-12:00:00")),
        ("account", job.account), ("qos", job.qos), ("chdir", str(job.cwd)),
        ("output", _escaped(job.text_file)), ("error", _escaped(job.log_file)),
    ):  # fmt: skip
        if value is not None:
            yield _directive(name, value)
    if job.restarts:  # else Slurm ends the job when one of its nodes fails
        yield "#SBATCH --no-kill"
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
    return str(path).replace("%", "%%")


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
        raise UserError(f"--restarts {job.restarts}: heterogeneous groups are not started again; leave it out, or give "
                        "one group")  # fmt: skip
    return f"{shlex.quote(job.command[0])} supervise --restarts {job.restarts} "


def _launch(job: SlurmJob) -> str:
    command = shlex.join(job.command)
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
        given = next(field.name for field in fields(plain) if getattr(plain, field.name) is not None)
        raise UserError(f"--{given.replace('_', '-')} and --group are given; with --group, each group says what it has")
    found = tuple(map(parse_group, groups)) or (plain,)
    for group in found:
        _ = group.n_tasks
    return found
