"""Long prompts that repeat an earlier one behind a change near their beginning: the cache finds nothing of that. Knows
no HTTP and no cache."""

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

N_LEAST = 512
"""Tokens of a prompt that is worth a word."""

N_KEPT, MAX_CLIENTS = 2, 64
"""Prompts of a client that its new ones are compared with, and clients whose prompts are known."""

N_IN_ROW = 16
"""Tokens that make a passage, by which repeats are found."""

FACTOR = np.uint64(0x9E3779B97F4A7C15)
Numbers = npt.NDArray[np.uint64]


class Repeats:
    """Compares a client's prompts. Tens of milliseconds for 65 thousand tokens."""

    def __init__(self) -> None:
        self._before = OrderedDict[str, deque[tuple[Numbers, Numbers]]]()  # tokens and passages, by client

    def note(self, client: str, prompt: Sequence[int], n_kept: int) -> tuple[int, int] | None:
        """`n_kept`: its tokens that were in the cache. The token from which on it differs from an earlier prompt, and
        how many tokens behind that stand in the earlier one too; None where the cache has most, or less than half
        repeats."""
        if len(prompt) < N_LEAST:
            return None
        tokens = np.array(prompt, np.uint64)
        before = self._before.setdefault(client, deque(maxlen=N_KEPT))
        self._before.move_to_end(client)
        if len(self._before) > MAX_CLIENTS:
            self._before.popitem(last=False)
        repeats = [_repeat(tokens, *earlier) for earlier in before] if n_kept < len(prompt) / 2 else []
        before.append((tokens, _passages(tokens)))
        at, n_repeated = max(repeats, key=lambda each: each[1], default=(0, 0))
        return (at, n_repeated) if n_repeated >= len(prompt) / 2 else None


def _repeat(tokens: Numbers, earlier: Numbers, passages: Numbers) -> tuple[int, int]:
    """(the first token that differs, passages behind it that are in the earlier prompt too)."""
    n = min(len(tokens), len(earlier))
    differ = np.flatnonzero(tokens[:n] != earlier[:n])
    at = int(differ[0]) if len(differ) else n
    return at, int(np.isin(_passages(tokens[at:]), passages).sum())


def _passages(tokens: Numbers) -> Numbers:
    """A number for each `N_IN_ROW` tokens in a row: (n - N_IN_ROW + 1,)."""
    n = max(0, len(tokens) - N_IN_ROW + 1)
    numbers = np.zeros(n, np.uint64)
    for at in range(N_IN_ROW):
        numbers = numbers * FACTOR + tokens[at : at + n]
    return numbers
