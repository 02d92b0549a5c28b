"""What is done in the process in which a grammar is tried: some take llguidance all time or memory there is, or the
process with them. Chooses no token."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from typing import Any

import llguidance  # noqa: F401 (while nobody waits: the process may have been started ahead)

from pipeinfer.errors import UserError
from pipeinfer.models.text.grammar_text import lark_of, matcher, open_tokens

N_STEPS = 128
"""Bytes of a text that is written by the grammar, to see how its states grow."""

STACK_BYTES = 1 << 20
"""Less than the ranks' threads have: a grammar that is too deep ends this process, and none of theirs."""


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """`wrong`: what is, empty if nothing is; `tokens`: those that the grammar `text` names."""
    found: dict[str, Any] = {}
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_try, args=(asked["text"], asked["n_vocab"], found))
    thread.start()
    thread.join()
    return found


def _try(text: str, n_vocab: int, found: dict[str, Any]) -> None:
    names = list[str]()

    def token_id(name: str) -> int:
        names.append(name)
        return 0

    try:
        lark = lark_of(text, token_id)
    except UserError as error:
        found["wrong"] = str(error)
    except RecursionError:
        found["wrong"] = "the JSON schema is too deep; name parts of it in $defs"
    else:
        found |= {"wrong": _walk(lark, n_vocab), "tokens": names}


def _walk(lark: str, n_vocab: int) -> str:
    """What is wrong with a grammar, found by writing a text with it, byte by byte."""
    pieces = [bytes([byte]) for byte in range(256)]
    at = matcher(open_tokens([*pieces, b"\xff<end>"], 256, max(n_vocab, 257)), lark)
    rng = random.Random(0)
    for _ in range(N_STEPS):
        mask = at.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if at.is_error() or not allowed:
            break
        at.consume_token(rng.choice(allowed))
    return str(at.get_error())
