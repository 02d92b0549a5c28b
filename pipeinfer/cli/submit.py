"""`pipeinfer submit`: its options. What it does is in `job.submit`, the script in `cluster.slurm`."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from pipeinfer.cli.options.command import Command
from pipeinfer.cluster.slurm import GROUP_KEYS, Group, SlurmJob, groups_of, script_text
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import NO_DRAFT, STDIN
from pipeinfer.job.options.values import Folder, Text, Whole
from pipeinfer.job.process.complain import complain
from pipeinfer.job.submit import FOLDER, in_folder, is_open_mpi, next_folder, own_program, submit
from pipeinfer.models.gguf.head import OWN_HEAD

COMMANDS = ("run", "bench", "batch", "serve", "measure", "plan")
"""What runs on several ranks."""

SUPERVISED = ("run", "batch", "serve")

COUNT = Whole(1, 1_000_000)


@click.command("submit", cls=Command, context_settings={"allow_interspersed_args": False})
@click.option("-N", "--nodes", type=COUNT, help="Nodes.")
@click.option("-n", "--ntasks", type=COUNT, help="Ranks. [default: one a node]")
@click.option("-c", "--cpus-per-task", type=COUNT, help="Cores of each rank.")
@click.option("--mem", type=Text(), help="Memory of each node, as in 64G.")
@click.option("--gpus-per-task", type=Text(), help="GPUs of each rank: a number, or TYPE:NUMBER.")
@click.option("-p", "--partition", type=Text(), help="Partition.")
@click.option("-C", "--constraint", type=Text(), help="Features that nodes must have.")
@click.option("-t", "--time", type=Text(), help="Time limit: minutes, 12:00:00, or 1-12:00:00 with days.")
@click.option("-A", "--account", type=Text(), help="Account that is charged.")
@click.option("-q", "--qos", type=Text(), help="Quality of service.")
@click.option("-J", "--job-name", "name", type=Text(), default="pipeinfer", show_default=True, help="Its name.")
@click.option(
    "--group",
    "groups",
    type=Text(),
    multiple=True,
    help=f"A group of like ranks, in the order of ranks; give it several times for a heterogeneous job. KEY=VALUE with "
    f"commas between, of {', '.join(GROUP_KEYS)}.",
)
@click.option(
    "--sbatch", "extra", type=Text(), multiple=True, help="One more option of sbatch, as --sbatch=--exclusive."
)
@click.option("--module", "modules", type=Text(), multiple=True, help="Environment module to load; repeatable.")
@click.option("--setup", type=Text(), multiple=True, help="Line of shell before the ranks start; repeatable.")
@click.option(
    "--launcher",
    type=click.Choice(["srun", "mpirun"]),
    default="srun",
    show_default=True,
    help="What starts the ranks.",
)
@click.option(
    "--restarts", type=Whole(0, 1000), default=0, show_default=True,
    help="Start it again so often when a rank or a node is lost: `run`, `batch` and `serve` go on where they were.",
)  # fmt: skip
@click.option("--mpi", type=Text(), help="What srun speaks with MPI. [default: pmi2, with Open MPI pmix]")
@click.option(
    "-o", "--output", type=Folder(), default=Path("jobs"), show_default=True,
    help="Directory in which each job gets one of its own.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the script, and leave it at that.")
@click.option("--wait", is_flag=True, help="Follow the job to its end; its exit code is this command's.")
@click.argument("words", nargs=-1, type=Text(blank=True), metavar=f"{{{'|'.join(COMMANDS)}}} ...")
def submit_command(
    nodes: int | None, ntasks: int | None, cpus_per_task: int | None, mem: str | None, gpus_per_task: str | None,
    partition: str | None, constraint: str | None, time: str | None, account: str | None, qos: str | None, name: str,
    groups: tuple[str, ...], extra: tuple[str, ...], modules: tuple[str, ...], setup: tuple[str, ...], launcher: str,
    restarts: int, mpi: str | None, output: Path, dry_run: bool, wait: bool, words: tuple[str, ...],
) -> int:  # fmt: skip
    """Write a script for Slurm's sbatch that runs a command of pipeinfer on several ranks, and submit it.

    The command and its options come last: pipeinfer submit -N 4 -c 36 -t 60 run -m target.gguf -md draft.gguf -p "…".
    What it writes goes into a directory of its own: text (standard output), log (standard error), results.csv,
    trace.json, job.sh, id. Printed are the job's number and that directory.
    """
    if "/" in name or name in (".", ".."):
        raise UserError(f"--job-name {name} names a directory too; leave / out")
    if restarts and words[:1] not in [(each,) for each in SUPERVISED]:
        raise UserError(f"--restarts is for {', '.join(SUPERVISED)}, which go on where they were; leave it out")
    command = own_program("pipeinfer"), *checked_words(words)
    plain = Group(nodes, ntasks, cpus_per_task, mem, gpus_per_task, partition, constraint)
    open_mpi = is_open_mpi()
    job = SlurmJob(
        name=name, groups=groups_of(plain, groups), command=command,
        folder=Path.cwd() / output, cwd=Path.cwd(), time=time, account=account, qos=qos, extra=extra, modules=modules,
        setup=setup, launcher=launcher, mpi=mpi or ("pmix" if open_mpi else "pmi2"), mpirun=own_program("mpirun"),
        open_mpi=open_mpi, restarts=restarts,
    )  # fmt: skip
    if dry_run:
        click.echo(script_text(in_folder(job, next_folder(job.folder, name))), nl=False)
        return 0
    return submit(job, wait)


def checked_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """A command of ours that its ranks will not refuse for how it is written, with places for what it writes.

    Raises UserError or click.UsageError.
    """
    if not words or words[0] not in COMMANDS:
        given = f"{words[0]!r} is none of them" if words else "there is none"
        raise UserError(f"give the command that the job shall run, one of {', '.join(COMMANDS)}: {given}")
    from pipeinfer.cli.commands import cli

    with click.Context(cli, info_name="pipeinfer") as parent:
        command = cli.get_command(parent, words[0])
        assert command is not None
        params = command.make_context(words[0], list(words[1:]), parent=parent).params
    if words[0] == "run" and (params["prompt"] is None) == (params["file"] is None):
        raise UserError("run: give the prompt with -p TEXT or with -f FILE, one of them")
    if params.get("file") == STDIN:
        raise UserError("-f -: a job has no standard input; give the prompt with -p, or name a file")
    for path in _read([params.get(name) for name in ("model", "models", "drafts", "file", "source")]):
        if path not in (NO_DRAFT, OWN_HEAD) and not path.exists():  # a node may have disks of its own
            complain(f"{path} is not on this host; the job needs it where its ranks are")
    return (*words, *_files(words, params))


def _read(given: Iterable[object]) -> Iterator[Path]:
    """The files among what was given, which may have several in one."""
    for each in given:
        if isinstance(each, Path):
            yield each
        elif isinstance(each, tuple):
            yield from _read(each)


def _files(words: tuple[str, ...], params: dict[str, object]) -> list[str]:
    """Options for the files that the command can write and that are not asked for elsewhere."""
    if "--" in words:
        return []
    wanted = (("results", "--results", "results.csv"), ("trace", "--trace", "trace.json"))
    return [word for name, option, file in wanted if name in params and params[name] is None
            for word in (option, f"{FOLDER}/{file}")]  # fmt: skip
