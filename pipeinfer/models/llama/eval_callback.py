"""Where a slice's input and output meet libllama's graph: its evaluation callback. Knows no cache and no batch.

libllama offers every node of the graph. For the last node of a layer the callback asks to see the result, copies the
last layer's out, and those of the layers that are tapped, and may end the evaluation there. A GPU would be waited for
at each of them, so where layers are on one it asks to see what it copies alone, and an evaluation that has begun goes
to its end. Where the graph changes what comes in as embeddings before the first layer, it writes them over what came of
that.

A graph has some 30 nodes a layer: the callback is in C where it was compiled with the package (`eval_callback.c`), and
the same in Python elsewhere.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf.architecture import Architecture
from pipeinfer.models.llama import ggml

_Stop = ctypes.CFUNCTYPE(ctypes.c_bool)
NOTHING = np.empty((0, 0, 0), np.float32)
OUTPUT = b"h_nextn"
"""The node that a model's own head reads, after the last layer."""


class Tap(ctypes.Structure):
    """A node that is copied out, and the evaluation goes on: its name, where its next rows go, and bytes of rows that
    are still to be copied."""

    _fields_ = [("name", ctypes.c_char_p), ("out", ctypes.c_void_p), ("n_out", ctypes.c_size_t)]


class State(ctypes.Structure):
    """What the callback works on, in C and in Python; the same as in `eval_callback.c`.

    name_of, get, set  libggml's functions
    stop               asked between layers: True ends the evaluation
    layer              what names of layers' last nodes begin with
    last, input        the node that is copied out, and the one that is written over; NULL: there is none
    out, hidden        where the next rows go, and come from
    n_out, n_hidden    bytes of rows that are still to be copied
    n_at_once          bytes of the rows that libllama evaluates at a time
    interval_ns        about the time between two layers after which `stop` is asked
    began_ns           when the first layer began
    n_layers, due      layers since then, and the number of them after which `stop` is asked next
    taps, n_taps       nodes that are copied out besides
    between            whether `stop` is asked
    stopped            `stop` returned True
    """

    _fields_ = [
        ("name_of", ctypes.c_void_p),
        ("get", ctypes.c_void_p),
        ("set", ctypes.c_void_p),
        ("stop", _Stop),
        ("layer", ctypes.c_char_p),
        ("last", ctypes.c_char_p),
        ("input", ctypes.c_char_p),
        ("out", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("n_out", ctypes.c_size_t),
        ("n_hidden", ctypes.c_size_t),
        ("n_at_once", ctypes.c_size_t),
        ("interval_ns", ctypes.c_int64),
        ("began_ns", ctypes.c_int64),
        ("n_layers", ctypes.c_int64),
        ("due", ctypes.c_int64),
        ("taps", ctypes.POINTER(Tap)),
        ("n_taps", ctypes.c_size_t),
        ("between", ctypes.c_bool),
        ("stopped", ctypes.c_bool),
    ]


@cache
def compiled() -> ctypes.CDLL | None:
    """The callback in C; None where it was not built, or from another source than the one beside this file."""
    spec = find_spec("pipeinfer.models.llama._eval_callback")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
        n_bytes = ctypes.c_size_t.in_dll(library, "state_bytes").value
        source = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "source"))).decode()
        expected = sha256(Path(__file__).with_suffix(".c").read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None
    return library if (n_bytes, source) == (ctypes.sizeof(State), expected) else None


class EvalCallback:
    """between     whether an evaluation may be ended between layers; else before the first one
    out         (n_batch, n_embd), where the residual stream after the slice goes; no rows on the last slice
    tapped      (n_taps, n_batch, n_embd), where those after the layers go that are tapped
    fault       what `stop` raised
    function    for libllama, with `state` as its data; to be held as long as it has them
    """

    def __init__(
        self,
        library: ModuleType,
        n_layer: int,
        out: FloatArray,
        known: Architecture,
        writes: bool,
        between: bool = True,
        interval_s: float = 0.0,
        taps: Sequence[int] = (),
        tapped: FloatArray = NOTHING,
    ) -> None:
        """Of a slice of `n_layer` layers, of which `taps` are tapped. `writes`: what comes in is written over what came
        of it. `interval_s`: about the time between two questions whether to stop; 0: one after every layer."""
        self.out, self.between = out, between
        self._out_address, self._row_bytes = out.ctypes.data, 4 * out.shape[1]
        self.fault: BaseException | None = None
        self._stop: Callable[[], bool] | None = None
        base = ggml.ggml()
        functions = base.ggml_get_name, base.ggml_backend_tensor_get, base.ggml_backend_tensor_set
        names = [f"{known.layer_node}-{layer}".encode() for layer in range(n_layer)]
        last = known.end_node.encode() or names[-1]
        self.tapped = tapped
        end = last if len(out) else OUTPUT
        self._taps = (Tap * len(taps))(*(Tap(end if layer == n_layer - 1 else names[layer]) for layer in taps))
        self.state = State(
            *(ctypes.cast(each, ctypes.c_void_p) for each in functions),
            _Stop(self._asks_to_stop),
            f"{known.layer_node}-".encode(),
            last if len(out) else None,
            known.input_node.encode() if writes and known.input_node else None,
            interval_ns=int(1e9 * interval_s),
            taps=self._taps,
            n_taps=len(taps),
        )
        in_c = compiled()
        kind = library.ggml_backend_sched_eval_callback
        self.function = ctypes.cast(in_c.on_node, kind) if in_c else kind(make_on_node(self.state))

    @property
    def stopped(self) -> bool:
        """The evaluation was ended."""
        return bool(self.state.stopped)

    def begin(self, stop: Callable[[], bool] | None) -> None:
        """An evaluation begins, of one or several batches, unless `stop`, which is asked here or between layers, has
        `stopped` it at once. None: it goes to its end."""
        self._stop, self.fault, self._n_asked = stop, None, 0
        state = self.state
        state.between = self.between and stop is not None
        state.stopped = not self.between and stop is not None and stop()
        state.n_layers, state.due = 0, 1

    def expect(self, n_rows: int, n_at_once: int, at: int, hidden: FloatArray | None) -> None:
        """A batch of n_rows comes, of which libllama evaluates n_at_once at a time, for the rows of `out` from `at` on.
        `hidden`: what comes in, where there is a node to write it over."""
        state, row_bytes = self.state, self._row_bytes
        state.out, state.n_out = self._out_address + at * row_bytes, n_rows * row_bytes
        state.n_at_once = n_at_once * row_bytes
        for tap, rows in zip(self._taps, self.tapped, strict=True):
            tap.out, tap.n_out = rows.ctypes.data + at * row_bytes, n_rows * row_bytes
        if state.input and hidden is not None:
            self._hidden = np.ascontiguousarray(hidden, np.float32)  # held while it is read
            state.hidden, state.n_hidden = self._hidden.ctypes.data, self._hidden.nbytes

    def _asks_to_stop(self) -> bool:
        assert self._stop
        self._n_asked += 1
        try:
            if not self._stop():
                return False
            for _ in range(self._n_asked, self.state.n_layers):
                self._stop()  # once for each layer: who is asked may count them
        except BaseException as fault:
            self.fault = fault
        return True


def make_on_node(state: State) -> Callable[[int, bool, Any], bool]:
    """The function `on_node` of eval_callback.c. It runs for every node of every batch, so it does next to nothing for
    most."""
    base = ggml.ggml()
    read, layer, n_layer = ctypes.string_at, state.layer, len(state.layer)
    last, input_ = state.last, state.input
    others = {name for name in (last, input_) if name}
    taps = {state.taps[index].name: state.taps[index] for index in range(state.n_taps)}
    name_offset = 0

    def copy_out(tensor: int, part: Any) -> None:
        n_bytes = min(state.n_at_once, part.n_out)
        base.ggml_backend_tensor_get(tensor, part.out, 0, n_bytes)
        part.out += n_bytes
        part.n_out -= n_bytes

    def on_node(tensor: int, ask: bool, _: Any) -> bool:
        nonlocal name_offset
        if name_offset == 0:
            name_offset = base.ggml_get_name(tensor) - tensor
        if ask:  # True makes libllama compute up to this node and call again
            if state.stopped or read(tensor + name_offset) in others:
                return True
            if read(tensor + name_offset, n_layer) != layer:
                return False
            is_tapped = read(tensor + name_offset) in taps
            if not state.between:
                return is_tapped
            if state.n_layers == 0:
                state.began_ns = time.monotonic_ns()
            state.n_layers += 1
            return bool(state.n_layers == state.due) or is_tapped
        name = read(tensor + name_offset)
        if name in taps and not state.stopped:
            copy_out(tensor, taps[name])
        if name == input_:
            n_bytes = min(state.n_at_once, state.n_hidden)
            base.ggml_backend_tensor_set(tensor, state.hidden, 0, n_bytes)
            state.hidden += n_bytes
            state.n_hidden -= n_bytes
            return True
        if name == last:
            copy_out(tensor, state)
            return False
        # on a build with several backends False only ends the current part of the graph: say it again
        if not state.stopped and state.between and state.n_layers == state.due:
            state.stopped = state.stop()
            step = state.interval_ns * state.n_layers // (time.monotonic_ns() - state.began_ns + 1)
            state.due = state.n_layers + max(1, step)
        return not state.stopped

    return on_node
