"""Where a slice's input and output meet libllama's graph: its evaluation callback. Knows no cache and no batch.

libllama offers every node of the graph. The callback asks to see the last node of each layer, copies out that of the
last layer and of tapped ones, and may end the evaluation there. A GPU is waited for at each node that is seen, so with
layers on one only copied nodes are, and an evaluation that has begun goes to its end; with no node to copy there is no
callback, and libllama runs the same graph again. Where the graph changes embeddings before the first layer, the slice's
input overwrites the changed node.

A graph has some 30 nodes a layer: the callback is in C (`eval_callback.c`), and the same in Python for installations
without a compiler, beside a prebuilt llama-cpp-python, and for sources that are newer than what was compiled."""

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf.architectures import Architecture
from pipeinfer.models.llama import ggml

_Stop = ctypes.CFUNCTYPE(ctypes.c_bool)
OUTPUT = b"h_nextn"  # the node that a model's own head reads, after the last layer


class Tap(ctypes.Structure):
    """A node that is copied out while the evaluation goes on: its name, the address of its next rows, and the bytes of
    rows that are not copied yet."""

    _fields_ = [("name", ctypes.c_char_p), ("out", ctypes.c_void_p), ("n_out", ctypes.c_size_t)]


class CallbackState(ctypes.Structure):
    """The callback's data, in C and in Python; the same as in `eval_callback.c`.

    name_of, get, set  libggml's functions
    stop               called between layers: True ends the evaluation
    layer              the beginning of names of layers' last nodes
    last, input        the node that is copied out, and the one that is overwritten; NULL: none
    out, hidden        addresses of the next rows of output and input
    n_out, n_hidden    bytes of rows that are not copied yet
    n_at_once          bytes of the rows that libllama evaluates at a time
    interval_ns        approximate time between two layers after which `stop` is called
    began_ns           time of the first layer
    n_layers, due      layers since then, and the number of them at the next call of `stop`
    taps, n_taps       further nodes that are copied out
    between            whether `stop` is called between layers
    stopped            `stop` returned True"""

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
    """The callback in C; None if it was not built, or from another source than the one beside this file."""
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
    return library if (n_bytes, source) == (ctypes.sizeof(CallbackState), expected) else None


class SliceNodes(NamedTuple):
    """Which nodes of a slice's graph matter. `overwrites_input`: incoming activations replace its input node; `taps`:
    layers after which the residual stream is copied out."""

    architecture: Architecture
    n_layer: int
    overwrites_input: bool
    taps: Sequence[int] = ()


class EvalCallback:
    """between     whether an evaluation may be ended between layers; else before the first one
    out         (n_batch, n_embd), the residual stream after the slice; no rows on the last slice
    tapped      (n_taps, n_batch, n_embd), the same after tapped layers
    fault       the exception that `stop` raised
    function    for libllama, with `state` as its data; to be held as long as it has them"""

    def __init__(
        self, library: ModuleType, nodes: SliceNodes, out: FloatArray, tapped: FloatArray, interval_s: float | None
    ) -> None:
        """`interval_s`: approximate time between two calls of `stop`; 0: one after every layer; None: none."""
        architecture, n_layer, overwrites_input, taps = nodes
        self.out, self.between = out, interval_s is not None
        self._out_address, self._row_bytes = out.ctypes.data, 4 * out.shape[1]
        self.fault: BaseException | None = None
        self._stop: Callable[[], bool] | None = None
        base = ggml.ggml()
        functions = base.ggml_get_name, base.ggml_backend_tensor_get, base.ggml_backend_tensor_set
        names = [f"{architecture.layer_node}-{layer}".encode() for layer in range(n_layer)]
        last = architecture.end_node.encode() or names[-1]
        self.tapped = tapped
        end = last if len(out) else OUTPUT
        self._taps = (Tap * len(taps))(*(Tap(end if layer == n_layer - 1 else names[layer]) for layer in taps))
        self.state = CallbackState(
            *(ctypes.cast(each, ctypes.c_void_p) for each in functions),
            _Stop(self._call_stop),
            f"{architecture.layer_node}-".encode(),
            last if len(out) else None,
            architecture.input_node.encode() if overwrites_input and architecture.input_node else None,
            interval_ns=int(1e9 * (interval_s or 0.0)),
            taps=self._taps,
            n_taps=len(taps),
        )
        in_c = compiled()
        kind = library.ggml_backend_sched_eval_callback
        self.function = ctypes.cast(in_c.on_node, kind) if in_c else kind(make_on_node(self.state))

    @property
    def is_needed(self) -> bool:
        """Whether it looks at any node. Else libllama runs the graph as a whole, and again without building it."""
        return bool(self.between or self.state.last or self.state.input or self.state.n_taps)

    @property
    def stopped(self) -> bool:
        """The evaluation was ended."""
        return bool(self.state.stopped)

    def begin(self, stop: Callable[[], bool] | None) -> None:
        """Begin an evaluation of one or several batches. `stop` is called here, and may have `stopped` it then, or
        between layers; None: it goes to its end."""
        self._stop, self.fault, self._n_calls = stop, None, 0
        state = self.state
        state.between = self.between and stop is not None
        state.stopped = not self.between and stop is not None and stop()
        state.n_layers, state.due = 0, 1

    def expect(self, n_rows: int, n_at_once: int, at: int, hidden: FloatArray | None) -> None:
        """Prepare for a batch of n_rows, n_at_once at a time, that goes to the rows of `out` from `at` on. `hidden`:
        the slice's input, used if the graph has an input node."""
        state, row_bytes = self.state, self._row_bytes
        state.out, state.n_out = self._out_address + at * row_bytes, n_rows * row_bytes
        state.n_at_once = n_at_once * row_bytes
        for tap, rows in zip(self._taps, self.tapped, strict=True):
            tap.out, tap.n_out = rows.ctypes.data + at * row_bytes, n_rows * row_bytes
        if state.input and hidden is not None:
            self._hidden = np.ascontiguousarray(hidden, np.float32)  # held while it is read
            state.hidden, state.n_hidden = self._hidden.ctypes.data, self._hidden.nbytes

    def _call_stop(self) -> bool:
        assert self._stop
        self._n_calls += 1
        try:
            if not self._stop():
                return False
            for _ in range(self._n_calls, self.state.n_layers):
                self._stop()  # once for each layer: callers may count them
        except BaseException as fault:
            self.fault = fault
        return True


def make_on_node(state: CallbackState) -> Callable[[int, bool, Any], bool]:
    """The function `on_node` of eval_callback.c; called for every node of every batch."""
    base = ggml.ggml()
    read, layer, n_layer = ctypes.string_at, state.layer, len(state.layer)
    last, input_ = state.last, state.input
    ends = {name for name in (last, input_) if name}
    taps = {state.taps[index].name: state.taps[index] for index in range(state.n_taps)}
    name_offset = 0

    def copy_out(tensor: int, target: Any) -> None:
        n_bytes = min(state.n_at_once, target.n_out)
        base.ggml_backend_tensor_get(tensor, target.out, 0, n_bytes)
        target.out += n_bytes
        target.n_out -= n_bytes

    def on_node(tensor: int, ask: bool, _: Any) -> bool:
        nonlocal name_offset
        if name_offset == 0:
            name_offset = base.ggml_get_name(tensor) - tensor
        if ask:  # True makes libllama compute up to this node and call again
            if state.stopped or read(tensor + name_offset) in ends:
                return True
            is_tapped = read(tensor + name_offset) in taps
            if not state.between or read(tensor + name_offset, n_layer) != layer:
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
        # with several backends False only ends the current part of the graph: repeated for the others
        if not state.stopped and state.between and state.n_layers == state.due:
            state.stopped = state.stop()
            step = state.interval_ns * state.n_layers // (time.monotonic_ns() - state.began_ns + 1)
            state.due = state.n_layers + max(1, step)
        return not state.stopped

    return on_node
