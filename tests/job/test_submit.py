"""`pipeinfer submit`: the scripts it writes, as golden files, and jobs of a real Slurm with two nodes on this host."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import click
import pytest
from click.testing import CliRunner

from pipeinfer.child import is_open_mpi, own_program
from pipeinfer.cli.submit import submit_command
from pipeinfer.cluster.slurm import Group, JobState, parse_group
from pipeinfer.errors import UserError
from pipeinfer.job.submit import follow, split_lines
from pipeinfer.observe.table import RESULTS
from tests.support.jobs import COMMAND, ROOT, environment, finish, launcher, until
from tests.support.paces import pace_words, slow_target
from tests.support.slurm import Slurm, slurm

__all__ = ["slurm"]
GOLDEN = Path(__file__).parent / "sbatch"
MODELS = ("-m", "target.gguf", "-md", "draft.gguf")
GPUS = (
    "-n 8 -N 4 --gpus-per-task h100:1 -C fast -q high --sbatch=--exclusive --module gcc/12 --module mpich/4 "
    "--setup 'source env.sh' --setup 'export X=1' -J 'two words' --mpi pmix -- bench"
)
GROUPS = (
    "--group ntasks=1,cpus-per-task=8,mem=32G -t 30 --group nodes=3,cpus-per-task=36,gpus-per-task=1,partition=big run"
)
RUN = shlex.split("-N 4 -c 36 --mem 300G -t 12:00:00 -p main -A lab run")
SCRIPTS: dict[str, list[object]] = {
    "run": [*RUN, *MODELS, "-p", "it's\n100%", "-n", 64],
    "gpus": [*shlex.split(GPUS), *MODELS, "-ngl", "all", "--results", "mine.csv"],
    "groups": [*shlex.split(GROUPS), *MODELS, "-p", "x"],
    "mpirun": ["-n", 3, "--launcher", "mpirun", "plan", *MODELS],
    "requeue": ["-n", 2, "--requeue", "--", "run", *MODELS, "-p", "x"],
    "array": ["-n", 2, "--requeue", "--array", 3, "batch", "in.jsonl", "-o", "out/o.jsonl", *MODELS],
    "restarts": ["-N", 4, "--restarts", 5, "batch", "in.jsonl", "-o", "out.jsonl", *MODELS],
}


def call(*words: object) -> str:
    """What it prints. Raises what it refuses."""
    result = CliRunner().invoke(submit_command, [str(word) for word in words], standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_as_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has changed on purpose is written anew with: pipeinfer submit --dry-run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeinfer.cli.submit.is_open_mpi", lambda: False)
    text = call("--dry-run", *SCRIPTS[name])
    places = {
        str(tmp_path): "/home/me",
        own_program("pipeinfer"): "/env/bin/pipeinfer",
        own_program("mpirun"): "mpirun",
    }
    for place, shown in places.items():
        text = text.replace(place, shown)
    assert text == (GOLDEN / f"{name}.sh").read_text()
    assert not list(tmp_path.iterdir()), "nothing is made"


def test_open_mpi_is_started_as_it_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeinfer.cli.submit.is_open_mpi", lambda: True)
    assert "srun -X --mpi=pmix -n 2 " in call("--dry-run", "-n", 2, "run", "-p", "x")
    assert "mpirun --bind-to none -np 2 " in call("--dry-run", "-n", 2, "--launcher", "mpirun", "run", "-p", "x")


def test_a_server_and_a_batch_can_be_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--dry-run", "-n", 3, "serve", "-m", "target.gguf"]
    assert " serve -m target.gguf --host 0.0.0.0 --drain 20\n" in call(*words, "--host", "0.0.0.0")
    assert " serve -m target.gguf --drain 5\n" in call(*words, "--drain", "5")
    assert " batch in.jsonl -o out.jsonl" in call("--dry-run", "-n", 3, "batch", "in.jsonl", "-o", "out.jsonl")
    with pytest.raises(click.BadParameter, match="'many' is not a whole number"):
        call("--dry-run", "-n", 3, "serve", "--port", "many")


def test_where_a_server_will_be_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeinfer.job.submit.submit_script", lambda script: "7")

    def said(*words: str) -> str:
        given = ["-o", str(tmp_path), "-n", "2", *words]
        return CliRunner().invoke(submit_command, given, standalone_mode=False).stderr

    assert f"{tmp_path / 'pipeinfer-1' / 'log'} has its address" in (line := said("serve", "--port", "8123"))
    assert line.count("\n") == 1 and "ssh -L PORT:127.0.0.1:PORT NODE" in line
    assert not said("run", "-p", "x")


def test_files_that_are_not_here_are_named() -> None:
    def complaints(*words: object) -> list[str]:
        result = CliRunner().invoke(submit_command, ["--dry-run", "-n", "2", *map(str, words)], standalone_mode=False)
        return result.stderr.splitlines()

    said = "is not on this host; the job needs it where its ranks are"
    assert complaints("run", "-m", "gone.gguf", "-md", "none", "-p", "x") == [f"pipeinfer: gone.gguf {said}"]
    assert complaints("bench", "-md", "a.gguf,b.gguf") == [f"pipeinfer: {name}.gguf {said}" for name in "ab"]
    assert not complaints("batch", __file__, "-o", "out.jsonl")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", 2, "run", "-ngl", "99"], "the job gets none; give --gpus-per-task 1"),
        (["-n", 2, "run", "--backend", "torch:cuda"], "the job gets none"),
        (["-n", 2, "--gpus-per-task", 1, "run"], "give -ngl all"),
        (["-n", 2, "--sbatch=--gres=gpu:2", "run"], "give -ngl all"),
        (["-n", 2, "-c", 4, "run", "-t", 36], "-t 36 is more than the 4 cores"),
        (["-N", 4, "-n", 2, "run"], "give -n 4"),
        (["-n", 2, "--requeue", "--sbatch=--no-requeue", "run"], "contradict"),
        (["-n", 2, "--requeue", "-t", 1, "run"], "60 s before that, at once"),
        (["-n", 2, "--gpus-per-task", 1, "-c", 4, "run", "-ngl", "all", "-t", 4], ""),
        (["-n", 2, "run", "-ngl", "auto", "--device", "none"], ""),
    ],
)
def test_options_that_contradict_each_other_are_remarked_on(words: list[object], said: str) -> None:
    result = CliRunner().invoke(submit_command, ["--dry-run", *map(str, words), "-p", "x"], standalone_mode=False)
    assert result.exit_code == 0 and result.stdout.startswith("#!")
    assert said in result.stderr and result.stderr.count("\n") == bool(said)


def test_a_service_that_drains_for_longer_than_slurm_waits_is_remarked_on() -> None:
    for seconds, n_lines in ((30, 0), (31, 1)):
        words = ["--dry-run", "-n", "2", "serve", "--drain", str(seconds)]
        result = CliRunner().invoke(submit_command, words, standalone_mode=False)
        assert result.exit_code == 0 and result.stderr.count("usually kills a job (KillWait)") == n_lines


def test_an_array_shares_out_all_requests(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"1\n\n2\n3\n4\n5")
    parts = split_lines(tmp_path / "in", 3)
    assert [len(part.split()) for part in parts] == [1, 2, 2] and b"".join(parts) == b"1\n2\n3\n4\n5\n"
    with pytest.raises(UserError, match="has 5 requests; give at most so many"):
        split_lines(tmp_path / "in", 6)
    with pytest.raises(UserError, match="must be readable"):
        split_lines(tmp_path / "none", 2)


def test_jobs_of_an_array_write_no_file_together() -> None:
    words = ["-n", 2, "--array", 2, "batch", __file__, "-o", "out.jsonl", "--resume", "my/notes"]
    *_, option, output, resume, notes = shlex.split(call("--dry-run", *words).splitlines()[-1])
    index = "$SLURM_ARRAY_TASK_ID"
    assert [option, output, resume, notes] == ["--output", f"out-{index}.jsonl", "--resume", f"my/notes-{index}"]


@pytest.mark.parametrize("source", ["./in.jsonl", "in.jsonl", ".//in.jsonl"])
def test_each_job_of_an_array_reads_its_own_requests(source: str) -> None:
    words = shlex.split(call("--dry-run", "-n", 2, "--array", 2, "batch", source, "-o", "out.jsonl").splitlines()[-1])
    assert source not in words and words[words.index("batch") + 1].endswith("requests-$SLURM_ARRAY_TASK_ID.jsonl")


def test_requests_may_be_named_as_the_command_and_what_is_written_comes_before_dashes() -> None:
    words = shlex.split(call("--dry-run", "-n", 2, "--array", 2, "batch", "batch", "-o", "o").splitlines()[-1])
    assert words[words.index("batch") + 1].endswith("requests-$SLURM_ARRAY_TASK_ID.jsonl")
    words = shlex.split(call("--dry-run", "-n", 2, "run", "-p", "--").splitlines()[-1])
    assert words[-2:] == ["-p", "--"] and "--results" in words


def test_a_working_directory_that_was_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(UserError, match="the working directory: No such file"):
        call("--dry-run", "-n", 2, "run", "-p", "x")


def test_the_mpi_that_is_installed_is_recognised() -> None:
    assert is_open_mpi() == ("--oversubscribe" in launcher(2))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "-p", "x"], "give --ntasks"),
        (["-n", 2], "there is none"),
        (["-n", 2, "simulate"], "'simulate' is none of them"),
        (["-n", 2, "run", "--magic"], "--magic"),
        (["-n", 2, "run", "-t", "nan"], "'nan' is not a whole number"),
        (["-n", 2, "run", "-f", "-"], "no standard input"),
        (["-n", 2, "run"], "give the prompt"),
        (["-n", 2, "run", "-p", "x", "-f", "y"], "one of them"),
        (["-n", 2, "-t", "soon", "run", "-p", "x"], "--time soon"),
        (["-n", 2, "--mem", "lots", "run", "-p", "x"], "--mem lots"),
        (["-n", 2, "--mpi", "pmi2\nx", "run", "-p", "x"], "cannot stand in a line"),
        (["-n", 2, "-A", "a\n#SBATCH b", "run", "-p", "x"], "cannot stand in a line"),
        (["-n", 2, "--sbatch", "exclusive", "run", "-p", "x"], "write it as --sbatch=--exclusive"),
        (["-n", 2, "-J", "../up", "run", "-p", "x"], "leave / out"),
        (["-n", 2, "--group", "ntasks=1", "run", "-p", "x"], "--ntasks and --group"),
        (["-n", 2, "--array", 2, "run", "-p", "x"], "--array shares out the requests of a `batch`"),
        (["-n", 2, "--array", 2, "--wait", "batch", "i", "-o", "o"], "--wait follows one job"),
        (["-n", 2, "--array", 0, "batch", "i", "-o", "o"], "--array"),
        (["-n", 2, "--array", 2, "batch", "-o", "o", "--", "i"], "leave -- out"),
        (["--group", "tasks=1", "run", "-p", "x"], "the keys are nodes, ntasks"),
        (["--group", "ntasks=0", "run", "-p", "x"], "whole number"),
        (["--group", "ntasks=1", "--group", "mem=1G", "run", "-p", "x"], "give --ntasks"),
        (["--group", "ntasks=1", "--group", "ntasks=1", "--launcher", "mpirun", "run", "-p", "x"], "--launcher srun"),
    ],
)
def test_bad_input(words: list[object], said: str) -> None:
    with pytest.raises((UserError, click.UsageError)) as caught:
        call("--dry-run", *words)
    message = caught.value.format_message() if isinstance(caught.value, click.UsageError) else str(caught.value)
    assert said in message and "\n" not in message


def test_what_srun_speaks_is_one_word() -> None:
    assert "srun -X --mpi='a; b' -n 2 " in call("--dry-run", "-n", 2, "--mpi", "a; b", "run", "-p", "x")


def test_what_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--time soon"):
        call("-o", tmp_path, "-n", 2, "-t", "soon", "run", "-p", "x")
    assert list(tmp_path.iterdir()) == []


def test_a_group_is_read_as_it_is_written() -> None:
    assert parse_group("nodes=3,cpus-per-task=36,mem=3G") == Group(nodes=3, cpus_per_task=36, mem="3G")


def test_a_job_that_waits_and_is_killed_is_followed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The files come late, and end without a newline."""
    states = [JobState("PENDING", "Priority"), JobState("TIMEOUT", "TimeLimit", 0, 15)]
    text, log = tmp_path / "text", tmp_path / "log"

    def state_of(job: str) -> JobState:
        if len(states) == 1:
            text.write_text("begun")
            log.write_text("a plan\n")
        return states.pop(0)

    assert follow("7", text, log, state_of) == 128 + 15
    out, errors = capfd.readouterr()
    assert out == "begun" and errors.splitlines() == [
        "pipeinfer: job 7 waits: Priority",
        "a plan",
        "pipeinfer: job 7 ended: timeout (TimeLimit)",
    ]


@pytest.mark.parametrize(("place", "why"), [("/dev/full", "No space left on device"), ("", "")])
def test_a_job_whose_text_cannot_be_written_is_followed_no_further(tmp_path: Path, place: str, why: str) -> None:
    """By a full disk, or a reader that has left."""
    (tmp_path / "text").write_text("text " * 20000)
    code = f"""
import sys
from pathlib import Path
from pipeinfer.cluster.slurm import JobState
from pipeinfer.job.process.streams import final_code, take_streams
from pipeinfer.job.submit import follow
take_streams()
folder = Path({str(tmp_path)!r})
sys.exit(final_code(follow("7", folder / "text", folder / "log", lambda job: JobState("RUNNING"))))
"""
    line = f"{sys.executable} -c {shlex.quote(code)} {f'> {place}' if place else '| head -c 5'}"
    words = ["bash", "-c", f"set -o pipefail; {line}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == (2 if place else 141) and "job 7 goes on, and writes" in done.stderr, done.stderr
    assert why in done.stderr and "Traceback" not in done.stderr


def test_a_job_is_followed_through_a_restart_of_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeinfer.job.submit.ASK_S", 0.0)
    answers = iter(["RUNNING", "", "", "COMPLETED"])

    def state_of(job: str) -> JobState:
        if name := next(answers):
            return JobState(name)
        raise UserError("scontrol: Unable to contact slurm controller")

    assert follow("7", tmp_path / "text", tmp_path / "log", state_of) == 0
    said = "job 7 is not known to have ended: scontrol: Unable to contact slurm controller"
    assert capfd.readouterr().err == f"pipeinfer: {said}\n"
    monkeypatch.setattr("pipeinfer.job.submit.SILENT_S", 0.0)
    answers = iter(["RUNNING", "", ""])
    with pytest.raises(UserError, match="Unable to contact"):
        follow("7", tmp_path / "text", tmp_path / "log", state_of)


def test_where_there_is_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no sbatch here"):
        call("-n", 2, "run", "-p", "x")
    assert not list((tmp_path / "jobs").iterdir()), "no folder stays of a job that is none"


# -- a real Slurm

SHORT = ["run", "-p", "def fibonacci(n):", "-n", "24", "-s", "3", "-t", "1"]


def submitted(slurm: Slurm, folder: Path, *words: str) -> CompletedProcess[str]:
    return slurm.finish(*COMMAND, "submit", "-o", str(folder), *words, environ={"PYTHONPATH": str(ROOT)}, cwd=folder)


@pytest.fixture(scope="module")
def text() -> str:
    return finish(3, SHORT).stdout


@pytest.mark.parametrize(
    "ranks",
    [
        ["-n", "3", "-N", "2", "-c", "1", "-J", "two words%j"],
        ["--group", "ntasks=1,cpus-per-task=2", "--group", "ntasks=2,cpus-per-task=1"],
        ["-n", "3", "--launcher", "mpirun"],
    ],
    ids=["nodes", "groups", "mpirun"],
)
def test_a_job_gives_the_text_that_mpirun_gives(slurm: Slurm, text: str, tmp_path: Path, ranks: list[str]) -> None:
    job = submitted(slurm, tmp_path, "-t", "5", "--wait", *ranks, *SHORT)
    assert job.returncode == 0, job.stderr
    assert job.stdout == text and "stage 1" in job.stderr and "scancel" in job.stderr
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == {"id", "job.sh", "log", "results.csv", "text", "trace.json"}
    assert (folder / "text").read_text() == text
    (row,) = RESULTS.read(folder / "results.csv")
    assert row["ranks"] == 3


def test_a_job_that_fails_gives_its_exit_code(slurm: Slurm, tmp_path: Path) -> None:
    job = submitted(slurm, tmp_path, "-n", "2", "--wait", "run", "-p", "x", "-m", "none.gguf")
    assert job.returncode == 2 and "none.gguf does not exist" in job.stderr and "ended: failed" in job.stderr


def test_a_job_is_left_to_itself_and_what_slurm_refuses_is_told(slurm: Slurm, tmp_path: Path) -> None:
    job = submitted(slurm, tmp_path, "-n", "1", "--sbatch=--hold", *SHORT)
    number, folder = job.stdout.split()
    assert (Path(folder) / "id").read_text().strip() == number and job.stderr == ""
    assert (Path(folder) / "job.sh").stat().st_mode & 0o777 == 0o700, "it may have keys"
    assert number in slurm.output("squeue", "--noheader", "--format=%i")
    slurm.finish("scancel", number)
    refused = submitted(slurm, tmp_path, "-n", "1", "-p", "nowhere", *SHORT)
    assert refused.returncode == 2 and "nowhere" not in refused.stdout and len(refused.stderr.splitlines()) == 1
    assert "sbatch: " in refused.stderr and len(list(tmp_path.iterdir())) == 1, "no folder stays of it"


def ended(slurm: Slurm, number: str, timeout_s: float = 90) -> None:
    def is_gone() -> bool:
        listed = slurm.finish("squeue", "--noheader", "--format=%F")
        return listed.returncode == 0 and number not in listed.stdout  # a busy controller may not answer in time

    until(is_gone, timeout_s)


def test_a_job_that_is_requeued_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    pace = pace_words(tmp_path, slow_target(25.0, stages=1))  # it runs until it is requeued
    words = ["run", "-p", "def read_lines(path):\n", "-n", "400", "--ignore-eos", "-t", "1", "--temp", "0", "-v"]
    paced = [*words, *pace]
    number, place = submitted(slurm, tmp_path, "-n", "2", "--requeue", *paced).stdout.split()
    folder = Path(place)
    until(lambda: (folder / "text").exists() and len((folder / "text").read_bytes()) > 200)
    assert slurm.finish("scontrol", "requeue", number).returncode == 0
    until(lambda: "BeginTime" in slurm.output("squeue", "--noheader", "--format=%r"), timeout_s=60)
    # Slurm would wait for two minutes; slurmd refuses a launch within the second of the kill as one from before it
    soon = slurm.finish("scontrol", "update", f"JobId={number}", "StartTime=now+2seconds")
    assert soon.returncode == 0, soon.stderr
    ended(slurm, number, timeout_s=300)
    record = slurm.output("scontrol", "show", "job", number)
    whole = finish(2, words).stdout
    assert (folder / "text").read_text() == whole, f"{record}\n{(folder / 'log').read_text()}"
    assert whole.startswith((folder / "text.before").read_text()[:200]), "what was there is kept"
    assert "terminated; the text" in (folder / "log").read_text(), "what the first one said is kept"


def test_an_array_of_prompts(slurm: Slurm, tmp_path: Path) -> None:
    lines = [f'{{"prompt": "def f{number}(", "max_tokens": 4, "custom_id": "{number}"}}\n' for number in range(5)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    job = submitted(slurm, tmp_path, "-n", "2", "--array", "2", "batch", "in.jsonl", "-o", "out.jsonl", "-t", "1")
    assert job.returncode == 0, job.stderr
    number, place = job.stdout.split()
    ended(slurm, number)
    results = [(tmp_path / f"out-{index}.jsonl").read_text().splitlines() for index in range(2)]
    assert [len(each) for each in results] == [2, 3], (Path(place) / "log-0").read_text()
    assert {path.name for path in Path(place).iterdir()} == {
        "id",
        "job.sh",
        *(f"{name}-{index}" for name in ("log", "text") for index in range(2)),
        *(f"requests-{index}.jsonl" for index in range(2)),
    }


def test_a_server_says_how_to_reach_it(slurm: Slurm, tmp_path: Path) -> None:
    number, place = submitted(slurm, tmp_path, "-n", "2", "serve", "--port", "0", "-t", "1").stdout.split()
    log = Path(place) / "log"
    until(lambda: log.exists() and "listening on" in log.read_text(), timeout_s=60)
    slurm.finish("scancel", number)
    assert re.search(r"from another machine: ssh -J \S+ -L (\d+):127.0.0.1:\1 node\d, then http://127", log.read_text())
