"""A model's layers by its header and architecture: the possible slices, their metadata, and types and sizes of their
keys and values in a cache. Knows no tensor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from pipeinfer.models.gguf.architectures import Architecture, Number
from pipeinfer.models.gguf.header import BLOCKS, BOOL, Value, value_of
from pipeinfer.models.gguf.writer import encode_array, encode_number

_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "iq4_nl": 20, "q5_0": 6, "q5_1": 7}
"""GGML's numbers."""

CACHE_TYPES = tuple(_TYPES)


class KvShape(NamedTuple):
    """What a token has in a layer's cache: heads, and how many numbers a head's key and value have. All 0: nothing."""

    n_heads: int = 0
    key: int = 0
    value: int = 0


class CacheTypes(NamedTuple):
    """The types of keys and of values, names of CACHE_TYPES."""

    k: str = "f16"
    v: str = "f16"

    @property
    def ggml(self) -> tuple[int, int]:
        return _TYPES[self.k], _TYPES[self.v]

    def cell_bytes(self, layers: Sequence[KvShape]) -> tuple[int, ...]:
        """Of one token, in each of the layers."""
        return tuple(_bytes(self.k, n * key) + _bytes(self.v, n * value) for n, key, value in layers)


F16_CACHE = CacheTypes()


def block_length(name: str) -> int:
    """Numbers that are quantised together: a head has a multiple of it."""
    return BLOCKS[_TYPES[name]][0]


def _bytes(name: str, n: int) -> int:
    length, n_bytes = BLOCKS[_TYPES[name]]
    return -(-n // length) * n_bytes


PER_LAYER_KEYS = frozenset(
    """attention.head_count attention.head_count_kv attention.recurrent_layers attention.sliding_window_pattern
    attention.compress_ratios attention.indexer.types attention.rope_pattern expert_feed_forward_length
    expert_used_count feed_forward_length swiglu_clamp_exp swiglu_clamp_shexp xielu.alpha_n xielu.alpha_p xielu.beta
    xielu.eps""".split()
)
T = TypeVar("T")
WINDOW, WINDOWS = "attention.sliding_window", "attention.sliding_window_pattern"
DENSE_FIRST, EXTRA = "leading_dense_block_count", "nextn_predict_layers"


@dataclass(frozen=True)
class Layers:
    """The `n` layers of a model that predict the next token. `name`: the architecture's."""

    name: str
    architecture: Architecture
    metadata: Mapping[str, Value]
    n: int

    def refusal(self) -> str:
        """Why this model cannot be cut; empty if it can."""
        n_layers = {"block_count": self.n}
        numbers = ((each, n_layers.get(each.key, self._value(each.key))) for each in self.architecture.refusals)
        reasons = (each.why for each, number in numbers if each.holds(number))
        return self.architecture.refused or next(reasons, "")

    def fault(self, first: int, last: int) -> str:
        """Why layers [first, last) cannot be a slice; empty if they can. All layers always can."""
        traits = self.architecture
        if last - first == self.n:
            return ""
        if first % self.step:
            return f"it can only be cut before layers {self.step}, {2 * self.step}, …"
        if last - first < traits.least:
            return f"a slice needs {traits.least} layers at least"
        if not all(self.of_layers(key, 1)[first] for key in traits.first_with):
            return f"a slice must begin with a layer of which {' and '.join(traits.first_with)} is more than 0"
        if not all(self.of_layers(key, 1)[last - 1] for key in traits.last_with):
            return f"a slice must end with a layer of which {' and '.join(traits.last_with)} is more than 0"
        if last - first in traits.lengths_not:
            return f"a slice must not have {last - first} layers"
        if traits.windows and traits.windows.always and not any(self.windows[first:last]):
            return "a slice needs a layer with a sliding window"
        if traits.windows and traits.windows.leads and self.windows[first] and not self.windows[0]:
            return "the first layer of a slice must see all tokens"
        if traits.states and not traits.states.all:
            if not any(self.stateful[first:last]):
                return "a slice needs a layer with a state"
            if not any(self.attentive[first:last]):
                return "a slice needs a layer with attention"
        return ""

    @property
    def faults(self) -> dict[tuple[int, int], str]:
        """The `fault` of each span of layers that cannot be a slice, by (first, last)."""
        traits = self.architecture
        by_layer = traits.windows or traits.states or traits.first_with or traits.last_with
        if not (self.step > 1 or traits.least > 1 or traits.lengths_not or by_layer):
            return {}
        runs = ((first, last) for first in range(self.n) for last in range(first + 1, self.n + 1))
        return {run: fault for run in runs if (fault := self.fault(*run))}

    def unused(self, first: int, last: int) -> tuple[str, ...]:
        """Tensors that a slice must not have."""
        return self.architecture.of_full if all(self.windows[first:last]) else ()

    @cached_property
    def step(self) -> int:
        step = self.architecture.step
        return max(1, step if isinstance(step, int) else self.get(step, 1))

    @property
    def n_dense(self) -> int:
        """Layers without experts at the beginning of a model with experts."""
        return self.get(DENSE_FIRST, 0)

    @property
    def n_vocab(self) -> int:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return tokens.n_items if tokens is not None else self.get("vocab_size", 0)

    @property
    def shares_values(self) -> bool:
        """Whether the values are a part of the keys (multi-head latent attention)."""
        return self.get("attention.key_length_mla", 0) > 0

    @cached_property
    def windows(self) -> tuple[bool, ...]:
        """Of each layer, whether it has a sliding window."""
        windows = self.architecture.windows
        if windows is None or not (windows.always or self.get(WINDOW, 0)):
            return (False,) * self.n
        flags = self._value(WINDOWS)
        if isinstance(flags, tuple):
            return tuple(map(bool, flags[: self.n]))
        return _pattern(self.n, self.get(WINDOWS, windows.period), windows.full_first)

    @property
    def window(self) -> int:
        """The tokens in its layers' windows, at least 1; 0 if there are none."""
        return max(1, self.get(WINDOW, 0)) if any(self.windows) else 0

    @cached_property
    def stateful(self) -> tuple[bool, ...]:
        states = self.architecture.states
        if states is None or states.all:
            return (states is not None,) * self.n
        if states.zero:
            arrays = [self.of_layers(key, 0) for key in states.zero]
            return tuple(not any(values) for values in zip(*arrays, strict=True))
        flags = self._value(states.key)
        if isinstance(flags, tuple):
            return tuple(map(bool, flags[: self.n]))
        return _pattern(self.n, self.get(states.period_key, states.period), False)

    @property
    def exact(self) -> bool:
        """Whether slices have the bits of the whole model."""
        return self.architecture.exact and self.query_scale == 1

    @property
    def n_selected(self) -> int:
        """Earlier tokens that a row sees at most, those with the highest scores; 0: all."""
        return self.get(self.architecture.selects, 0)

    @property
    def query_scale(self) -> float:
        """The factor of queries in slices; see `Rescaled`."""
        if self.architecture.rescaled is None or self.architecture.rescaled.n_layer != self.n:
            return 1.0
        n_heads, n_embd = self.get("attention.head_count", 1), self.get("embedding_length", 1)
        return math.sqrt(self.get("attention.key_length", n_embd // n_heads) * n_heads / n_embd)

    @property
    def rewinds(self) -> bool:
        """Whether a sequence can go back: a state cannot."""
        return self.architecture.states is None

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """Of each layer, the bytes of a sequence's state; libllama's formulas."""
        n_conv = max(self.get("ssm.conv_kernel", 1) - 1, 0)
        n_heads, length = self.get("attention.head_count", 0), self.get("kda.head_dim", 0)
        inner, state = self.get("ssm.inner_size", 0), self.get("ssm.state_size", 0)
        n_values = n_conv * (inner + 2 * self.get("ssm.group_count", 0) * state) + state * inner
        if length:
            n_values = 3 * n_conv * n_heads * length + n_heads * length * length
        if n_short := self.get("shortconv.l_cache", 0):
            n_values = self.get("embedding_length", 0) * (n_short - 1)
        return tuple(4 * n_values if stateful else 0 for stateful in self.stateful)

    @property
    def attentive(self) -> tuple[bool, ...]:
        """Of each layer, whether it has attention; one may have a state too, or neither."""
        states = self.architecture.states
        if states and states.zero:
            return tuple(map(bool, self.of_layers(states.zero[0], 0)))
        return tuple(not stateful or (states is not None and states.all) for stateful in self.stateful)

    def has(self, key: str) -> bool:
        return self._value(key) is not None

    def of_layers(self, key: str, default: Number | None) -> tuple[object, ...]:
        """One value a layer, also if the metadata have one for all."""
        value = self._value(key, default)
        return value[: self.n] if isinstance(value, tuple) else (value,) * self.n

    def metadata_of(self, layers: Sequence[int]) -> dict[str, bytes]:
        """The metadata for a model of these layers, in this order: key -> encoded value. If the first of them is not
        the model's first, they are a slice's. b"" for long arrays (see `Value`)."""
        prefix = f"{self.name}."
        shared = {
            key: _select(value, layers) if key.removeprefix(prefix) in PER_LAYER_KEYS else value.raw
            for key, value in self.metadata.items()
        }
        return shared | {prefix + key: value for key, value in self._changed(layers).items()}

    def _changed(self, layers: Sequence[int]) -> dict[str, bytes]:
        """The entries for these layers that differ from the model's."""
        traits, first = self.architecture, layers[0]
        numbers: dict[str, Number] = {"block_count": len(layers)}
        numbers |= {key: of(self.n, self.n_vocab) for key, of in traits.missing.items() if not self.has(key)}
        numbers |= {**traits.always, **(traits.later if first else {})}
        if first and self.n_dense:
            numbers[DENSE_FIRST] = max(0, self.n_dense - first)
        if self.get(EXTRA, 0):
            numbers[EXTRA] = 0
        changed = {key: encode_number(number) for key, number in numbers.items()}
        if any(self.windows):
            windows = [self.windows[layer] for layer in layers]
            # a model without such layers must not have a window either
            flags = {WINDOWS: encode_array(BOOL, windows)}
            changed |= flags if any(windows) else {WINDOW: encode_number(0), WINDOWS: b""}
        if traits.states and traits.states.key:
            changed[traits.states.key] = encode_array(BOOL, [self.stateful[layer] for layer in layers])
        return changed

    def get(self, key: str, default: T) -> T:
        """The metadata's value if it has the default's type (for a float also an int), else the default."""
        return value_of(self.metadata, f"{self.name}.{key}", default)

    def _value(self, key: str, default: object = None) -> object:
        entry = self.metadata.get(f"{self.name}.{key}")
        return default if entry is None else entry.value


def _pattern(n: int, period: int, other_first: bool) -> tuple[bool, ...]:
    """Of each layer, whether it is not the last of `period` ones, or not the first; all are not if that is 0."""
    return tuple(period == 0 or layer % period != (0 if other_first else period - 1) for layer in range(n))


def _select(value: Value, layers: Sequence[int]) -> bytes:
    """The items of these layers; a value that all layers share stays, and none."""
    if not isinstance(value.value, tuple) or not value.value:
        return value.raw
    return encode_array(value.item_type, [value.value[layer] for layer in layers])
