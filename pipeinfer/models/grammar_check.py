"""Whether a grammar can be used, found out in a process with little time and memory: some make libllama take all there
is, and end the process. Chooses no token."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np

from pipeinfer.child import python_command
from pipeinfer.errors import UserError
from pipeinfer.models.grammar import Grammar
from pipeinfer.models.template_child import limit
from pipeinfer.models.tokenizer import Tokenizer

CPU_S, TIMEOUT_S, N_BYTES = 4, 12, 4 << 30
N_STEPS = 64
"""Tokens of a text that is written by the grammar, to see how its states grow."""

SAID = re.compile(r"error parsing grammar: (.{1,100})")
TOO_MUCH = (
    "the grammar takes llama.cpp too much time or memory: it can read the same text in too many ways; write it without "
    "parts that may be empty or repeated within repeated parts"
)
START = "from pipeinfer.models.grammar_check import main; sys.exit(main(*sys.argv[1:]))"
WRONG = 3  # exit code: standard output says what is wrong


def check_grammar(model: Path, text: str) -> None:
    """Raises UserError for what is no grammar, or none that can be used with the vocabulary of this file."""
    if wrong := _what_is_wrong(model, text):
        raise UserError(wrong)


@lru_cache(maxsize=256)
def _what_is_wrong(model: Path, text: str) -> str:
    """Empty if nothing is. Raises UserError where that takes too long, which another time it may not."""
    try:
        given = text.encode()
    except UnicodeEncodeError:
        return "a grammar has half of a character (a lone surrogate), which no text has; leave it out"
    try:
        done = subprocess.run(python_command(START, model, CPU_S), input=given, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(TOO_MUCH) from None
    if done.returncode == WRONG:
        found = SAID.search(done.stderr.decode("utf-8", "replace"))
        said = done.stdout.decode().strip()
        return f"{said}: {found[1].strip()}" if found else said
    return TOO_MUCH if done.returncode else ""


def main(model: str, cpu_s: str) -> int:
    """Returns the exit code."""
    tokenizer = Tokenizer(Path(model))
    limit(int(cpu_s), N_BYTES)
    try:
        grammar = Grammar(tokenizer, sys.stdin.buffer.read().decode())
        if not len(grammar.ends):
            raise UserError(f"{model} has no token that ends a text, which must follow a grammar's last one; "
                            "leave the grammar out")  # fmt: skip
        _walk(grammar, tokenizer.n_vocab)
    except UserError as error:
        print(error)
        return WRONG
    return 0


def _walk(grammar: Grammar, n_vocab: int) -> None:
    random, output = np.random.default_rng(0), list[int]()
    while len(output) < N_STEPS and not {*output} & {*grammar.ends.tolist()}:
        logits = random.normal(size=n_vocab).astype(np.float32)
        grammar.after(output).restrict(logits, 1)
        output.append(int(np.argmax(logits)))
