"""Chats: the same texts however they are computed, only new tokens evaluated, and what can be typed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.core.blocks import Span
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Request
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.errors import UserError
from pipeinfer.job.chat.chat import ChatInterrupts
from pipeinfer.job.chat.history import History
from pipeinfer.job.chat.lines import PipedLines
from pipeinfer.job.requests.chat_format import ChatFormat
from pipeinfer.models.demo import TARGET
from pipeinfer.models.drafts.model_drafter import ModelDrafter
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.text.chat_template import ChatTemplate, Rendered, encode_rendered
from pipeinfer.models.text.messages import ChatMessage
from pipeinfer.models.text.tokenizer import TextStream, Tokenizer
from pipeinfer.policies import POLICIES, make_policy
from tests.core.test_engine import toy_engine
from tests.support.audit import audit_engine
from tests.support.counted import Counted
from tests.support.gguf_factory import CHAT_TEMPLATE, Shape, write_model
from tests.support.jobs import COMMAND, environment, launcher, start
from tests.support.toy import ToyPipeline

N_CELLS, N_CTX, N_SEQ, N_TURNS, N_PREDICT = 1536, 1024, 31, 20, 6
SHAPE = Shape(n_layer=3, n_embd=128, n_head=2, n_head_kv=1, n_ff=256, n_vocab=384, n_strong=1, weak=0.3)
LONG = "the model of the layer and the rank is in a token "


@dataclass(frozen=True, slots=True)
class QuickFormat(ChatFormat):
    """CHAT_TEMPLATE, without a process that renders it; `forgets`: as some do, it leaves out what was thought."""

    forgets: bool = False

    def render(self, messages: Sequence[ChatMessage]) -> Rendered:
        said = "".join(f"<|{each.role}|>\n{self._content(each)}<|end|>\n" for each in messages)
        return Rendered(f"<s>{said}<|assistant|>\n")

    def _content(self, message: ChatMessage) -> str:
        return message.content.rpartition("</think>")[2] if self.forgets else message.content


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("chat") / "model.gguf", SHAPE, template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = replace(SHAPE, n_layer=1)
    return write_model(tmp_path_factory.mktemp("chat") / "draft.gguf", shape, template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Iterator[Tokenizer]:
    found = Tokenizer(model)
    yield found
    found.close()


def quick(tokenizer: Tokenizer, forgets: bool = False) -> History:
    return History(QuickFormat(ChatTemplate("", ""), tokenizer, None, (), forgets=forgets))


def stages_of(path: Path, n_stages: int, exact: bool = True) -> list[LlamaStage]:
    info = read_model_info(path)
    edges = [0, *range(1, n_stages), info.n_layer]
    params = LlamaParams(N_CELLS, N_SEQ + 1, n_batch=129, n_outputs_max=33, exact=exact)
    return [LlamaStage(open_slice(info, first, last), params) for first, last in pairwise(edges)]


def converse(
    stages: Sequence[LlamaStage], draft: LlamaStage, tokenizer: Tokenizer, policy: Policy, keep: bool = True
) -> tuple[list[list[int]], list[int]]:
    """The tokens of each turn, all of them, and how many rows of each prompt were evaluated."""
    for stage in (*stages, draft):
        stage.clear()
    drafter = ModelDrafter(draft, SequencePool(N_SEQ, N_CELLS), 32)
    pool = SequencePool(N_SEQ, N_CELLS, parked=True)
    pipeline = ToyPipeline(stages, random.Random(len(stages)))
    engine = toy_engine(pipeline, pool, drafter, n_chunk=128, n_rows=32, blocks=True)
    history, turns, n_context = quick(tokenizer), [], []
    ends = frozenset(filter(tokenizer.is_end, range(tokenizer.n_vocab)))
    for turn in range(N_TURNS):
        asked = history.ask(LONG * 2 if turn in (0, 12) else f"is {turn}", N_CTX)
        params = SamplingParams(seed=1, temp=0.8)
        request = Request(turn, asked.tokens, N_PREDICT, params, N_CTX, ends, asked.spans, keep)
        heard = Counted()
        engine.add(request, policy.begin(), heard)
        engine.complete()
        audit_engine(engine)
        stream = TextStream(tokenizer, markers=True)
        text = "".join(map(stream.push, request.tokens[len(asked.tokens) :])) + stream.flush()
        history.answered(request.tokens, text, whole=True)
        turns.append(request.tokens)
        n_context.append(heard.n_context)
    return turns, n_context


def test_twenty_turns_are_the_same_at_every_split_and_policy_and_cost_their_new_tokens(
    model: Path, draft: Path, tokenizer: Tokenizer
) -> None:
    (small,) = stages_of(draft, 1, exact=False)
    expected: list[list[int]] = []
    for n_stages in (1, 2, 3):
        stages = stages_of(model, n_stages)
        for name in POLICIES:
            turns, n_context = converse(stages, small, tokenizer, make_policy(name, {}))
            expected = expected or turns
            assert turns == expected, f"{name} on {n_stages} stages"
            for before, after, n in zip(turns, turns[1:], n_context[1:], strict=False):
                # the newest token of the turn before was not evaluated yet, the last of the prompt is the root
                n_new = len(after) - len(before) - N_PREDICT
                assert after[: len(before) - 1] == before[:-1] and n <= n_new + N_PREDICT, f"{name}: {n} rows"
                assert n < 20 or len(after) - len(before) > 40
        if n_stages == 1:
            forgotten, n_context = converse(stages, small, tokenizer, make_policy("pipeinfer", {}), keep=False)
            assert forgotten == expected, "the text depends on what is kept"
            assert n_context[-1] > 400
        for stage in stages:
            stage.close()
    small.close()


# -- prompts


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=True)


def test_a_prompt_goes_on_from_the_tokens_that_were_said(tokenizer: Tokenizer) -> None:
    history, end = quick(tokenizer), tokens_of(tokenizer, "<|end|>")
    first = history.ask("the", N_CTX)
    assert list(first.tokens) == encode_rendered(tokenizer, Rendered("<s><|user|>\nthe<|end|>\n<|assistant|>\n"))
    odd = [tokens_of(tokenizer, letter)[-1] for letter in "ing"]  # the vocabulary would write it otherwise
    history.answered([*first.tokens, *odd, *end], "ing", whole=True)
    second = history.ask("a", N_CTX)
    rest = tokens_of(tokenizer, "<|end|>\n<|user|>\na<|end|>\n<|assistant|>\n")
    assert list(second.tokens) == [*first.tokens, *odd, *rest]
    history.answered(second.tokens, "", whole=True)  # stopped before anything was said
    third = history.ask("b", N_CTX)
    assert third.tokens[: len(second.tokens)] == second.tokens


def test_what_was_said_is_taken_back(tokenizer: Tokenizer) -> None:
    history = quick(tokenizer)
    first = history.ask("the", N_CTX)
    answer = [*first.tokens, *tokens_of(tokenizer, "<think>")]
    history.answered(answer, "<think>", whole=True)
    second = history.ask("a", N_CTX)
    history.answered([*second.tokens, 5], "x", whole=False)
    assert history.take_back() == "a" and history.ask("a", N_CTX).tokens == second.tokens
    assert [history.take_back(), history.take_back(), history.take_back()] == ["a", "the", None]
    history.clear()
    assert history.ask("the", N_CTX) == first


def test_a_template_that_rewrites_what_was_said_costs_what_it_rewrote(tokenizer: Tokenizer) -> None:
    history = quick(tokenizer, forgets=True)
    first = history.ask(LONG * 2, N_CTX)
    thought = tokens_of(tokenizer, "<think>the</think>a")
    history.answered([*first.tokens, *thought], "<think> the</think> a", whole=True)
    second = history.ask("b", N_CTX)
    assert second.tokens[: len(first.tokens)] == first.tokens, "what was asked is as it was"
    assert tokens_of(tokenizer, "<think>")[0] not in second.tokens
    assert second.spans == first.spans == (Span(0, len(first.tokens) - 1),)


def test_a_conversation_that_fills_the_context_is_refused_and_goes_on(tokenizer: Tokenizer) -> None:
    history = quick(tokenizer)
    first = history.ask("the", 30)
    history.answered(first.tokens, "", whole=True)
    with pytest.raises(UserError, match=r"the context holds 30 .* /clear"):
        history.ask(LONG, 30)
    assert len(history.messages) == 2 and history.ask("a", 60).tokens[: len(first.tokens)] == first.tokens


# -- lines and Ctrl-C


def test_lines_of_a_pipe_come_whole_whatever_their_pieces() -> None:
    reading, writing = os.pipe()
    leaves = False
    lines = PipedLines(reading, lambda: leaves)
    os.write(writing, b"one\r\n\ntw")
    assert [lines.read("> "), lines.read("> ")] == ["one", ""]
    assert not lines.next_is("/stop")
    threading.Timer(0.2, lambda: os.write(writing, b"o \xc3\xa9\n/stop\nthree")).start()
    assert lines.read("> ") == "two é"
    assert lines.next_is("/stop") and not lines.next_is("/stop")
    leaves = True
    assert lines.read("> ") is None
    os.close(writing)
    leaves = False
    assert [lines.read("> "), lines.read("> ")] == ["three", None]
    os.close(reading)
    assert PipedLines(-1, lambda: False).read("> ") is None


def test_a_paste_that_a_launcher_hands_on_is_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeinfer.job.chat.lines.PASTE_S", 60.0)
    reading, writing = os.pipe()
    lines = PipedLines(reading, lambda: False, joins=True)
    os.write(writing, b"one\r\n\ntw")
    threading.Timer(0.02, lambda: os.write(writing, b"o\n\xc3")).start()
    assert lines.read("> ") == "one\n\ntwo"
    monkeypatch.undo()
    os.write(writing, b"\xa9\n")
    assert lines.read("> ") == "é"
    os.write(writing, b"/clear\nthree\n")
    assert [lines.read("> "), lines.read("> ")] == ["/clear", "three"]
    os.close(writing)
    assert lines.read("> ") is None
    os.close(reading)


@pytest.mark.parametrize("joins", [False, True])
def test_a_byte_order_mark_begins_no_message(joins: bool) -> None:
    reading, writing = os.pipe()
    lines = PipedLines(reading, lambda: False, joins)
    os.write(writing, b"\xef\xbb\xbf/clear\none\n")
    os.close(writing)
    assert [lines.read("> "), lines.n_read, lines.read("> ")] == ["/clear", 10, "one"]
    os.close(reading)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)  # a directory
    lines = PipedLines(descriptor, lambda: False)
    assert not lines.next_is("/stop")
    with pytest.raises(UserError, match="standard input cannot be read: Is a directory"):
        lines.read("> ")
    os.close(descriptor)


def test_a_template_that_makes_nothing_is_named(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "adds_bos", False)
    format = ChatFormat(ChatTemplate("", "--chat-template-file empty.txt"), tokenizer, None, ())
    with pytest.raises(UserError, match=r"--chat-template-file empty.txt makes no tokens of this"):
        History(format).ask("the", N_CTX)


def test_a_first_interrupt_ends_the_answer_a_second_one_the_job() -> None:
    typed = False
    interrupts = ChatInterrupts(lambda: typed)
    for _ in range(2):
        assert not interrupts.due() and interrupts.interrupt(signal.SIGINT)
        assert interrupts.due() and not interrupts.due(), "once"
        assert not interrupts.interrupt(signal.SIGINT)
        with interrupts.reading():
            assert not interrupts.due() and not interrupts.ends_chat
    typed = True
    assert interrupts.due() and not interrupts.interrupt(signal.SIGINT), "it was stopped by what was typed"
    with interrupts.reading():
        assert interrupts.interrupt(signal.SIGINT) and interrupts.ends_chat and not interrupts.due()


# -- the command


WORDS = ["-n", "12", "-t", "1", "--temp", "0.8", "-s", "3"]
TYPED = "the model\n/regen\nof a \\\nlayer\n//\n/clear\n\nthe model\n/nothing\n/read notes.txt\n"


def turns_of(n_ranks: int, words: Sequence[str], typed: str) -> tuple[list[dict[str, Any]], str]:
    """The objects that a chat prints, and what it says besides."""
    done = subprocess.run(
        [*launcher(n_ranks), *COMMAND, "chat", "--json", *words],
        input=typed,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_a_chat_of_ranks_says_what_one_rank_says(model: Path, draft: Path) -> None:
    words = ["-m", str(model), "-md", str(draft), "-sys", "of", *WORDS]
    turns, errors = turns_of(1, words, TYPED)
    texts = [turn["text"] for turn in turns]
    assert len(texts) == 4 and texts[0] != texts[1], "another seed, another answer"
    assert turns[0]["prompt_tokens"] == turns[1]["prompt_tokens"] == turns[3]["prompt_tokens"]
    assert texts[3] == texts[1], "after /clear all is as at the beginning, but for the seed"
    assert "there is no /read; paste" in errors
    assert "there is no /nothing" in errors and "there is no //" in errors and "/regen" in errors
    n_prompt = [len(turn["prompt_tokens"]) for turn in turns]
    n_kept = [turn["timings"]["cache_n"] for turn in turns]
    assert n_kept[0] == 0 and n_kept[1] == n_kept[3] == n_prompt[1] - 1
    assert n_kept[2] >= n_prompt[1] + len(turns[1]["tokens"]) - 1
    assert [turn["timings"]["prompt_n"] + turn["timings"]["cache_n"] for turn in turns] == n_prompt
    again, _ = turns_of(3, [*words, "--policy", "speculative"], TYPED)
    assert [turn["tokens"] for turn in again] == [turn["tokens"] for turn in turns]
    assert [turn["timings"]["cache_n"] for turn in again] == n_kept


def test_what_comes_behind_a_stop_string_is_in_no_turn() -> None:
    """How much that is depends on the policy, and the next prompt, which may begin with it, must not."""
    words = ["-m", str(TARGET), "-r", "\\n\\n", "-n", "150", "-c", "1000", "-t", "1", "--temp", "0.8", "-s", "4"]
    typed = "def f(x):\n" + "    return a + b\\\n" * 40 + "\n"
    turns, _ = turns_of(1, [*words, "-md", "none", "--policy", "iterative"], typed)
    again, _ = turns_of(2, [*words, "-md", str(TARGET), "--policy", "speculative", "--draft", "16"], typed)
    for each, other in zip(turns, again, strict=True):
        assert [each[name] for name in ("tokens", "text", "finish")] == [
            other[name] for name in ("tokens", "text", "finish")
        ]
        assert all(each["timings"][name] == other["timings"][name] for name in ("predicted_n", "cache_n"))
    assert len(turns) == 2 and turns[0]["finish"] == "end" and len(turns[0]["tokens"]) < 10


def test_run_cnv_is_a_chat_and_p_is_said_first() -> None:
    done = subprocess.run(
        [*COMMAND, "run", "-cnv", "-p", "x", "-n", "4", "-t", "1"],
        input="/exit\nno\n",
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    assert done.returncode == 0 and done.stderr.count("prompt tokens read") == 1, done.stderr
    done = subprocess.run([*COMMAND, "run", "-cnv", "--results", "x.csv"], capture_output=True, text=True)
    assert done.returncode == 2 and "--results" in done.stderr


def test_a_line_that_is_no_text_ends_a_chat() -> None:
    command = [*launcher(2), *COMMAND, "chat", "-md", "none", "-n", "4", "-t", "1"]
    done = subprocess.run(command, input=b"x\nof \xff\nno\n", capture_output=True, env=environment(), timeout=60)
    assert done.returncode == 2 and done.stderr.count(b"prompt tokens read") == 1, done.stderr
    assert b"pipeinfer: a line of standard input is not UTF-8 text (byte 3 is 0xff)" in done.stderr


def test_the_answer_is_stopped_and_the_chat_goes_on_under_mpirun() -> None:
    """From a pipe, where there is no Ctrl-C."""
    chat = start(2, ["chat", "-md", "none", "-c", "8000", "-t", "1", "--ignore-eos"], stdin=subprocess.PIPE)
    assert chat.stdin and chat.stdout
    chat.stdin.write("def\n")
    chat.stdin.flush()
    assert chat.stdout.read(3)
    chat.stdin.write("/stop\nclass\n")
    chat.stdin.flush()
    time.sleep(0.5)
    chat.stdin.write("/stop\n")
    chat.stdin.close()
    chat.stdin = None
    _, errors = chat.communicate(timeout=60)
    counts = [int(count) for count in re.findall(r"(\d+) tokens, (?:[\d.]+|-) tokens/s", errors)]
    assert chat.returncode == 0 and len(counts) == 2 and sum(counts) < 7000, errors


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_an_answer_may_be_stopped_twice(n_ranks: int) -> None:
    """What is said while it comes to its end is for the next one."""
    chat = start(n_ranks, ["chat", "-md", "none", "-c", "4000", "-t", "1", "--ignore-eos"], stdin=subprocess.PIPE)
    said, errors = chat.communicate("def f(x):\n/stop\n/stop\nclass\n/stop\n/stop\n/stop\n", timeout=60)
    assert chat.returncode == 0 and errors.count("prompt tokens read") == 2, errors
    assert "StopRequested" not in errors and len(said) < 8000


def test_a_pipe_s_reader_is_interrupted_at_the_prompt() -> None:
    chat = start(1, ["chat", "-md", "none", "-t", "1"], stdin=subprocess.PIPE)
    assert chat.stderr and chat.stdin
    shown = ""
    while not shown.endswith("\n> "):
        shown += chat.stderr.read(1)
    chat.send_signal(signal.SIGINT)
    assert chat.wait(timeout=60) == 130
    chat.communicate()
