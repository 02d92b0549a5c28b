"""`pipeinfer submit` and `supervise`: their options. What they do is in `job.submit`, with the script in
`cluster.slurm`, and in `supervisor`."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from pipeinfer.child import is_open_mpi, own_program
from pipeinfer.cli.options.llama_cpp import Command
from pipeinfer.cluster.slurm import GROUP_KEYS, INDEX, NOTICE_S, Group, SlurmJob, groups_of, script_text
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import AUTO_LAYERS, NO_DRAFT, STDIN
from pipeinfer.job.options.values import Folder, TextType, Whole
from pipeinfer.job.process.streams import complain
from pipeinfer.job.submit import FOLDER, PART, in_folder, next_folder, submit
from pipeinfer.models.gguf.model_info import OWN_HEAD
from pipeinfer.models.hub import name_of
from pipeinfer.outputs import working_folder

JOB_COMMANDS = ("run", "bench", "batch", "serve", "measure", "plan")  # what runs on several ranks
SUPERVISED = ("run", "batch", "serve")
KILL_S = 30  # Slurm kills a job so many seconds after it told it, by default
DRAIN_S = 20  # of a service

COUNT = Whole(1, 1_000_000)
LAUNCHER = click.Choice(["srun", "mpirun"])
HELP = {
    "group": "A group of like ranks, in the order of ranks; give it several times for a heterogeneous job. KEY=VALUE "
    f"with commas between, of {', '.join(GROUP_KEYS)}.",
    "sbatch": "One more option of sbatch, as --sbatch=--exclusive.",
    "restarts": "Start it again, so often within ten minutes, when a rank or a node is lost: `run`, `batch` and "
    "`serve` go on where they were.",
    "requeue": "Slurm may start it again, as after a preemption: `run` and `batch` go on from notes in its directory, "
    f"and SIGTERM comes {NOTICE_S} s before its time is over.",
    "array": "As many jobs of a `batch`, each with a part of its requests; results: OUT-0.jsonl, OUT-1.jsonl, …",
    "output": "Directory in which each job gets one of its own.",
}


@click.command("submit", cls=Command, context_settings={"allow_interspersed_args": False})
@click.option("-N", "--nodes", type=COUNT, help="Nodes.")
@click.option("-n", "--ntasks", type=COUNT, help="Ranks. [default: one a node]")
@click.option("-c", "--cpus-per-task", type=COUNT, help="Cores of each rank.")
@click.option("--mem", type=TextType(), help="Memory of each node, as in 64G.")
@click.option("--gpus-per-task", type=TextType(), help="GPUs of each rank: a number, or TYPE:NUMBER.")
@click.option("-p", "--partition", type=TextType(), help="Partition.")
@click.option("-C", "--constraint", type=TextType(), help="Features that nodes must have.")
@click.option("-t", "--time", type=TextType(), help="Time limit: minutes, 12:00:00, or 1-12:00:00 with days.")
@click.option("-A", "--account", type=TextType(), help="Account that is charged.")
@click.option("-q", "--qos", type=TextType(), help="Quality of service.")
@click.option("-J", "--job-name", "name", type=TextType(), default="pipeinfer", show_default=True, help="Its name.")
@click.option("--group", "groups", type=TextType(), multiple=True, help=HELP["group"])
@click.option("--sbatch", "extra", type=TextType(), multiple=True, help=HELP["sbatch"])
@click.option("--module", "modules", type=TextType(), multiple=True, help="Environment module to load; repeatable.")
@click.option("--setup", type=TextType(), multiple=True, help="Line of shell before the ranks start; repeatable.")
@click.option("--launcher", type=LAUNCHER, default="srun", show_default=True, help="What starts the ranks.")
@click.option("--restarts", type=Whole(0, 1000), default=0, show_default=True, help=HELP["restarts"])
@click.option("--requeue", "requeues", is_flag=True, help=HELP["requeue"])
@click.option("--array", "n_array", type=Whole(1, 1000), help=HELP["array"])
@click.option("--mpi", type=TextType(), help="What srun speaks with MPI. [default: pmi2, with Open MPI pmix]")
@click.option("-o", "--output", type=Folder(), default=Path("jobs"), show_default=True, help=HELP["output"])
@click.option("--dry-run", is_flag=True, help="Print the script, and leave it at that.")
@click.option("--wait", is_flag=True, help="Follow the job to its end; its exit code is this command's.")
@click.argument("words", nargs=-1, type=TextType(blank=True), metavar=f"{{{'|'.join(JOB_COMMANDS)}}} ...")
def submit_command(words: tuple[str, ...], groups: tuple[str, ...], dry_run: bool, wait: bool, **others: Any) -> int:
    """Write a script for Slurm's sbatch that runs a command of pipeinfer on several ranks, and submit it.

    The command and its options come last: pipeinfer submit -N 4 -c 36 -t 60 run -m target.gguf -md draft.gguf -p "…".
    What it writes goes into a directory of its own: text (standard output), log (standard error), results.csv,
    trace.json, job.sh, id. Printed are the job's number and that directory.
    """
    name, restarts, n_array = others["name"], others["restarts"], others["n_array"] or 0
    if "/" in name or name in (".", ".."):
        raise UserError(f"--job-name {name} names a directory too; leave / out")
    if restarts and not {*words[:1]} & {*SUPERVISED}:
        raise UserError(f"--restarts is for {', '.join(SUPERVISED)}, which go on where they were; leave it out")
    if n_array and words[:1] != ("batch",):
        raise UserError("--array shares out the requests of a `batch`; leave it out")
    if n_array and wait:
        raise UserError("--wait follows one job, and --array makes several; leave one of them out")
    for option in others["extra"]:
        if not option.startswith("-"):
            raise UserError(f"--sbatch {option} is no option of sbatch; write it as --sbatch=--{option}")
    params = parse_words(words)
    plain = Group(**{each.name: others.pop(each.name) for each in fields(Group)})
    open_mpi, cwd = is_open_mpi(), working_folder()
    others["mpi"] = others["mpi"] or ("pmix" if open_mpi else "pmi2")
    others |= {"n_array": n_array, "folder": cwd / others.pop("output"), "keeps_text": words[0] != "run"}
    programs: dict[str, Any] = {"command": (own_program("pipeinfer"),), "mpirun": own_program("mpirun")}
    job = SlurmJob(groups=groups_of(plain, groups), cwd=cwd, open_mpi=open_mpi, **programs, **others)
    for line in remarks(job, params):
        complain(line)
    job = replace(job, command=(*job.command, *job_words(words, params, job)))
    if dry_run:
        click.echo(script_text(in_folder(job, next_folder(job.folder, name))), nl=False)
        return 0
    return submit(job, wait, params.get("source"))


def parse_words(words: tuple[str, ...]) -> dict[str, Any]:
    """The values of a command's options. Raises UserError or click.UsageError where its ranks could not parse it."""
    if not words or words[0] not in JOB_COMMANDS:
        fault = f"{words[0]!r} is none of them" if words else "there is none"
        raise UserError(f"give the command that the job shall run, one of {', '.join(JOB_COMMANDS)}: {fault}")
    from pipeinfer.cli.commands import cli

    with click.Context(cli, info_name="pipeinfer") as parent:
        command = cli.get_command(parent, words[0])
        assert command is not None
        params = command.make_context(words[0], list(words[1:]), parent=parent).params
    if words[0] == "run" and (params["prompt"] is None) == (params["file"] is None):
        raise UserError("run: give the prompt with -p TEXT or with -f FILE, one of them")
    if params.get("file") == STDIN:
        raise UserError("-f -: a job has no standard input; give the prompt with -p, or name a file")
    for path in _paths([params.get(name) for name in ("model", "models", "drafts", "file", "source")]):
        is_file = path not in (NO_DRAFT, OWN_HEAD) and not name_of(path)
        if is_file and not os.path.exists(path):  # a node may have disks of its own
            complain(f"{path} is not on this host; the job needs it where its ranks are")
    return params


def job_words(words: tuple[str, ...], params: dict[str, Any], job: SlurmJob) -> tuple[str, ...]:
    """The command with options for the files that it writes, in an array with those of each job; a service ends within
    the time that Slurm gives it. Raises UserError for an array whose file of requests is behind `--`."""
    if "--" in words and job.n_array:
        raise UserError("--array gives each job options of its own, and none may follow --; leave -- out")
    suffix = f"-{INDEX}" if job.n_array else ""
    files = [("results", "--results", f"results{suffix}.csv"), ("trace", "--trace", "trace.json")]
    if job.requeues and words[0] in ("run", "batch"):
        files.append(("resume", "--resume", f"notes{suffix}"))
    own_files = list[str]()
    for name, option, file in files:
        if name in params and params[name] is None:
            own_files += [option, f"{FOLDER}/{file}"]
    if words[0] == "serve" and not any(word.startswith("--drain") for word in words):
        own_files += ["--drain", str(DRAIN_S)]
    if not job.n_array:
        end = 1 if "--" in words else len(words)
        return (*words[:end], *own_files, *words[end:])
    part = f"{FOLDER}/{PART}"
    replaced = [words[0], *(part if Path(word) == params["source"] else word for word in words[1:])]
    for option in ("output", "resume"):  # jobs of an array that wrote one file would exclude each other
        if path := params[option]:
            own_files += [f"--{option}", str(path.with_stem(path.stem + suffix))]
    return (*replaced, *own_files)


def remarks(job: SlurmJob, params: dict[str, Any]) -> Iterator[str]:
    """A line for options that contradict each other."""
    has_gpus = any(group.gpus_per_task for group in job.groups) or any("gpu" in option for option in job.extra)
    devices = {name for names in params.get("device") or () for name in names} - {"none"}
    layers = {*(params.get("n_gpu_layers") or ())} - {0, AUTO_LAYERS}
    uses_gpus = bool(devices or layers) or any(backend.is_torch for backend in params.get("backend") or ())
    if uses_gpus and not has_gpus and not any(params.get("rpc") or ()):
        yield "the command uses GPUs (-ngl, --device, --backend), and the job gets none; give --gpus-per-task 1"
    if has_gpus and "n_gpu_layers" in params and not uses_gpus:
        yield "the job gets GPUs, and the command leaves all layers on CPUs; give -ngl all"
    threads = max(params.get("threads") or (0,))
    for group in job.groups:
        n_cores, n_nodes = group.cpus_per_task, group.nodes or 0
        if n_cores and threads > n_cores:
            yield f"-t {threads} is more than the {n_cores} cores of a rank (-c); leave -t out, or give -c {threads}"
        if n_nodes > group.n_tasks:
            yield f"{n_nodes} nodes for {group.n_tasks} ranks: some nodes would have nothing to do; give -n {n_nodes}"
    if (drain_s := params.get("drain_s") or 0) > KILL_S:
        yield f"--drain {drain_s:g} is more than the {KILL_S} s after which Slurm usually kills a job (KillWait)"
    if job.requeues and job.time and job.time.isdigit() and 60 * int(job.time) <= NOTICE_S:
        yield f"-t {job.time} with --requeue: ranks are told to end {NOTICE_S} s before that, at once; give more"
    if job.requeues and any("no-requeue" in option for option in job.extra):
        yield "--requeue and --sbatch=--no-requeue contradict each other; leave one out"


def _paths(values: Iterable[object]) -> Iterator[Path]:
    """The files among the values of options, some of which have several."""
    for each in values:
        if isinstance(each, Path):
            yield each
        elif isinstance(each, tuple):
            yield from _paths(each)


RESTARTS_HELP = "Starts after the first one, within ten minutes."
WORDS = "[LAUNCHER ...] pipeinfer {run|chat|batch|serve} ..."


@click.command("supervise", cls=Command, context_settings={"allow_interspersed_args": False})
@click.option("--restarts", type=Whole(0, 1_000_000), default=10, show_default=True, help=RESTARTS_HELP)
@click.argument("words", nargs=-1, type=TextType(blank=True), metavar=WORDS)
def supervise_command(restarts: int, words: tuple[str, ...]) -> int:
    """Start a job, and when a rank or a host is lost start it again, to go on where it was with the same text.

    The launcher's words come last: pipeinfer supervise mpirun -f hosts -np 4 pipeinfer batch in.jsonl -o out.jsonl.
    Hosts that take no ranks, as their slots come last, are spares. A host that cannot be reached, or on which ranks die
    twice within ten minutes, is left out; with fewer hosts there are fewer ranks. Bad input ends with exit code 2.
    """
    from pipeinfer.cluster.hosts.launcher import read_launcher
    from pipeinfer.supervisor.supervisor import Supervisor

    return Supervisor(read_launcher(words), restarts, os.environ).run()
