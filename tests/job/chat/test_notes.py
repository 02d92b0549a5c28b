"""A chat whose lines are noted goes on in a later job, with the same answers."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from pipeinfer.cluster.watch.protocol import SUPERVISOR
from pipeinfer.cluster.watch.rendezvous import Rendezvous
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.chat.history import ChatNotes
from pipeinfer.job.process.supervised import Attempt
from pipeinfer.job.requests.journal import Journal
from pipeinfer.job.requests.request import GenerationRequest
from tests.support.gguf_factory import CHAT_TEMPLATE, Shape, write_model
from tests.support.jobs import COMMAND, environment, launcher

SHAPE = Shape(n_layer=2, n_embd=128, n_head=2, n_head_kv=1, n_ff=256, n_vocab=384)
REQUEST = GenerationRequest((1, 2), 50, 100, SamplingParams(seed=7), frozenset())


def again(journal: Journal, about: str = "it") -> ChatNotes:
    """As a later job reads them."""
    later = Journal()
    for note in journal.notes():
        later.take(note)
    return ChatNotes(later, about)


def test_only_the_newest_answer_goes_on() -> None:
    notes = ChatNotes(Journal(), "it")
    notes.add("one", 7, 4)
    notes.add_output([5, 6])
    notes.add_output([8])
    notes.add("two", 7, 8)
    notes.add_output([9, 10])
    found = again(notes.journal)
    assert [(turn.message, turn.tokens, turn.is_whole) for turn in found.past] == [
        ("one", (5, 6, 8), True),
        ("two", (9, 10), False),
    ]
    whole = found.begin(REQUEST, found.past[0])
    assert (whole.begun, whole.n_predict) == ((5, 6), 3)
    found.add_output([8])
    begun = found.begin(REQUEST, found.past[1])
    assert (begun.begun, begun.n_predict) == ((9,), 50)
    found.add_output([10])
    found.add_output([11])
    assert [turn.tokens for turn in again(found.journal).past] == [(5, 6, 8), (9, 10, 11)], "nothing is doubled"


def test_what_was_cleared_is_gone() -> None:
    notes, found = ChatNotes(Journal(), "it"), list[int]()
    for line in ("one", "two", "/clear", "two", "/clear"):
        notes.add(line, 7, 0)
        if line == "/clear":
            notes.clear()
        found.append(len(notes.journal.texts))
    assert found == [1, 2, 1, 2, 1]
    notes.add("three", 7, 9)
    assert [turn.message for turn in again(notes.journal).past] == ["/clear", "three"]


def test_what_a_supervised_chat_cleared_is_gone_with_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt prints again what the last one had printed."""

    def supervise(job: str) -> None:
        monkeypatch.setenv(SUPERVISOR, Attempt(job, 1, Rendezvous("", (), 0, "")).text())

    supervise("a")
    notes = ChatNotes(Journal(), "it")
    lines = ["one", "/clear", "two", "/clear", "three"]
    for number, line in enumerate(lines):
        notes.add(line, 7, number)
        if line == "/clear":
            notes.clear()
    assert [turn.message for turn in again(notes.journal).past] == lines
    supervise("b")
    later = again(notes.journal)
    assert [turn.message for turn in later.past] == lines[3:]
    later.add("/clear", 7, 5)
    later.clear()
    assert [turn.message for turn in again(later.journal).past] == [*lines[3:], "/clear"]
    monkeypatch.delenv(SUPERVISOR)
    assert [turn.message for turn in again(later.journal).past] == ["/clear"]


def test_notes_of_something_else_are_refused() -> None:
    notes = ChatNotes(Journal(), "it")
    notes.add("one", 7, 4)
    with pytest.raises(UserError, match="not of this chat"):
        again(notes.journal, "another")
    other = Journal()
    other.open("a text", 3)
    with pytest.raises(UserError, match="not of this chat"):
        ChatNotes(other, "it")


Talk: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    """Says lines in a job of so many ranks."""
    model = write_model(tmp_path / "model.gguf", SHAPE, template=CHAT_TEMPLATE)
    words = ["chat", "-m", str(model), "-n", "20", "-c", "512", "-t", "1", "--temp", "0.8", "-s", "3", "--ignore-eos"]

    def talk(n_ranks: int, typed: str, *more: str) -> subprocess.CompletedProcess[str]:
        command, environ = [*launcher(n_ranks), *COMMAND, *words, *more], environment()
        return subprocess.run(command, input=typed, capture_output=True, text=True, env=environ, timeout=60)

    return talk


def test_a_later_job_renders_earlier_turns_with_their_time(talk: Talk, tmp_path: Path) -> None:
    (template := tmp_path / "template").write_text("{{ strftime_now('%S%M%H') }}" + CHAT_TEMPLATE)
    words = ["--resume", str(tmp_path / "notes"), "--chat-template-file", str(template), "--json"]
    first, later = (json.loads(talk(1, line, *words).stdout)["prompt_tokens"] for line in ("the model\n", "of a\n"))
    assert later[: len(first)] == first


def test_files_of_a_chat_are_known_by_their_content(talk: Talk, tmp_path: Path) -> None:
    def say(name: str, system: str, template: str = CHAT_TEMPLATE) -> int:
        (said := tmp_path / f"{name}.txt").write_text(system)
        (given := tmp_path / f"{name}.jinja").write_text(template)
        notes = str(tmp_path / "notes")
        return talk(1, "a\n", "--resume", notes, "-sysf", str(said), "--chat-template-file", str(given)).returncode

    assert [say("one", "the"), say("two", "the")] == [0, 0]
    assert [say("two", "of"), say("two", "the", f"x{CHAT_TEMPLATE}")] == [2, 2]


def test_a_later_job_shows_the_chat_and_goes_on(talk: Talk, tmp_path: Path) -> None:
    resume = ["--resume", str(tmp_path / "notes")]
    first = talk(1, "the model\n/regen\n", *resume)
    later = talk(2, "of a\n", *resume)
    whole = talk(1, "the model\n/regen\nof a\n")
    assert later.returncode == first.returncode == 0, later.stderr
    assert later.stdout == whole.stdout and later.stdout.startswith(first.stdout)
    assert "> the model\n" in later.stderr and later.stderr.count("prompt tokens read") == 1
    refused = talk(1, "", *resume, "-n", "30")
    assert refused.returncode == 2 and "not of this chat" in refused.stderr
