"""A chat whose lines are noted goes on in a later job, with the same answers."""

import subprocess
from pathlib import Path

import pytest

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.chat.history import ChatNotes
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
    for number, line in enumerate(["one", "/clear", "two", "/clear", "/clear"]):
        notes.add(line, 7, number)
        if line == "/clear":
            notes.clear()
        found.append(len(notes.journal.texts))
    assert found == [1, 1, 2, 1, 1]
    notes.add("three", 7, 9)
    assert [turn.message for turn in again(notes.journal).past] == ["/clear", "three"]


def test_notes_of_something_else_are_refused() -> None:
    notes = ChatNotes(Journal(), "it")
    notes.add("one", 7, 4)
    with pytest.raises(UserError, match="not of this chat"):
        again(notes.journal, "another")
    other = Journal()
    other.open("a text", 3)
    with pytest.raises(UserError, match="not of this chat"):
        ChatNotes(other, "it")


def test_a_later_job_shows_the_chat_and_goes_on(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", SHAPE, template=CHAT_TEMPLATE)
    words = ["chat", "-m", str(model), "-n", "20", "-c", "512", "-t", "1", "--temp", "0.8", "--ignore-eos"]

    def talk(n_ranks: int, typed: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*launcher(n_ranks), *COMMAND, *words, *more],
            input=typed,
            capture_output=True,
            text=True,
            env=environment(),
            timeout=60,
        )

    resume = ["--resume", str(tmp_path / "notes")]
    first = talk(1, "the model\n/regen\n", *resume, "-s", "3")
    later = talk(2, "of a\n", *resume, "-s", "3")
    whole = talk(1, "the model\n/regen\nof a\n", "-s", "3")
    assert later.returncode == first.returncode == 0, later.stderr
    assert later.stdout == whole.stdout and later.stdout.startswith(first.stdout)
    assert "> the model\n" in later.stderr and later.stderr.count("prompt tokens read") == 1
    refused = talk(1, "", *resume, "-s", "3", "-n", "30")
    assert refused.returncode == 2 and "not of this chat" in refused.stderr
