"""The logits of a context's last batch, where libllama has them. Knows no stage."""

import ctypes
from types import ModuleType

import numpy as np
import numpy.typing as npt

from pipeinfer.core.types import FloatArray


class Logits:
    """Of batches in which up to `n_rows_max` rows want logits."""

    def __init__(self, library: ModuleType, context: object, n_rows_max: int, n_vocab: int) -> None:
        self._lib, self._context, self._n_rows_max, self._n_vocab = library, context, n_rows_max, n_vocab
        self._address, self._all = 0, np.empty((0, n_vocab), np.float32)

    def of(self, wanted: npt.NDArray[np.bool_]) -> FloatArray:
        """(n_wanted, n_vocab), a view of libllama's buffer, rows in the order of the batch."""
        n_wanted = int(np.count_nonzero(wanted))
        if n_wanted == 0:
            return np.empty((0, self._n_vocab), np.float32)
        address = ctypes.addressof(self._lib.llama_get_logits(self._context).contents)
        if address != self._address:  # libllama moves the buffer where it has to grow
            buffer = (ctypes.c_float * (self._n_rows_max * self._n_vocab)).from_address(address)
            self._address, self._all = address, np.ctypeslib.as_array(buffer).reshape(-1, self._n_vocab)
        return self._all[:n_wanted]
