"""A head on libllama, EAGLE-3 or MTP. Knows no tree, and not where features come from."""

import ctypes
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pipeinfer.core.interfaces import Batch
from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.llama import ggml
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage

MTP = 1
"""libllama's type of a context that evaluates a model's own head."""


class LlamaHead(LlamaStage):
    """A LoadedModel. A row is a token and, in `hidden`, what `encode` makes of the features of the token before it;
    where there are none yet, the row of `states` of that token."""

    def __init__(self, slice_file: SliceFile, params: LlamaParams) -> None:
        """`params` without `exact`. Raises what LlamaStage raises."""
        head = slice_file.info.head
        assert head and not params.exact, f"{slice_file.path} is no head, or shall be exact"
        self._extension = ggml.load_extension()
        self.context_type = MTP if head.own else 0
        # libllama takes it for a model with an encoder: it wants room for a row of each sequence in a batch
        super().__init__(slice_file, replace(params, n_batch=max(params.n_batch, params.n_seq_max)))
        self._order, self._n_embd_target, self._is_own = head.order, head.n_embd_target, head.own
        self._extension.llama_set_embeddings_nextn(self._context, True, head.own)

    def encode(self, features: FloatArray) -> FloatArray:
        """(n_rows, n_embd) from (n_rows, n * the target's n_embd): the outputs of the layers that the head reads, the
        lowest first. As many rows as a batch has at most."""
        if self._is_own:  # it takes what the target has put out
            return features
        n_rows = len(features)
        by_layer = features.reshape(n_rows, len(self._order), self._n_embd_target)[:, self._order]
        # libllama reads positions, which must follow those of the sequence, and writes no cells
        rows = Batch(
            np.zeros(n_rows, np.int32), np.arange(n_rows, dtype=np.int32), [(self._spare,)] * n_rows, None,
            np.ones(n_rows, np.bool_),
        )  # fmt: skip
        self._callback.begin(None)
        batch = self._batch.fill(rows, by_layer.reshape(n_rows, -1), None)
        code = int(self._lib.llama_encode(self._context, batch))
        if code:
            raise RuntimeError(f"llama_encode of {n_rows} rows in {self._where} failed with {code}: "
                               f"{ggml.last_errors()}")  # fmt: skip
        return self._states(n_rows).copy()

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        if not self._is_own or not batch.wanted.any():
            return super().evaluate(batch, stop)
        # libllama's graphs of such heads have states of the rows alone that want logits
        logits = super().evaluate(replace(batch, wanted=np.ones_like(batch.wanted)), stop)
        return None if logits is None else logits[batch.wanted]

    @property
    def states(self) -> FloatArray:
        """(n_rows, n_embd), of every row of the last `evaluate`, if some of them wanted logits. Valid until the next
        call."""
        return self._states(self._n_rows)

    def _states(self, n_rows: int) -> FloatArray:
        address = ctypes.cast(self._extension.llama_get_embeddings_nextn(self._context), ctypes.c_void_p).value
        assert address, "libllama has no states of this head"
        buffer = (ctypes.c_float * (n_rows * self.n_embd)).from_address(address)
        return np.ctypeslib.as_array(buffer).reshape(n_rows, self.n_embd)

    def _hidden(self, batch: Batch) -> FloatArray | None:
        return batch.hidden

    def _fill(self, batch: Batch, hidden: FloatArray | None, wanted: npt.NDArray[np.bool_] | None) -> object:
        return self._batch.fill(batch, hidden, wanted, both=True)
