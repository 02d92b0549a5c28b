"""What came of a text is noted; the same command goes on from there to the same text."""

import json
import os
import resource
import signal
import subprocess
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

from pipeinfer.cluster.watch.protocol import SUPERVISOR
from pipeinfer.cluster.watch.rendezvous import Rendezvous
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.process.supervised import Attempt
from pipeinfer.job.requests.journal import Journal, JournalFile, LinkJournal, ModelId, kept_settings
from pipeinfer.job.requests.request import GenerationRequest
from tests.support.cases import in_long
from tests.support.jobs import command_of, descendants, finish, start, until
from tests.support.paces import pace_words, slow_target

ASKED = GenerationRequest((1, 2), 9, 20, SamplingParams(seed=5), frozenset())
TEXT = ["-p", "def read_lines(path):\n", "-n", "300", "-c", "400", "--ignore-eos", "-t", "1"]


def test_a_text_goes_on_before_its_last_token(tmp_path: Path) -> None:
    first = JournalFile(tmp_path / "notes", {"numerics": "exact"})
    assert first.begin("x", ASKED) == ASKED
    first.add_output("x", [7, 8])
    first.add_output("x", [9])
    first.close()
    again = JournalFile(tmp_path / "notes", {"numerics": "exact"})
    other = GenerationRequest((1, 2), 9, 20, SamplingParams(seed=99), frozenset())
    answer = again.begin("x", other)
    assert (answer.begun, answer.sampling.seed) == ((7, 8), 5), "its seed too"
    assert again.texts == {"x": (5, [7, 8])}
    again.add_output("x", [9, 4])
    again.end("x")
    again.close()
    assert not (tmp_path / "notes").exists()


def test_texts_with_log_probabilities_come_again() -> None:
    journal = Journal()
    request = GenerationRequest((1, 2), 9, 20, SamplingParams(seed=5, n_logprobs=0), frozenset())
    journal.begin("x", request)
    journal.add_output("x", [7, 8])
    assert journal.begin("x", request).begun == () and journal.texts["x"] == (5, [])


def test_notes_are_taken_by_another_journal() -> None:
    journal, other = Journal(), Journal()
    for key in "xy":
        journal.begin(key, ASKED)
        journal.add_output(key, [1, 2])
    journal.end("x")
    for note in journal.notes():
        other.take(note)
    assert other.texts == {"y": (5, [1, 2])}


@pytest.mark.parametrize("content", [b"hello", b"{}\n", b'["time","x"]\n["x",1]\n', b'["x"', b'["x",1]\n["x",[1,true'])
def test_only_a_torn_note_is_cut_off(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    if content.startswith(b'["x'):
        JournalFile(path, {"numerics": "exact"}).write("z", 1)
        assert path.read_bytes() == content[: content.rfind(b"\n") + 1] + b'["numerics","exact"]\n["z",1]\n'
    else:
        with pytest.raises(UserError, match=r"line 1 is no note of a job; name another file"):
            JournalFile(path, {"numerics": "exact"})
        assert path.read_bytes() == content and kept_settings(path)["resumed"] == ""


def test_notes_may_be_of_any_length_but_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeinfer.job.requests.journal.MAX_LENGTH", 64)
    path = tmp_path / "notes"
    path.write_bytes(b'["numerics","exact"]\n["x",1]\n' + b'["x",[7,8,9]]\n' * 100)
    assert len(JournalFile(path, {}).texts["x"][1]) == 300 and kept_settings(path)["resumed"] == "exact"
    path = tmp_path / "others"
    wrong = b'["x",1]\n["' + b"x" * 100
    path.write_bytes(wrong)
    with pytest.raises(UserError, match=r"line 2 is no note of a job"):
        JournalFile(path, {})
    assert path.read_bytes() == wrong


def test_notes_say_with_which_numerics_their_texts_were_begun(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    JournalFile(path, {"numerics": "exact-q4_0.32-1f3a"})
    assert kept_settings(path)["resumed"] == "", "nothing was begun"
    path.unlink()
    journal = JournalFile(path, {"numerics": "exact-q4_0.32-1f3a"})
    journal.begin("x", ASKED)
    assert kept_settings(path)["resumed"] == "exact-q4_0.32-1f3a" and "resumed" not in kept_settings(None)
    path.write_bytes(path.read_bytes() + b'["x"]\n["y", 1')
    assert kept_settings(path)["resumed"] == "", "all are complete"


def test_notes_say_what_fit_chose(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    first = JournalFile(path, {"numerics": "exact", "fitted": "[5120]"})
    first.begin("x", ASKED)
    kept = kept_settings(path)
    assert (kept["resumed"], kept["fitted"]) == ("exact", "[5120]")
    os.close(first._fd)
    JournalFile(path, {"numerics": "exact", "fitted": ""}).begin("x", ASKED)
    kept = kept_settings(path)
    assert (kept["resumed"], kept["fitted"]) == ("exact", "")


def test_templates_see_the_time_at_which_texts_were_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_s, path = time.time(), tmp_path / "notes"
    file = JournalFile(path, {"numerics": "exact", "time": repr(1234.5)})
    assert kept_settings(path)["now_s"] >= start_s, "nothing was begun"
    file.begin("x", ASKED)
    assert kept_settings(path)["now_s"] == 1234.5 and kept_settings(None)["now_s"] >= start_s
    attempt = Attempt("job", 2, Rendezvous("", (), 0, ""), now_s=99.5)
    monkeypatch.setenv(SUPERVISOR, attempt.text())
    assert kept_settings(None)["now_s"] == 99.5
    monkeypatch.undo()
    file.end("x")
    assert kept_settings(path)["now_s"] >= start_s, "all are complete"


def test_a_supervisor_that_ends_meanwhile_is_one_line() -> None:
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises(UserError, match="the supervisor of this job does not answer"):
        LinkJournal(ours, ModelId("", ""))
    ours.close()


def test_one_job_writes_it(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / "notes", {"numerics": "exact"})
    with pytest.raises(UserError, match="another job is writing it"):
        JournalFile(tmp_path / "notes", {"numerics": "exact"})
    file.close()
    JournalFile(tmp_path / "notes", {"numerics": "exact"}).close()


def test_notes_may_stay_in_a_folder_from_which_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError

    path = tmp_path / "notes"
    file = JournalFile(path, {"numerics": "exact"})
    file.begin("x", ASKED)
    file.end("x")
    monkeypatch.setattr(Path, "unlink", refuse)
    file.close()
    assert not JournalFile(path, {"numerics": "exact"}).texts


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "notes")
    assert not kept_settings(path).get("resumed")


def test_a_device_keeps_no_notes() -> None:
    with pytest.raises(UserError, match="--resume /dev/full is no file"):
        JournalFile(Path("/dev/full"), {"numerics": "exact"})


def test_a_full_disk_ends_the_notes_not_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    journal = JournalFile.__new__(JournalFile)
    Journal.__init__(journal)
    journal._job_settings = {"numerics": "exact"}
    journal.path, journal._is_full, journal._fd = Path("/dev/full"), False, os.open("/dev/full", os.O_WRONLY)
    journal.add_output("x", []) if journal.begin("x", ASKED) else None
    assert capsys.readouterr().err.count("output is not noted from now on") == 1


def test_a_note_for_which_there_was_half_the_room_is_the_last_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A note behind it would make the file unreadable."""
    path, before = tmp_path / "notes", resource.getrlimit(resource.RLIMIT_FSIZE)
    file = JournalFile(path, {"numerics": "exact"})
    file.begin("x", ASKED)
    file.add_output("x", [7])
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))
        file.add_output("x", [8])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file.add_output("x", [9])
    file.close()
    assert capsys.readouterr().err.count("output is not noted from now on") == 1
    again = JournalFile(path, {"numerics": "exact"})
    assert again.texts == {"x": (5, [7])}
    again.close()


@pytest.fixture
def slow(tmp_path: Path) -> list[str]:
    """So a text is not at its end before a rank is killed."""
    return pace_words(tmp_path, slow_target(10.0))


def kill_a_rank(job: subprocess.Popen[str], notes: Path, n_lines: int) -> str:
    """Once so much is noted; what the job says of it."""

    def is_noted() -> bool:
        assert job.poll() is None
        return notes.exists() and notes.read_bytes().count(b"\n") >= n_lines

    until(is_noted, 120)
    os.kill(max(pid for pid in descendants(job.pid) if b"--resume" in command_of(pid)), signal.SIGKILL)
    return job.communicate(timeout=60)[1]


@pytest.mark.parametrize(
    "sampling",
    [
        in_long(["--temp", "0.8", "--seed", "3", "--repeat-penalty", "1.1"]),
        ["--temp", "0.8", "--seed", "3", "--grammar", "root ::= [a-z ()\\n]+ [z] [z] [z] [z]", "--stop", "zzzz"],
    ],
)
def test_a_killed_text_goes_on(tmp_path: Path, sampling: list[str], slow: list[str]) -> None:
    words, notes = ["run", *TEXT, *sampling], tmp_path / "notes"
    words = [word for word in words if word != "--ignore-eos" or "--grammar" not in words]
    errors = kill_a_rank(start(3, [*words, *slow, "--resume", str(notes)]), notes, 30)
    assert f"ending the job; the same command goes on from {notes}" in errors
    n_noted = sum(len(note[1]) for note in map(json.loads, notes.read_text().splitlines()) if isinstance(note[1], list))
    again, alone = finish(2, [*words, "-v", "--resume", str(notes)]), finish(1, [*words, "--policy", "iterative"])
    assert f"{n_noted - 1} tokens of it are noted" in again.stderr
    assert again.stdout == alone.stdout and again.returncode == 0 and not notes.exists()


def test_a_killed_batch_goes_on_within_its_texts(tmp_path: Path, slow: list[str]) -> None:
    source, notes = tmp_path / "in.jsonl", tmp_path / "notes"
    source.write_text("".join(f'{{"prompt": "def f{n}(", "ignore_eos": true}}\n' for n in range(6)))
    words = ["batch", str(source), "-o", str(tmp_path / "out"), "-n", "150", "--parallel", "3", "-t", "1"]
    kill_a_rank(start(3, [*words, *slow, "--seed", "4", "--resume", str(notes)]), notes, 60)
    assert finish(3, [*words, "--seed", "4", "--resume", str(notes)]).returncode == 0 and not notes.exists()
    words[3] = str(tmp_path / "whole")
    assert finish(2, [*words, "--seed", "4"]).returncode == 0
    texts = [
        {result["index"]: result["text"] for result in map(json.loads, Path(path).read_text().splitlines())}
        for path in (tmp_path / "out", tmp_path / "whole")
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 6
