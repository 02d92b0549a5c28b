"""A supervised chat that loses a rank goes on: nobody has to say anything again, and the answers are the same."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from pipeinfer.job.process.stop import ONE_PRESS_S
from tests.support.cases import in_long
from tests.support.jobs import COMMAND, environment, until
from tests.support.paces import pace_words, slow_runs
from tests.support.supervised import Supervised

WORDS = ["chat", "-n", "80", "-c", "2048", "-t", "1", "--temp", "0.8", "-s", "3", "--ignore-eos"]
TYPED = ["def f(x):\n", "/regen\n", "class \\\nA:\n", "/clear\n", "import os\n", "/nothing\n", "x = 3\n"]


@pytest.fixture(scope="module")
def text() -> str:
    """Of a chat that nothing happens to."""
    words, typed = [*COMMAND, *WORDS], "".join(TYPED)
    done = subprocess.run(words, input=typed, capture_output=True, text=True, env=environment(), timeout=180)
    assert done.returncode == 0 and len(done.stdout) > 500, done.stderr
    return done.stdout


def say(job: Supervised, line: str) -> None:
    assert job.process.stdin
    job.process.stdin.write(line.encode())


def ranks_are_new(job: Supervised, before: dict[int, int]) -> bool:
    return len(now := job.ranks()) == len(before) and not {*now.values()} & {*before.values()}


@pytest.mark.parametrize(("at_once", "struck"), [(True, {0: 2, 4: 0}), in_long(False, {0: 1, 2: 0})])
def test_a_chat_goes_on_whichever_rank_dies(text: str, at_once: bool, struck: dict[int, int]) -> None:
    """`struck`: by the number of what was typed, a rank."""
    job = Supervised(3, WORDS, stdin=subprocess.PIPE)
    begun = ""
    if at_once:
        say(job, "".join(TYPED))
    for number, line in enumerate(TYPED):
        if not at_once:
            say(job, line)
        if number % 2 == 0:  # those that are answered
            begun += job.read(30)
        if number in struck:
            job.strike(struck[number])
    assert job.process.stdin
    job.process.stdin.close()
    job.process.stdin = None
    code, rest, errors = job.finish()
    assert (code, begun + rest) == (0, text), errors
    assert errors.count("the job starts again") == len(struck) and errors.count("there is no /nothing") == 1, errors


def test_what_was_cleared_is_not_written_again(text: str) -> None:
    job = Supervised(2, WORDS, stdin=subprocess.PIPE)
    say(job, "".join(TYPED))
    begun = job.read(len(text) - 60)
    job.strike(1)
    assert job.process.stdin
    job.process.stdin.close()
    job.process.stdin = None
    code, rest, errors = job.finish()
    assert (code, begun + rest) == (0, text) and "the job starts again" in errors, errors


def test_an_answer_that_was_stopped_stays_so(tmp_path: Path) -> None:
    pace = pace_words(tmp_path, slow_runs(50))
    job = Supervised(2, [*WORDS, "-n", "1500", *pace], stdin=subprocess.PIPE)
    say(job, "def f(x):\n")
    begun = job.read(20)
    job.process.send_signal(signal.SIGINT)
    job.wait_for(b"prompt tokens read")
    before = job.ranks()
    job.strike(1)
    until(lambda: ranks_are_new(job, before))
    say(job, "/quit\n")
    code, rest, errors = job.finish()
    assert code == 0 and "the job starts again" in errors, errors
    assert 20 < len(begun + rest) < 1400, "it did not go on"


def test_it_is_left_with_an_interrupt() -> None:
    job = Supervised(2, WORDS, stdin=subprocess.PIPE)
    say(job, "def f(x):\n")
    job.read(20)
    job.process.send_signal(signal.SIGINT)
    job.wait_for(b"prompt tokens read")
    time.sleep(1.2 * ONE_PRESS_S)  # sooner it would be the same one
    job.process.send_signal(signal.SIGINT)
    job.process.wait(60)  # before standard input is closed, which ends a chat too
    code, _, errors = job.finish()
    assert code == 130 and "starts again" not in errors, errors


def test_objects_are_refused() -> None:
    code, _, errors = Supervised(1, ["chat", "--json"]).finish()
    assert code == 2 and "--json of a chat" in errors
