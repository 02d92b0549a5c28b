"""A supervised job that loses a rank goes on: its output is there once, and nothing of the lost one is left."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from pipeinfer.cluster.watch.protocol import SUPERVISOR
from pipeinfer.job.process.supervised import OUTPUT, Attempt, connect_supervisor, tell_exit
from pipeinfer.launchers import process_stat
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.supervisor.job import KeptOutput
from pipeinfer.supervisor.links import Links
from tests.support.jobs import COMMAND, environment, finish, launcher, until
from tests.support.paces import pace_words, slow_runs
from tests.support.supervised import COMMAND_FILE, Supervised, held, let_go

SETTINGS = "-n 300 -c 400 --ignore-eos -t 1 --temp 0.8 --seed 3"
TEXT = ["run", "-p", "def read_lines(path):\n", *SETTINGS.split()]


@pytest.fixture(scope="module")
def text() -> str:
    return finish(1, [*TEXT, "--policy", "iterative"]).stdout


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A text that is not complete before something has happened to it."""
    return [*TEXT, *pace_words(tmp_path_factory.mktemp("pace"), slow_runs(150))]


def test_a_text_goes_on_whichever_rank_dies(text: str, tmp_path: Path) -> None:
    job = Supervised(3, [*TEXT, *held(tmp_path)])
    begun = ""
    for rank in (1, 0, 2):
        begun += job.read(100)
        job.strike(rank)
    errors = job.wait_for(b"(restart 3 of").decode()
    let_go(tmp_path)
    code, rest, more = job.finish()
    errors += more
    assert (code, begun + rest) == (0, text), errors
    assert errors.count("the job starts again") == 3 and "TERMINATION" not in errors
    assert not re.search(r"\[[0-9a-f]{16}\]", errors), "the mark for the supervisor is not shown"


def test_so_does_one_that_has_not_begun(text: str) -> None:
    job = Supervised(3, TEXT)
    job.strike(2)
    code, out, errors = job.finish()
    assert (code, out) == (0, text), errors


def test_so_does_one_that_is_complete_and_not_yet_reported(tmp_path: Path) -> None:
    """Without a seed: the next job must not write another text behind it."""
    words = ["run", "-p", "def read_lines(path):\n", "-n", "60", "--ignore-eos", "-t", "1", "--temp", "0.8"]
    job = Supervised(2, [*words, *held(tmp_path)])
    seed = re.search(rb"seed (\d+)", job.wait_for(b"busy: rank 0"))
    job.strike(1)
    job.wait_for(b"busy: rank 0")
    let_go(tmp_path)
    code, out, errors = job.finish()
    assert seed and (code, out) == (0, finish(1, [*words, "--seed", seed[1].decode()]).stdout), errors


def test_a_job_that_has_told_its_end_is_not_lost_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(True, KeptOutput(whole=False), "")
    for number, code in ((1, 0), (2, 3)):
        links.begin(number)
        assert links.exit_code is None
        monkeypatch.setenv(SUPERVISOR, Attempt("job", number, links.rendezvous).text())
        tell_exit(code)
        until(lambda: links.is_connected)
        links.end()
        assert links.exit_code == code
    tell_exit(5)  # of an attempt that has ended
    links.begin(3)
    assert links.exit_code is None


def test_a_reader_who_takes_long_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind Ctrl-S on a terminal, or in a pager."""
    monkeypatch.setattr("pipeinfer.supervisor.links.ENDS_S", 0.2)
    output, before, (reading, writing) = KeptOutput(whole=False), os.dup(1), os.pipe()
    links, n_bytes = Links(True, output, ""), fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096) + 1000
    os.dup2(writing, 1)
    os.close(writing)
    try:
        links.begin(1)
        monkeypatch.setenv(SUPERVISOR, Attempt("job", 1, links.rendezvous).text())
        with connect_supervisor(OUTPUT) as link:  # type: ignore[union-attr]
            os.write(link.fileno(), b"x" * n_bytes)
        tell_exit(0)
        until(lambda: output.is_writing)
        ending = threading.Thread(target=links.end)
        ending.start()
        ending.join(timeout=1)
        assert ending.is_alive() and len(os.read(reading, 4096)) == 4096
        ending.join(timeout=60)
        assert not ending.is_alive() and len(os.read(reading, 4096)) == 1000
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(reading)


def test_a_complete_text_leaves_no_notes(tmp_path: Path) -> None:
    words = ["run", "-p", "def f(", "-n", "8", "-t", "1", "--resume", str(tmp_path / "notes")]
    code, out, errors = Supervised(1, words).finish()
    assert code == 0 and out and not (tmp_path / "notes").exists(), errors


@pytest.mark.parametrize("words", [["-f", "-"], ["--file=-"], ["-f", "/dev/stdin"]])
def test_standard_input_is_read_however_it_is_named(tmp_path: Path, words: list[str]) -> None:
    settings = ["run", "-n", "8", "-t", "1", "--temp", "0", *words]
    (tmp_path / "in").write_text("def read_lines(path):\n")
    with (tmp_path / "in").open() as file:
        job = Supervised(1, settings, stdin=file)
        code, out, errors = job.finish()
    expected = finish(1, [*settings[:7], "-p", "def read_lines(path):"]).stdout
    assert (code, out) == (0, expected), errors


def test_more_standard_input_comes_than_a_launcher_takes_before_it_is_read(tmp_path: Path) -> None:
    """MPICH's ends a job whose ranks have yet to start then."""
    (tmp_path / "in").write_text("x = 1\n" * 50_000)
    with (tmp_path / "in").open() as file:
        code, out, errors = Supervised(2, ["run", "-n", "8", "-t", "1", "-f", "-"], stdin=file).finish()
    assert (code, out) == (2, "") and "the prompt has" in errors and "starts again" not in errors, errors


def test_a_result_object_is_printed_once() -> None:
    job = Supervised(2, [*TEXT, "--json", "-v"])
    job.wait_for(b" loaded in ")
    job.strike(1)
    code, out, errors = job.finish()
    assert code == 0 and len(json.loads(out)["tokens"]) == 300, errors


def test_one_of_a_lost_attempt_is_not(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    output = KeptOutput(whole=True)
    links = Links(True, output, "")
    for number in (1, 2):
        links.begin(number)
        if number == 1:
            monkeypatch.setenv(SUPERVISOR, Attempt("job", number, links.rendezvous).text())
            with connect_supervisor(OUTPUT) as link:  # type: ignore[union-attr]
                os.write(link.fileno(), b"{}")
            until(lambda: bool(output._held))
        links.end()
    output.end()
    assert capfd.readouterr().out == ""


def test_a_launcher_that_never_starts_a_rank_is_not_started_again_and_again() -> None:
    done = finish(1, ["supervise", *launcher(2), "--bogus", str(COMMAND_FILE), *TEXT], warm=False)
    assert done.returncode == 2 and "no rank has started in 4 attempts: check the launcher's words" in done.stderr


def test_what_requests_say_is_no_report_of_a_lost_rank(tmp_path: Path) -> None:
    lines = [{"prompt": "def f(", f"pipeinfer: rank {rank} (host a); ending the job": 1} for rank in range(3)]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = Supervised(2, ["batch", str(tmp_path / "in"), "-n", "8", "-t", "1", "-o", str(tmp_path / "out")])
    code, _, errors = job.finish()
    assert code == 0 and len((tmp_path / "out").read_text().splitlines()) == 3, errors
    assert "rank 1 (host a); ending the job" in errors and "starts again" not in errors


def test_a_batch_loses_and_repeats_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("".join(f'{{"prompt": "def f{n}(", "ignore_eos": true}}\n' for n in range(8)))
    words = ["batch", str(tmp_path / "in"), "-n", "120", "--parallel", "3", "-t", "1", "--seed", "4", "-o"]
    job = Supervised(3, [*words, str(tmp_path / "out")])
    for rank in (0, 2):
        until(lambda: (tmp_path / "out").exists() and (tmp_path / "out").stat().st_size > 0, 60)
        time.sleep(0.5)
        job.strike(rank)
    code, _, errors = job.finish()
    assert code == 0, errors
    assert finish(2, [*words, str(tmp_path / "whole")]).returncode == 0
    found, whole = (
        sorted((result["index"], result["text"]) for result in map(json.loads, path.read_text().splitlines()))
        for path in (tmp_path / "out", tmp_path / "whole")
    )
    assert found == whole and len(found) == 8


def test_bad_input_ends_at_once() -> None:
    code, out, errors = Supervised(2, ["run", "-p", "x", "-m", "/nowhere.gguf"]).finish()
    assert (code, out) == (2, "") and "/nowhere.gguf does not exist" in errors and "starts again" not in errors


def test_what_dies_again_and_again_is_given_up(slow: list[str]) -> None:
    job = Supervised(2, slow, ["--restarts", "1"])
    for _ in range(2):
        job.read(20)
        job.strike(1)
        time.sleep(0.3)
    code, _, errors = job.finish()
    assert code != 0 and "the job was started again 1 time within 600 s (--restarts), and is not any more" in errors


def test_a_signal_is_handed_on_and_ends_it(text: str, slow: list[str]) -> None:
    job = Supervised(2, slow)
    begun = job.read(20)
    job.process.send_signal(signal.SIGINT)
    code, rest, errors = job.finish()
    assert code == 130 and text.startswith(begun + rest.rstrip("\n")), errors
    assert "starts again" not in errors


def test_one_that_comes_while_the_launcher_starts_ends_it_too(slow: list[str]) -> None:
    """Launchers may lose it then."""
    for delay_s in (0.0, 0.001, 0.002, 0.01, 0.1):
        job = Supervised(2, slow)
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children")
        until(lambda children=children: bool(children.read_text()), 20)  # type: ignore[misc]
        time.sleep(delay_s)
        job.process.send_signal(signal.SIGINT)
        code, _, errors = job.finish(timeout_s=60)
        assert code == 130 and "starts again" not in errors, errors


def test_one_ends_it_while_a_rank_stands_still(slow: list[str]) -> None:
    job = Supervised(2, [*slow, "--rank-timeout", "3"])
    job.read(20)
    job.strike(0, signal.SIGSTOP)
    job.process.send_signal(signal.SIGINT)
    code, _, errors = job.finish()
    assert code == 130 and "starts again" not in errors, errors


def test_its_own_death_leaves_nothing() -> None:
    job = Supervised(2, TEXT)
    job.read(20)
    os.kill(job.process.pid, signal.SIGKILL)
    job.finish()


def test_a_rank_that_stands_still_is_a_lost_one(text: str) -> None:
    job = Supervised(2, [*TEXT, "--rank-timeout", "3"])
    begun = job.read(50)
    job.strike(1, signal.SIGSTOP)
    code, rest, errors = job.finish()
    assert (code, begun + rest) == (0, text), errors


@pytest.mark.parametrize("n_above", [1, 2])
def test_a_launcher_that_stands_still_is_a_lost_job(text: str, n_above: int, tmp_path: Path) -> None:
    """`n_above`: 1 is the launcher's process above the ranks, 2 the launcher itself."""
    job = Supervised(2, [*TEXT, *held(tmp_path)])
    begun = job.read(50)
    pid = job.ranks()[1]
    for _ in range(n_above):
        pid = int(process_stat(pid)[1])
    os.kill(pid, signal.SIGSTOP)
    errors = job.wait_for(b"the job starts again").decode()
    let_go(tmp_path)
    code, rest, more = job.finish()
    errors += more
    assert (code, begun + rest) == (0, text), errors
    assert f"process {pid} of the launcher stands still" in errors


def test_another_model_in_its_place_ends_it(tmp_path: Path, slow: list[str]) -> None:
    """The text would go on with the other one's."""
    model = tmp_path / "model.gguf"
    shutil.copy(TARGET, model)
    job = Supervised(2, [*slow, "-m", str(model), "-md", "none"])
    job.read(20)
    shutil.copy(DRAFT, tmp_path / "other")
    (tmp_path / "other").rename(model)
    job.strike(1)
    code, _, errors = job.finish()
    assert code == 2 and "not those with which this job began" in errors, errors


def test_a_full_disk_is_named() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, "supervise", COMMAND_FILE, *TEXT],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            text=True,
        )
    assert done.returncode == 2 and "No space left on device; what was written there is not complete" in done.stderr
    assert "complete" not in done.stderr.replace("is not complete", "")


def test_a_launcher_that_stands_still_hears_signals(slow: list[str]) -> None:
    job = Supervised(2, slow)
    job.read(20)
    (launcher,) = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    os.kill(int(launcher), signal.SIGSTOP)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(timeout_s=60)[0] == 143
