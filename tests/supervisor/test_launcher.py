"""The words that start a job, without the hosts that are lost, and what is read of what the job writes."""

import os
from pathlib import Path

import pytest

from pipeinfer.cluster.hosts.launcher import expand_nodes, read_launcher
from pipeinfer.cluster.watch.protocol import mark_of
from pipeinfer.cluster.watch.rendezvous import Rendezvous
from pipeinfer.errors import UserError
from pipeinfer.job.process.supervised import Attempt
from pipeinfer.supervisor.job import Job, Loss, loss_in

RUN = ["pipeinfer", "run", "-n", "8", "-f", "x"]


def without(words: list[str], lost: list[str], folder: Path, environ: dict[str, str] | None = None) -> list[str]:
    return read_launcher(words, environ or {}).without(lost, folder / "left")


def test_a_hosts_file_is_written_anew(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\na:1\nb:2\n\nc  slots=1 max_slots=4\n")
    for option in ("-f", "--hostfile"):
        words = ["mpirun", option, str(hosts), "-np", "3", *RUN]
        assert without(words, [], tmp_path) == words
        assert without(words, ["a"], tmp_path) == ["mpirun", option, str(tmp_path / "left"), "-np", "3", *RUN]
        assert (tmp_path / "left").read_text() == "b:2\nc  slots=1 max_slots=4\n"
        assert without(words, ["b"], tmp_path)[3:5] == ["-np", "2"], "fewer ranks where the rest takes no more"
    with pytest.raises(UserError, match="no host is left to start the job on: a, b, c are lost"):
        without(words, ["a", "b", "c"], tmp_path)


def test_columns_of_a_hosts_file_may_be_aligned(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\t\tslots=2\nlonger  slots = 3\nc  4\nd\n")
    launcher = read_launcher(["mpirun", "--hostfile", str(tmp_path / "hosts"), "-np", "10", *RUN])
    assert [host.n_slots for host in launcher.hosts] == [2, 3, 4, 1]


def test_so_is_a_list_of_hosts(tmp_path: Path) -> None:
    words = ["mpirun", "--host", "a:2,b:2,c", "-n", "4", *RUN]
    assert without(words, ["b"], tmp_path) == ["mpirun", "--host", "a:2,c", "-n", "3", *RUN]
    words = ["mpirun", "-hosts", "a,b", "-n", "4", *RUN]
    assert without(words, ["a"], tmp_path)[3:5] == ["-n", "2"], "as many on each as before"


def test_srun_excludes_them(tmp_path: Path) -> None:
    nodes = {"SLURM_JOB_NODELIST": "node[08-10],x"}
    assert [host.name for host in read_launcher(["srun", *RUN], nodes).hosts] == ["node08", "node09", "node10", "x"]
    words = ["srun", "-N", "3", "--ntasks=6", *RUN]
    assert without(words, ["node09"], tmp_path, nodes) == ["srun", "--exclude=node09", "-N", "3", "--ntasks=6", *RUN]
    assert without(words, ["node09", "x"], tmp_path, nodes)[2:5] == ["-N", "2", "--ntasks=4"]
    assert without(["srun", "-N4", "-n8", *RUN], ["x"], tmp_path, nodes)[2:4] == ["-N3", "-n6"]
    assert without(["srun", "-n", "3", *RUN], ["x"], tmp_path, nodes)[2:4] == ["-n", "3"], "there is a node to spare"


def test_a_colon_of_the_command_is_no_group() -> None:
    assert read_launcher(["mpirun", "-np", "3", *RUN, "--stop", ":"]).command[-1] == ":"


@pytest.mark.parametrize("first", [["x"], RUN])
def test_a_job_of_several_groups_is_refused(first: list[str]) -> None:
    with pytest.raises(UserError, match="several groups"):
        read_launcher(["mpirun", "-np", "1", *first, ":", "-np", "3", *RUN])


def test_lists_of_nodes_may_have_several_ranges() -> None:
    assert expand_nodes("r[1-2]n[08-09,11],x") == [*(f"r{r}n{n}" for r in (1, 2) for n in ("08", "09", "11")), "x"]


def test_ranks_are_known_by_name_or_by_order() -> None:
    launcher = read_launcher(["mpirun", "-hosts", "10.0.0.1:2,b.cluster", "-np", "3", *RUN])
    assert launcher.host_of(2, "b") == "b.cluster"
    assert launcher.host_of(1, "whatever") == "10.0.0.1"
    assert read_launcher(["mpirun", "-np", "3", *RUN]).host_of(1, "here") == ""


@pytest.mark.parametrize("before", [["-wdir", "/home/me/pipeinfer"], ["-x", "PYTHONPATH=/opt/pipeinfer"]])
def test_a_folder_may_be_named_as_the_program(before: list[str]) -> None:
    assert list(read_launcher(["mpirun", *before, "-np", "3", *RUN]).command) == RUN


@pytest.mark.parametrize("words", [[], ["mpirun", "-np", "2"], ["mpirun", "pipeinfer"], ["pipeinfer", "bench"]])
def test_what_cannot_be_supervised(words: list[str]) -> None:
    with pytest.raises(UserError, match="give the launcher and the command"):
        read_launcher(words)


def test_a_program_that_is_not_there_is_not_started_again_and_again() -> None:
    with pytest.raises(UserError, match="/gone/pipeinfer: No such file or directory"):
        read_launcher(["mpirun", "-np", "2", "/gone/pipeinfer", "run", "-p", "x"])
    assert read_launcher(["mpirun", "-hosts", "a,b", "/gone/pipeinfer", "run"]).hosts, "it may be there"


def test_what_the_watch_says() -> None:
    died = "rank 2 (host b, stage 1, layers 8-15) died of SIGKILL"
    for line in (
        f"pipeinfer: {died}; ending the job; the same command goes on from x [job]\n",
        f"> what is typed pipeinfer: {died}; ending the job [job]\n",
    ):
        assert loss_in(line, MARK) == Loss(died, 2, "b")
    silent = "nothing comes from rank 1 (host a)"
    assert loss_in(f"pipeinfer: {silent}; ending the job [job]", MARK) == Loss(silent)
    assert loss_in("pipeinfer: guesses cost time [job]", MARK) is None
    assert loss_in(f"pipeinfer: {died}; ending the job\n", MARK) is None, "a request may say so"
    assert Loss("rank 1 (host b) cannot be reached any more, its host or the way to it is down", 1, "b").is_unreachable


MPICH = f"""{"=" * 83}
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 13048 RUNNING AT node1
=   EXIT CODE: 9
{"=" * 83}
"""
OPEN_MPI = f"""{"-" * 74}
prterun noticed that process rank 1 with PID 13048 on node node1 exited on
signal 9 (Killed).
"""
WARNING = f"{'-' * 74}\nno device of that name\n{'-' * 74}\na line of a rank\n"
SHOWN = "pipeinfer: rank 1 (host node1) died of SIGKILL; ending the job\n"
MARK = mark_of("job")
WATCH = SHOWN.replace("\n", f"{MARK}\n")


@pytest.mark.parametrize(
    ("says", "copied", "loss", "why"),
    [
        (MPICH, "", None, "a process of the job on host node1 has ended"),
        (OPEN_MPI, "", None, "a process of the job on host node1 has ended"),
        (MPICH + WATCH, "", Loss("rank 1 (host node1) died of SIGKILL", 1, "node1"), None),
        (WATCH + MPICH, SHOWN, Loss("rank 1 (host node1) died of SIGKILL", 1, "node1"), None),
        (WARNING + MPICH, WARNING, None, "a process of the job on host node1 has ended"),
        (f"{'-' * 74}\nmpirun is out of slots\n", f"{'-' * 74}\nmpirun is out of slots\n", None, None),
    ],
)
def test_what_a_launcher_reports_of_a_death_is_left_out(
    says: str, copied: str, loss: Loss | None, why: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job(Attempt("job", 1, Rendezvous("", (), 0, "")), ["printf", "%s", f"a line\n{says}"], os.environ)
    job.wait(lambda: False)
    assert capfd.readouterr().err == f"a line\n{copied}"
    assert job.loss == loss
    assert why is None or (job.reported and job.reported.why) == why
