"""Where a slice's input and output meet libllama's graph: its evaluation callback. Knows no cache and no batch.

libllama offers every node of the graph. For the last node of a layer the callback asks to see the result, copies the
last layer's out, and may end the evaluation there. A GPU would be waited for at each of them, so where layers are on
one it asks to see the last layer alone, and an evaluation that has begun goes to its end. Where the graph changes what
comes in as embeddings before the first layer, it writes them over what came of that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType

import numpy as np

from pipeinfer.core.interfaces import FloatArray
from pipeinfer.models.gguf.architecture import Architecture
from pipeinfer.models.llama import ggml


class Tap:
    """between     whether an evaluation may be ended between layers; else before the first one
    out         (n_batch, n_embd), where the residual stream after the slice goes; no rows on the last slice
    stopped     the evaluation was ended
    fault       what `stop` raised
    callback    for libllama; to be held as long as it has it
    """

    def __init__(
        self,
        library: ModuleType,
        n_layer: int,
        out: FloatArray,
        known: Architecture,
        writes: bool,
        between: bool = True,
    ) -> None:
        """Of a slice of `n_layer` layers. `writes`: what comes in is written over what came of it."""
        self.out, self.between = out, between
        self.stopped = False
        self.fault: BaseException | None = None
        self._stop: Callable[[], bool] = lambda: False
        self._hidden: FloatArray | None = None
        self.callback = self._make_callback(library, n_layer, known, known.input_node if writes else "")

    def begin(self, stop: Callable[[], bool]) -> None:
        """An evaluation begins, of one or several batches, unless `stop`, which is asked here or between layers, has
        `stopped` it at once."""
        self._stop, self.fault = stop, None
        self.stopped = not self.between and stop()

    def expect(self, n_rows: int, n_at_once: int, at: int, hidden: FloatArray | None) -> None:
        """A batch of n_rows comes, of which libllama evaluates n_at_once at a time, for the rows of `out` from `at` on.
        `hidden`: what comes in, where there is a node to write it over."""
        self._n_out, self._n_out_end, self._n_at_once, self._n_in = at, at + n_rows, n_at_once, 0
        self._hidden = hidden

    def _make_callback(self, library: ModuleType, n_layer: int, known: Architecture, input_node: str) -> object:
        """It runs for every node of every batch, so it does next to nothing for most."""
        base = ggml.ggml()
        get, name_of = base.ggml_backend_tensor_get, base.ggml_get_name
        prefix, entry = f"{known.layer_node}-".encode(), input_node.encode()
        read, n_prefix, last_name = ctypes.string_at, len(prefix), prefix + b"%d" % (n_layer - 1)
        last_name = known.end_node.encode() or last_name
        others = {name for name in (entry, known.end_node.encode()) if name}
        name_offset = 0
        row_bytes, is_last = 4 * self.out.shape[1], not len(self.out)

        def on_node(tensor: int, ask: bool, _: object) -> bool:
            nonlocal name_offset
            if ask:
                # True makes libllama compute up to this node and call again
                if name_offset == 0:
                    name_offset = name_of(tensor) - tensor
                if read(tensor + name_offset, n_prefix) == prefix:
                    return self.between or (not is_last and read(tensor + name_offset) == last_name)
                return bool(others) and read(tensor + name_offset) in others
            try:
                if entry and read(tensor + name_offset) == entry:
                    self._put(tensor)
                    return True
                if not is_last and read(tensor + name_offset) == last_name:
                    n_rows = min(self._n_at_once, self._n_out_end - self._n_out)
                    get(tensor, self.out.ctypes.data + self._n_out * row_bytes, 0, n_rows * row_bytes)
                    self._n_out += n_rows
                    return False
                if not self.between:
                    return True
                # on a build with several backends False only ends the current part of the graph: say it again
                self.stopped = self.stopped or self._stop()
            except BaseException as fault:
                self.fault, self.stopped = fault, True
            return not self.stopped

        return library.ggml_backend_sched_eval_callback(on_node)

    def _put(self, tensor: int) -> None:
        """Write the rows that come in over the first layer's input."""
        assert self._hidden is not None
        rows = np.ascontiguousarray(self._hidden[self._n_in : self._n_in + self._n_at_once], np.float32)
        ggml.ggml().ggml_backend_tensor_set(tensor, rows.ctypes.data, 0, rows.nbytes)
        self._n_in += len(rows)
