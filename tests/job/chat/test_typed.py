"""Chats at a terminal, also where it is the launcher's: lines are edited, Ctrl-C stops answers, and the terminal is as
before whatever ends."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import termios
import time

import pytest

from pipeinfer.job.chat.lines import end_of_line
from pipeinfer.job.process.streams import RawTerminal
from tests.support.cases import in_long
from tests.support.jobs import COMMAND, launcher, until
from tests.support.typist import Typist

CHAT = [*COMMAND, "chat", "-md", "none", "-t", "1", "--temp", "0.8", "-s", "3", "--ignore-eos"]
LONG, SHORT = ["-c", "8000"], ["-c", "1000", "-n", "20"]  # no answer fills the long one before it is stopped
ANSWERED = "prompt tokens read"
WAYS = {"alone": [], "mpirun": launcher(2), "supervised": [*COMMAND, "supervise", *launcher(2)]}


def stop_answer(typist: Typist) -> None:
    """By Ctrl-C, once it has begun; the line is `def`. Up to the next prompt."""
    typist.wait_for("def")
    typist.wait_for("\n")
    typist.wait_for_more()
    typist.type("\x03")
    (n_tokens,) = re.findall(r"(\d+) tokens, ", typist.wait_for(ANSWERED))
    assert int(n_tokens) < 7000, "it has filled the context"
    typist.wait_for("> ")


@pytest.mark.parametrize("way", ["alone", in_long("mpirun"), "supervised"])
def test_lines_are_edited_and_each_ctrl_c_stops_an_answer(way: str) -> None:
    with Typist([*WAYS[way], *CHAT, *LONG]) as typist:
        typist.wait_for("> ")
        for _ in range(3):
            typist.type("def\r")
            stop_answer(typist)
        typist.type("/helx\x7fp\r")
        assert "there is no" not in typist.wait_for("/quit")
        typist.wait_for("> ")
        typist.type("\x1b[A\r")  # the line before, from the history
        assert "there is no" not in typist.wait_for("/quit")
        typist.wait_for("> ")
        typist.type("\x1b[A\x1b[A\r")
        stop_answer(typist)
        typist.type("/quit\r")
        assert typist.end() == 0 and typist.attributes == typist.before


@pytest.mark.parametrize("way", [in_long("mpirun"), "supervised"])
def test_ctrl_c_and_ctrl_d_at_the_prompt_leave(way: str) -> None:
    for key, code in (("\x03", 130), ("\x04", 0)):
        with Typist([*WAYS[way], *CHAT, *LONG]) as typist:
            typist.wait_for("> ")
            typist.type(key)
            assert typist.end() == code and typist.attributes == typist.before


def test_what_is_typed_meanwhile_is_not_mixed_into_an_answer() -> None:
    with Typist([*launcher(2), *CHAT, *LONG]) as typist:
        typist.wait_for("> ")
        typist.type("def\r")
        typist.wait_for("\n")
        typist.wait_for_more()
        typist.type("/hZZZ\x7f\x7f\x7felp\r/n")
        time.sleep(0.2)
        typist.type("\x03")
        answer = typist.wait_for(ANSWERED)
        assert "ZZZ" not in answer and "elp" not in answer
        assert "there is no" not in typist.wait_for("/quit"), "the line is whole"
        typist.wait_for("> /n")
        typist.type("\x1b[Dhelp\x0b\r")
        assert "there is no" not in typist.wait_for("/quit")
        typist.wait_for("> ")
        typist.type("\x1b[200~x\ry\x1b[201~\r")  # a paste
        time.sleep(0.3)
        typist.type("/stop\r/quit\r")
        assert typist.end() == 0 and typist.seen.count(ANSWERED) == 1


@pytest.mark.parametrize("struck", ["rank 0", "the launcher"])
def test_the_terminal_is_as_before_whoever_is_killed(struck: str) -> None:
    with Typist([*launcher(2), *CHAT, *LONG]) as typist:
        typist.wait_for("> ")
        assert typist.attributes != typist.before
        os.kill(typist.rank(0) if struck == "rank 0" else typist.process.pid, signal.SIGKILL)
        assert typist.end() != 0
        until(lambda: typist.attributes == typist.before)


def test_a_quit_key_kills() -> None:
    with Typist([*launcher(2), *CHAT, *LONG]) as typist:
        typist.wait_for("> ")
        typist.type("\x1c")
        assert typist.end() not in (0, 2, 130)
        until(lambda: typist.attributes == typist.before)


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
@pytest.mark.parametrize("way", ["mpirun", in_long("supervised")])
def test_a_shell_has_its_terminal_while_the_chat_is_suspended(way: str) -> None:
    with Typist(["bash", "--norc", "--noediting", "-i"]) as typist:
        typist.type(f"PS1='SHELL''$ '; {shlex.join([*WAYS[way], *CHAT, *LONG])}; echo code $?\r")
        typist.wait_for("> ")
        typist.type("\x1a")
        typist.wait_for("SHELL$ ")
        assert typist.attributes == typist.before
        typist.type("fg\r")
        until(lambda: typist.attributes != typist.before)
        for _ in range(2):
            typist.type("def\r")
            stop_answer(typist)
        typist.type("/quit\r")
        typist.wait_for("SHELL$ ")
        assert typist.attributes == typist.before


@pytest.mark.parametrize("rank", [0, in_long(1)])
def test_a_line_that_is_being_typed_outlives_a_rank(rank: int) -> None:
    with Typist([*WAYS["supervised"], *CHAT, *SHORT]) as typist:
        typist.wait_for("> ")
        typist.type("def f(x):\r")
        typist.wait_for(ANSWERED)
        typist.wait_for("> ")
        typist.type("/hek\x7f")
        time.sleep(0.3)
        os.kill(typist.rank(rank), signal.SIGKILL)
        typist.wait_for("starts again")
        typist.wait_for("> /he")
        typist.type("lp\r")
        assert "there is no" not in typist.wait_for("/quit")
        typist.wait_for("> ")
        typist.type("/quit\r")
        assert typist.end() == 0 and typist.attributes == typist.before


def test_a_paste_is_one_line() -> None:
    assert [end_of_line(keys) for keys in (b"", b"on", b"one\rtwo", b"\n")] == [-1, -1, 4, 1]
    paste = b"\x1b[200~one\rtwo\n\x1b[201~"
    assert end_of_line(paste) == end_of_line(paste[:12]) == -1
    assert end_of_line(b"x" + paste + b"\r\r") == len(paste) + 2


def test_the_keys_of_signals_are_those_of_the_terminal() -> None:
    master, terminal = os.openpty()
    before = termios.tcgetattr(terminal)
    before[6][termios.VINTR], before[6][termios.VSUSP] = b"\x0b", b"\0"
    termios.tcsetattr(terminal, termios.TCSANOW, before)
    heard: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    raw = RawTerminal(terminal, os.getpid())
    try:
        assert raw.act(b"a\x03b\0") == b"a\x03b\0" and not heard
        assert raw.act(b"a\x0bb") == b"ab"
        until(lambda: heard == [signal.SIGINT])
    finally:
        raw.close()
        signal.signal(signal.SIGINT, handler)
    assert termios.tcgetattr(terminal) == before
    os.close(master)
    os.close(terminal)
