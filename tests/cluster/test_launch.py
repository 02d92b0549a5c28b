"""What launchers put into the environment: as recorded from hydra 5.0.2, Open MPI 5.0.11 and Slurm 22.05; pmix from its
manual."""

from __future__ import annotations

import os
import re
import select
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeinfer.cluster.hosts.launch import HYDRA_FORWARDS_S, check_size, rank_from_environment, size_from_environment
from pipeinfer.cluster.hosts.launcher import hosts_by_rank
from pipeinfer.errors import UserError
from pipeinfer.models.llama.ggml import describe_build, library_folder
from tests.support.jobs import COMMAND, environment, installed_script, launcher

END_JOB = """
import os
from pipeinfer.cluster.hosts import launch
launch.HYDRA_BUSY_S = 60.0  # however late who reads is
os.write(2, b"why it ends\\n")
launch.end_job(3)
"""

# one write: the launcher may mix the ranks' output at any byte
PRINT_BOTH = """
import os
from pipeinfer.cluster.hosts.launch import rank_from_environment, size_from_environment
os.write(1, f"{rank_from_environment()} {size_from_environment()}\\n".encode())
"""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1)),
        ({"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_FD": "9"}, (2, 3)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}, (1, 4)),
        (
            {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3", "PMI_RANK": "2", "PMI_SIZE": "3"},
            (2, 3),
        ),
        ({"PMIX_RANK": "5", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, (5, 8)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4)),
        # the batch script itself: no step of many tasks, though the allocation has 8
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),
        ({"PMI_RANK": "nonsense", "PMI_SIZE": "3"}, (0, 1)),
        ({"PMI_RANK": "0"}, (0, 1)),
    ],
)
def test_rank_and_size(environ: dict[str, str], expected: tuple[int, int]) -> None:
    assert (rank_from_environment(environ), size_from_environment(environ)) == expected


def test_ranks_that_mpi_did_not_join_are_refused() -> None:
    alone = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}  # srun --mpi=none
    with pytest.raises(UserError, match="3 ranks were started"):
        check_size(1, alone)
    check_size(3, alone)
    check_size(1, {})
    check_size(1, {"PMI_RANK": "0", "PMI_SIZE": "1"})


def run_three(program: str) -> subprocess.CompletedProcess[str]:
    mpirun = shutil.which("mpirun", path=os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", ""))
    if mpirun is None:
        pytest.skip("no mpirun")
    environ = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, env=environ).stdout
    flags = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in version else []
    command = [mpirun, *flags, "-np", "3", sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)


def test_under_the_installed_launcher() -> None:
    done = run_three(PRINT_BOTH)
    assert done.returncode == 0
    assert sorted(done.stdout.split("\n")[:-1]) == ["0 3", "1 3", "2 3"]


@pytest.mark.parametrize("start", ["", "from mpi4py import MPI; MPI.Finalize();"])
def test_a_failing_job_says_only_what_rank_0_says(start: str) -> None:
    if start:
        pytest.importorskip("mpi4py")
    say = "rank_from_environment() or os.write(2, b'one line\\n')"
    done = run_three(f"import os; from pipeinfer.cluster.hosts.launch import *; {start} {say}; exit_together(2)")
    assert (done.returncode, done.stderr.strip("\0\n ")) == (2, "one line")


def test_files_in_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    for name in ("json", "random", "numpy", "click"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    script = installed_script(tmp_path)
    for command in (COMMAND, ["sh", str(script)]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, cwd=tmp_path, env=environment())
        assert done.returncode == 0 and done.stdout.startswith("pipeinfer "), done.stderr


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_without_an_mpi_library_one_line_says_so(n_ranks: int) -> None:
    words, environ = [*COMMAND, "run", "-p", "x", "-n", "1"], environment() | {"MPI4PY_LIBMPI": "/no/libmpi.so"}
    done = subprocess.run([*launcher(n_ranks), *words], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    said_by = r"(rank 1 \(host \S+\): )?"  # where rank 0 comes some seconds later
    assert re.match(rf"pipeinfer: {said_by}no MPI library can be used \(cannot load MPI library\); install one", line)


@pytest.mark.parametrize("words", [["plan"], ["run", "-p", "x", "-n", "1"]])
def test_a_llama_cpp_that_cannot_be_loaded_is_one_line(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "libllama.so").write_text("no library")
    environ = environment() | {"LLAMA_CPP_LIB_PATH": str(tmp_path)}
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("pipeinfer: llama.cpp cannot be loaded (Failed to load shared library")


def test_the_users_own_llama_cpp_is_the_only_one_that_is_loaded(tmp_path: Path) -> None:
    shutil.copytree(library_folder(), folder := tmp_path / "own")
    environ = environment() | {"LLAMA_CPP_LIB_PATH": str(folder)}
    code = """
from pipeinfer.models.llama.ggml import describe_build, mapped_buffers
from pipeinfer.models.llama.repacking import repacked_types
import llama_cpp
mapped_buffers(), repacked_types()
with open("/proc/self/maps") as maps:
    print(*sorted({line.split()[-1] for line in maps if "libllama" in line or "libggml" in line}))
print(describe_build())
"""
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ
    ).stdout
    loaded, build = output.splitlines()
    assert "/libllama." in loaded and all(Path(each).parent == folder for each in loaded.split())
    assert build == f"{describe_build()}, LLAMA_CPP_LIB_PATH {folder}"

    words = [*COMMAND, "run", "-p", "def f(x):", "-n", "20", "--temp", "0"]
    texts = [
        subprocess.run(words, check=True, capture_output=True, text=True, env=each).stdout
        for each in (environment(), environ)
    ]
    assert texts[0] == texts[1]


def test_the_host_of_each_rank_follows_from_the_launchers_words(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# ours\na:2\nb slots=1\n")
    run = ["python3", "-m", "pipeinfer", "run", "-f", "prompt.txt", "-hosts", "none"]

    def placed(words: list[str], size: int, environ: dict[str, str] | None = None) -> str:
        return "".join(hosts_by_rank([*words, *run] if words else [], tmp_path, size, environ or {}))

    assert placed(["mpirun", "-f", "hosts"], 5) == "aabaa", "a path from where it runs; slots are filled again"
    assert placed(["prterun", "--host", "c:1,d"], 2) == "cd"
    as_parted = ["mpirun", "-hosts", "c", "2", "d", "-np", "3"]
    assert placed(as_parted, 3) == "ccd", "hydra overwrites the signs between its hosts"
    assert placed(["mpirun", "-np", "2"], 2) == placed(["mpirun", "-f", "gone"], 2) == placed([], 2) == ""
    step = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "n[1-2],x", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    assert placed([], 5, step) == "n1n1n2n2x" and placed([], 4, step) == ""


def test_hydra_is_asked_to_end_a_job_once_it_has_read_why() -> None:
    """It does not read what is left in the ranks' pipes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        environ = environment() | {"PMI_FD": str(theirs.fileno()), "HYDI_CONTROL_FD": "0"}
        command, fds = [sys.executable, "-c", END_JOB], [theirs.fileno()]
        with subprocess.Popen(command, stderr=subprocess.PIPE, env=environ, pass_fds=fds) as rank:
            assert rank.stderr and select.select([rank.stderr], [], [], 60)[0]
            assert not select.select([ours], [], [], 2 * HYDRA_FORWARDS_S)[0]
            assert rank.stderr.readline() == b"why it ends\n"
            assert ours.recv(100) == b"cmd=abort exitcode=3\n"
        assert rank.returncode == 3
