"""What a model's layers are, by its header and what is known of its architecture: which slices there can be, and what
the metadata of one say. Knows no tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeinfer.models.gguf.architecture import Architecture, Number
from pipeinfer.models.gguf.header import BOOL, Value
from pipeinfer.models.gguf.values import encode_array, encode_number

PER_LAYER_KEYS = frozenset([
    "attention.head_count", "attention.head_count_kv", "attention.recurrent_layers", "attention.sliding_window_pattern",
    "attention.compress_ratios", "attention.indexer.types", "attention.rope_pattern", "expert_feed_forward_length",
    "expert_used_count", "feed_forward_length", "swiglu_clamp_exp", "swiglu_clamp_shexp", "xielu.alpha_n",
    "xielu.alpha_p", "xielu.beta", "xielu.eps",
])  # fmt: skip
WINDOW, WINDOWS = "attention.sliding_window", "attention.sliding_window_pattern"
DENSE_FIRST, EXTRA = "leading_dense_block_count", "nextn_predict_layers"


@dataclass(frozen=True)
class Layers:
    """The `n` layers of a model that predict the next token; `name` is the architecture's."""

    name: str
    known: Architecture
    metadata: Mapping[str, Value]
    n: int

    def refusal(self) -> str:
        """Why this model cannot be cut, as far as is known; empty if it can."""
        whys = (each.why for each in self.known.refusals if each.holds(self._value(each.key, self.n)))
        return self.known.refused or next(whys, "")

    def fault(self, first: int, last: int) -> str:
        """Why layers [first, last) cannot be a slice of their own; empty if they can. All layers always can."""
        if last - first == self.n:
            return ""
        if first % self.step:
            return f"it can only be cut before every {self.step}th layer"
        if last - first < self.known.least:
            return f"a slice needs {self.known.least} layers at least"
        if self.known.windows and self.known.windows.always and not any(self.windows[first:last]):
            return "a slice needs a layer with a sliding window"
        kinds = set(self.stateful[first:last])
        if self.known.states and not self.known.states.all and len(kinds) < 2:
            return f"a slice needs a layer with {'attention' if kinds == {True} else 'a state'}"
        return ""

    @cached_property
    def step(self) -> int:
        step = self.known.step
        return max(1, step if isinstance(step, int) else self._number(step, 1))

    @property
    def n_dense(self) -> int:
        """Layers that a model with experts begins with and that have none."""
        return self._number(DENSE_FIRST, 0)

    @cached_property
    def windows(self) -> tuple[bool, ...]:
        """Of each layer, whether it sees only so many tokens back."""
        known = self.known.windows
        if known is None or not (known.always or self._number(WINDOW, 0)):
            return (False,) * self.n
        found = self._value(WINDOWS)
        if isinstance(found, tuple):
            return tuple(map(bool, found[: self.n]))
        return _pattern(self.n, self._number(WINDOWS, known.period), known.full_first)

    @cached_property
    def stateful(self) -> tuple[bool, ...]:
        """Of each layer, whether it has a state that its last token leaves."""
        known = self.known.states
        if known is None or known.all:
            return (known is not None,) * self.n
        if known.zero:
            arrays = [self.of_layers(key, 0) for key in known.zero]
            return tuple(not any(values) for values in zip(*arrays, strict=True))
        found = self._value(known.key)
        if isinstance(found, tuple):
            return tuple(map(bool, found[: self.n]))
        return _pattern(self.n, self._number(known.period_key, known.period), False)

    def has(self, key: str) -> bool:
        return self._value(key) is not None

    def of_layers(self, key: str, default: Number | None) -> tuple[object, ...]:
        """One value a layer, where the metadata have one for all too."""
        found = self._value(key, default)
        return found[: self.n] if isinstance(found, tuple) else (found,) * self.n

    def metadata_of(self, layers: Sequence[int]) -> dict[str, bytes]:
        """The metadata for a model of these of its layers, in this order: key -> encoded value.

        Of a slice where the first of them is not the model's first. b"" for what the header leaves out (see `Value`).
        """
        prefix = f"{self.name}."
        found = {
            key: _cut(value, layers) if key.removeprefix(prefix) in PER_LAYER_KEYS else value.raw
            for key, value in self.metadata.items()
        }
        return found | {prefix + key: value for key, value in self._own(layers).items()}

    def _own(self, layers: Sequence[int]) -> dict[str, bytes]:
        """What is said of these layers in other words than of all of them."""
        known, first = self.known, layers[0]
        numbers: dict[str, Number] = {"block_count": len(layers)}
        numbers |= {key: of_model(self.n) for key, of_model in known.missing.items() if self._value(key) is None}
        numbers |= {**known.always, **(known.later if first else {})}
        if first and self.n_dense:
            numbers[DENSE_FIRST] = max(0, self.n_dense - first)
        if self._number(EXTRA, 0):
            numbers[EXTRA] = 0
        own = {key: encode_number(number) for key, number in numbers.items()}
        if any(self.windows):
            windows = [self.windows[layer] for layer in layers]
            # a model without such layers must not have a window either
            own |= {WINDOWS: encode_flags(windows)} if any(windows) else {WINDOW: encode_number(0), WINDOWS: b""}
        if known.states and known.states.key:
            own[known.states.key] = encode_flags([self.stateful[layer] for layer in layers])
        return own

    def _number(self, key: str, default: int) -> int:
        found = self._value(key, default)
        return found if isinstance(found, int) else default

    def _value(self, key: str, default: object = None) -> object:
        found = self.metadata.get(f"{self.name}.{key}")
        return default if found is None else found.value


def _pattern(n: int, period: int, other_first: bool) -> tuple[bool, ...]:
    """Of every `period` layers, whether it is not the last one, or not the first; every one is none where that is 0."""
    return tuple(period == 0 or layer % period != (0 if other_first else period - 1) for layer in range(n))


def _cut(value: Value, layers: Sequence[int]) -> bytes:
    """A value that all layers share stays as it is."""
    if not isinstance(value.value, tuple):
        return value.raw
    return encode_array(value.item_type, [value.value[layer] for layer in layers])


def encode_flags(flags: Sequence[bool]) -> bytes:
    return encode_array(BOOL, flags)
