"""Long prompts that repeat an earlier one behind a change near their beginning: the cache finds nothing of that. Knows
no HTTP and no cache."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeinfer.core.scheduling.prefixes import common

N_LEAST = 512
"""Tokens of a prompt that is worth a word."""

N_KEPT = 8
"""Prompts that a new one is compared with."""

N_IN_ROW = 16
"""Tokens that make a passage, by which repeats are found."""

FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Repeats:
    """Compares prompts with earlier ones, in milliseconds."""

    def __init__(self) -> None:
        self._before = deque[npt.NDArray[np.uint64]](maxlen=N_KEPT)

    def note(self, prompt: Sequence[int], n_kept: int) -> tuple[int, int] | None:
        """`n_kept`: its tokens that were in the cache. The token from which on it differs from an earlier prompt, and
        how many tokens behind that stand in the earlier one too; None where the cache has most, or nothing repeats."""
        if len(prompt) < N_LEAST:
            return None
        tokens = np.array(prompt, np.uint64)
        before = [*self._before]
        self._before.append(tokens)
        if n_kept >= len(prompt) / 2 or not before:
            return None
        at = max(common(tokens.tolist(), each.tolist()) for each in before)
        passages = np.unique(np.concatenate([_passages(each) for each in before]))
        n_repeated = int(np.isin(_passages(tokens[at:]), passages).sum())
        return (at, n_repeated) if n_repeated >= len(prompt) / 2 else None


def _passages(tokens: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A number for each `N_IN_ROW` tokens in a row: (n - N_IN_ROW + 1,)."""
    n = max(0, len(tokens) - N_IN_ROW + 1)
    found = np.zeros(n, np.uint64)
    for at in range(N_IN_ROW):
        found = found * FACTOR + tokens[at : at + n]
    return found
