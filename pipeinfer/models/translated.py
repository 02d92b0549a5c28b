"""A draft, or a slice of one, that reads and guesses in the target's token ids. Knows a table of ids, no text."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pipeinfer.core.interfaces import Batch, LoadedModel
from pipeinfer.core.runs import KvOp
from pipeinfer.core.types import FloatArray
from pipeinfer.models.text.vocabularies import NONE, Translation


class TranslatedStage:
    """A LoadedModel of the target's vocabulary made of one of the draft's. What the draft cannot say has no chance."""

    def __init__(self, model: LoadedModel, translation: Translation) -> None:
        self.model, self.heard = model, translation.heard
        self.n_embd, self.is_last, self.n_vocab = model.n_embd, model.is_last, len(translation.said)
        self._missing = np.flatnonzero(translation.said == NONE)
        self._said = np.maximum(translation.said, 0).astype(np.intp)
        self._room = np.empty((0, self.n_vocab), np.float32)

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        found = self.model.evaluate(replace(batch, tokens=self.heard[batch.tokens]), stop)
        return found if found is None or not self.is_last else self._translated(found)

    def _translated(self, logits: FloatArray) -> FloatArray:
        """(n_rows, n_vocab) from the draft's; room is kept for the most rows so far."""
        if len(logits) > len(self._room):
            self._room = np.empty((len(logits), self.n_vocab), np.float32)
        found = self._room[: len(logits)]
        np.take(logits, self._said, axis=1, out=found, mode="clip")
        found[:, self._missing] = -np.inf
        return found

    def apply(self, ops: Sequence[KvOp]) -> None:
        self.model.apply(ops)

    def next_position(self, seq: int) -> int:
        return self.model.next_position(seq)

    def clear(self) -> None:
        self.model.clear()

    def close(self) -> None:
        self.model.close()
