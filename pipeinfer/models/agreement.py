"""How often a draft guesses a target's greedy choice: the acceptance rate that a pair will have, measured."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeinfer.core.interfaces import Batch, LoadedModel
from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.text.vocabularies import Translation
from pipeinfer.models.translated import TranslatedStage

ROWS = 32  # tokens a batch

TEXTS = (
    "def fibonacci(n):\n",
    "Once upon a time there was a warrior",
    "import os\n\n\nclass Reader:\n    def __init__(self, path):\n",
)
"""What pairs are measured on if no text is given."""


def greedy(model: LoadedModel, prompt: Sequence[int], n_predict: int) -> list[int]:
    """The prompt and what the model says after it, end tokens included."""
    model.clear()
    tokens = list(prompt)
    rows = _logits(model, tokens, 0)
    while len(tokens) < len(prompt) + n_predict:
        tokens.append(int(np.argmax(rows[-1])))
        rows = _logits(model, tokens, len(tokens) - 1)
    return tokens


def agreement(model: LoadedModel, tokens: Sequence[int], n_prompt: int) -> tuple[int, int]:
    """(right, guesses) of the model's first choice at every position after the prompt, given what came before it."""
    model.clear()
    rows = _logits(model, tokens[:-1], 0)[n_prompt - 1 :]
    choices = np.argmax(rows, axis=1)
    return int(np.sum(choices == np.array(tokens[n_prompt:]))), len(choices)


def acceptance(
    target: Path, draft: Path, prompts: Sequence[Sequence[int]], n_predict: int, n_threads: int = 1,
    translation: Translation | None = None,
) -> float:  # fmt: skip
    """The share of the target's greedy tokens that the draft's first guess is. `translation`: where its token ids are
    others. Raises UserError as loading does."""
    n_cells = max(map(len, prompts)) + n_predict
    texts = []
    model = _load(target, n_cells, n_threads)
    for prompt in prompts:
        texts.append(greedy(model, prompt, n_predict))
    model.close()
    model = _load(draft, n_cells, n_threads)
    if translation:
        model = TranslatedStage(model, translation)
    counts = [agreement(model, text, len(prompt)) for text, prompt in zip(texts, prompts, strict=True)]
    model.close()
    return sum(right for right, _ in counts) / sum(n for _, n in counts)


def _load(path: Path, n_cells: int, n_threads: int) -> LoadedModel:
    info = read_model_info(path)
    params = LlamaParams(n_cells, n_seq_max=2, n_batch=ROWS, n_outputs_max=ROWS, n_threads=n_threads)
    return LlamaStage(open_slice(info, 0, info.n_layer), params)


def _logits(model: LoadedModel, tokens: Sequence[int], start: int) -> FloatArray:
    """(n, n_vocab) after each of tokens[start:], whose predecessors the model has seen."""
    parts = []
    for first in range(start, len(tokens), ROWS):
        chunk = np.array(tokens[first : first + ROWS], np.int32)
        positions = np.arange(first, first + len(chunk), dtype=np.int32)
        batch = Batch(chunk, positions, [(0,)] * len(chunk), None, np.ones(len(chunk), np.bool_))
        logits = model.evaluate(batch, lambda: False)
        assert logits is not None
        parts.append(logits.copy())
    return np.concatenate(parts)
