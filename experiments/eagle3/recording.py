"""Files of recorded texts: tokens, the features after some layers, the target's likeliest tokens.

Knows numpy and disk only. A directory holds `NNNNN.npz` files, each of several whole texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

N_TAUGHT = 16
"""Of the target's distribution after each token, its likeliest ones are kept."""

Words = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Text:
    """n tokens of a text, of which the first `n_prompt` are the question.

    tokens    (n,) int32
    features  (n, n_features, n_embd) bfloat16, as uint16: the residual stream before each of the target's layers
    taught    (n, N_TAUGHT) uint16, the likeliest tokens after each one, the likeliest first; of questions zeros
    logits    (n, N_TAUGHT) float16, theirs, less the logarithm of the sum over the vocabulary; of questions zeros
    """

    name: str
    n_prompt: int
    tokens: npt.NDArray[np.int32]
    features: Words
    taught: Words
    logits: npt.NDArray[np.float16]


def write_texts(path: Path, texts: Sequence[Text]) -> None:
    """One file, whole or not at all."""
    part = path.with_suffix(".part")
    rows: dict[str, Any] = {name: np.concatenate([getattr(text, name) for text in texts]) for name in _ROWS}
    with part.open("wb") as file:
        np.savez(
            file,
            names=np.array([text.name for text in texts]),
            n_prompt=np.array([text.n_prompt for text in texts], np.int32),
            n_tokens=np.array([len(text.tokens) for text in texts], np.int32),
            **rows,
        )
    part.rename(path)


_ROWS = ("tokens", "features", "taught", "logits")


def read_texts(path: Path) -> list[Text]:
    """The texts of a file. Raises OSError, ValueError and KeyError for others."""
    with np.load(path) as held:
        rows = {name: held[name] for name in _ROWS}
        names, n_prompt, n_tokens = (held[name].tolist() for name in ("names", "n_prompt", "n_tokens"))
    ends = np.cumsum(n_tokens).tolist()
    return [
        Text(name, n, **{key: each[end - length : end] for key, each in rows.items()})
        for name, n, length, end in zip(names, n_prompt, n_tokens, ends, strict=True)
    ]


def recorded(directory: Path) -> list[Path]:
    """The files of a directory, in the order in which they were written."""
    return sorted(directory.glob("[0-9]*.npz"))
