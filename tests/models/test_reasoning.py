"""The budget of reasoning: as llama.cpp's sampler forces its end, and the same text whatever is guessed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeinfer.core.sampling import SamplingParams, choose
from pipeinfer.core.types import NO_TOKEN
from pipeinfer.errors import UserError
from pipeinfer.models.demo import TARGET
from pipeinfer.models.text.grammar import Grammars
from pipeinfer.models.text.reasoning import (
    OUTSIDE,
    Constraints,
    LimitedReasoning,
    OneToken,
    ReasoningBudget,
    budget_text,
    ends_whole,
    read_budget,
)
from pipeinfer.models.text.tokenizer import Tokenizer
from tests.support.jobs import finish, run_json

OPEN = "{% for m in messages %}{{ m.content }}{% endfor %}\n<think>\n"

LLAMA_CPP: list[tuple[int, list[int], list[list[int]], list[int], list[int], list[int]]] = [
    (1, [3, 4], [[1, 3, 1], [0, 4]], [4, 1, 3, 1], [3, 4, 0, 0, 4, 3, 4, 1, 2, 2, 2, 2], [*[-1] * 8, 4, 1, 3, 1, -1]),
    (0, [3, 3], [[3]], [0, 3], [3, 2, 1, 0, 4, 5, 5, 0, 4, 3, 3, 5, 5], [*[-1] * 11, 0, 3, -1]),
    (0, [0], [[0]], [1, 0], [4, 0, 3, 2, 3, 4, 1, 4, 1, 5, 2, 3, 0, 5], [-1, -1, 1, 0, *[-1] * 9, 1, 0]),
    (1, [3], [[0, 2], [1, 2]], [0, 0, 2], [4, 0, 3, 0, 2, 3, 0, 0, 5], [*[-1] * 5, 0, 0, 2, -1, -1]),
    (2, [3], [[3]], [0, 3, 3], [3, 1, 0, 2, 4, 2, 0, 1, 1, 3, 4, 5, 4, 0], [*[-1] * 4, 0, 3, 3, *[-1] * 6, 0, 3]),
    (2, [1], [[2, 0]], [2, 3, 2, 0], [0, 0, 0, 1, 4, 5, 1, 0, 4, 2, 2, 4], [*[-1] * 7, 2, 3, 2, 0, -1, -1]),
    (4, [1, 3], [[2]], [1, 2], [5, 1, 1, 5, 5, 4, 1, 5, 3, 3, 4, 0, 3, 0], [-1] * 15),
]
"""(budget, mark, ends, forced end, tokens, the token that llama.cpp's sampler then forces, or -1). Tokens 0 and 5 end
within a character."""


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    opened = Tokenizer(TARGET)
    yield opened
    opened.close()


def forced_after(constraint: LimitedReasoning, output: Sequence[int]) -> int:
    allowed = constraint.after(output)
    assert allowed is None or isinstance(allowed, OneToken)
    return allowed.token if allowed else NO_TOKEN


@pytest.mark.parametrize(("n", "start", "ends", "end", "tokens", "forced"), LLAMA_CPP)
def test_what_is_forced_is_what_llama_cpp_forces(
    n: int, start: list[int], ends: list[list[int]], end: list[int], tokens: list[int], forced: list[int]
) -> None:
    budget = ReasoningBudget(n, tuple(start), tuple(map(tuple, ends)), tuple(end), OUTSIDE)
    constraint = LimitedReasoning(budget, lambda token: b"\xe2\x80" if token % 5 == 0 else b"a", None)
    output = list[int]()
    for token, due in zip(tokens, forced, strict=False):
        assert forced_after(constraint, output) == due
        output.append(token if due < 0 else due)
    paths = [output[:at] for at in range(len(output) + 1)]
    for path in random.Random(3).choices(paths, k=60):
        assert forced_after(constraint, path) == forced[len(path)], "whatever was asked before"


@pytest.mark.parametrize(
    ("piece", "is_whole"),
    [(b"", True), (b"a", True), (b"\xe2\x80", False), (b"\xe2\x80\xa6", True), (b"a\xc3", False), (b"\xa6", False)],
)
def test_a_character_is_whole_before_the_end_is_forced(piece: bytes, is_whole: bool) -> None:
    assert ends_whole(piece) is is_whole


def test_the_prompt_s_own_reasoning_counts(tokenizer: Tokenizer) -> None:
    def forced(n: int, prompt: str, thought: str = "</think>", source: str = OPEN, message: str = "") -> list[int]:
        tokens = tokenizer.encode(prompt)
        text = budget_text(n, message, source, tokenizer, tokens, thought)
        constraint = LimitedReasoning(read_budget(text), tokenizer.decode_piece, None)
        output = list[int]()
        while len(output) < 40:
            output.append(forced_after(constraint, output) if forced_after(constraint, output) >= 0 else 300)
        return output

    end = tokenizer.encode("</think>", add_special=False, parse_special=True)
    free = [300] * 40
    assert forced(0, "x\n<think>")[: len(end) + 1] == [*end, 300]
    assert forced(3, "x\n<think>")[: len(end) + 3] == [300] * 3 + end
    assert forced(3, "x\n<think>\n")[:3][0] == 300 != forced(1, "x\n<think>\n")[0], "a new line is one token"
    assert forced(0, "x", thought="") == free
    said = tokenizer.encode("Enough.", add_special=False, parse_special=True)
    assert forced(0, "<think>", message="Enough.")[: len(said) + len(end)] == said + end
    coder = "<think><tool_call><function=<parameter="
    whole = tokenizer.encode("\n</think>", add_special=False, parse_special=True)
    assert forced(0, "<think>", source=coder)[: len(whole)] == whole, "as llama.cpp has it for Qwen3-Coder's form"
    rest = forced(0, "<think>\n", source=coder)
    assert tokenizer.decode_piece(rest[0]) != b"\n", "the prompt has the first of these tokens"
    assert budget_text(0, "", "no marks", tokenizer, [1], "") == ""
    with pytest.raises(UserError, match="has 16385 bytes; 16384 are possible"):
        budget_text(0, "x" * 16385, OPEN, tokenizer, [1], "")


def test_a_grammar_holds_what_is_not_forced(tokenizer: Tokenizer) -> None:
    text = budget_text(2, "", OPEN, tokenizer, tokenizer.encode("<think>"), "</think>")
    params = SamplingParams(seed=1, temp=0.9, grammar="root ::= [a-z<>/]+", reasoning=text, logit_bias="5-inf")
    constraint, output = Constraints(Grammars(lambda: tokenizer))(params), list[int]()
    for at in range(16):
        logits = np.random.default_rng(at).normal(0, 2, tokenizer.n_vocab).astype(np.float32)
        output.append(choose(logits, params, at, (), constraint.after(output)))
    written = b"".join(map(tokenizer.decode_piece, output)).decode()
    assert "</think>" in written and not set(written) - set("abcdefghijklmnopqrstuvwxyz<>/")
    free = Constraints(Grammars(lambda: tokenizer))(replace(params, grammar="")).after([300])
    assert free is None, "nothing is looked at that is not forced"


@pytest.mark.parametrize("temp", ["0", "0.8"])
def test_the_text_is_the_same_with_guesses_and_ranks(temp: str, tmp_path: Path) -> None:
    (template := tmp_path / "open.jinja").write_text(OPEN)
    words = ["--chat", "-p", "def add(a, b):", "-n", "48", "--temp", temp, "-s", "5"]
    words += ["--chat-template-file", str(template), "--ignore-eos", "-t", "1"]
    budget = ["--reasoning-budget", "12", "--reasoning-budget-message", " So:"]

    def written(n_ranks: int, *more: str) -> Any:
        return run_json(n_ranks, [*words, *more])["text"]

    alone = written(1, "-md", "none", "--no-lookup", *budget)
    assert " So:</think>" in alone and alone == written(2, *budget, "--policy", "pipeinfer")
    assert alone == written(3, "-md", "none", "--lookup", *budget)
    free = written(1, "-md", "none", "--no-lookup")
    assert free.startswith(alone.partition(" So:")[0]) and " So:" not in free


def test_a_budget_without_effect_is_refused_or_named(tmp_path: Path) -> None:
    words = ["run", "-p", "x", "-n", "1", "-md", "none", "--reasoning-budget"]
    done = finish(1, [*words, "5"])
    assert done.returncode == 2 and "--reasoning-budget is for chats; give --chat" in done.stderr
    done = finish(1, [*words, "-2", "--chat"])
    assert done.returncode == 2 and "-2" in done.stderr
    (template := tmp_path / "plain.jinja").write_text("{{ messages[0].content }}")
    done = finish(1, [*words, "0", "--chat", "--chat-template-file", str(template)])
    assert done.returncode == 0 and "--reasoning-budget 0 has no effect" in done.stderr, done.stderr
