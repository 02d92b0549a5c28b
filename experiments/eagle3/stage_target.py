"""A target of our own stages, cut where the features are: what a stage hands on is the feature. One process, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import numpy as np

from experiments.eagle3.recording import Words
from pipeinfer.cluster.wire import rounded
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage


class StageTarget:
    """`n_slots` texts of `n_cells` tokens at most, `n_batch` rows at once."""

    def __init__(
        self, path: Path, layers: Sequence[int], n_slots: int, n_cells: int, n_batch: int, n_threads: int
    ) -> None:
        """Raises UserError for a file that is no model."""
        info = read_model_info(path)
        params = LlamaParams(
            n_cells=n_slots * n_cells,
            n_seq_max=n_slots + 1,
            n_batch=n_batch,
            n_outputs_max=n_slots,
            n_threads=n_threads,
            exact=False,
        )
        self._stack = ExitStack()
        self._stages = [
            self._stack.enter_context(closing(LlamaStage(open_slice(info, first, last, None), params)))
            for first, last in pairwise((0, *layers, info.n_layer))
        ]

    def close(self) -> None:
        self._stack.close()

    def forget(self, seq: int) -> None:
        for stage in self._stages:
            stage.apply([KvOp(OpKind.REMOVE, seq)])

    def evaluate(
        self, tokens: Sequence[int], positions: Sequence[int], seqs: Sequence[int], wanted: Sequence[bool]
    ) -> tuple[Words, FloatArray]:
        """Features (n_rows, n_features, n_embd) and the logits (n_wanted, n_vocab) of rows."""
        batch = Batch(
            np.array(tokens, np.int32), np.array(positions, np.int32), [(seq,) for seq in seqs], None, np.array(wanted)
        )
        features = []
        for stage in self._stages[:-1]:
            batch.hidden = stage.evaluate(batch, lambda: False)
            assert batch.hidden is not None
            features.append(rounded(batch.hidden))
        logits = self._stages[-1].evaluate(batch, lambda: False)
        assert logits is not None
        return np.stack(features, 1), logits
