"""What a model's layers are, by its header and what is known of its architecture: which slices there can be, and what
the metadata of one say. Knows no tensor."""

import math
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
        whys = (each.why for each in self.known.refusals if each.holds(self._counted(each.key)))
        return self.known.refused or next(whys, "")

    def fault(self, first: int, last: int) -> str:
        """Why layers [first, last) cannot be a slice of their own; empty if they can. All layers always can."""
        if last - first == self.n:
            return ""
        if first % self.step:
            return f"it can only be cut before layers {self.step}, {2 * self.step}, …"
        if last - first < self.known.least:
            return f"a slice needs {self.known.least} layers at least"
        if not all(self.of_layers(key, 1)[first] for key in self.known.first_with):
            return f"a slice must begin with a layer of which {' and '.join(self.known.first_with)} is more than 0"
        if not all(self.of_layers(key, 1)[last - 1] for key in self.known.last_with):
            return f"a slice must end with a layer of which {' and '.join(self.known.last_with)} is more than 0"
        if last - first in self.known.lengths_not:
            return f"a slice must not have {last - first} layers"
        if self.known.windows and self.known.windows.always and not any(self.windows[first:last]):
            return "a slice needs a layer with a sliding window"
        if self.known.windows and self.known.windows.leads and self.windows[first] and not self.windows[0]:
            return "the first layer of a slice must see all tokens"
        if self.known.states and not self.known.states.all:
            if not any(self.stateful[first:last]):
                return "a slice needs a layer with a state"
            if not any(self.attentive[first:last]):
                return "a slice needs a layer with attention"
        return ""

    @property
    def faults(self) -> dict[tuple[int, int], str]:
        """The same of every run of layers for which there is a reason, by (first, last)."""
        known = self.known
        by_layer = known.windows or known.states or known.first_with or known.last_with
        if not (self.step > 1 or known.least > 1 or known.lengths_not or by_layer):
            return {}
        runs = ((first, last) for first in range(self.n) for last in range(first + 1, self.n + 1))
        return {run: fault for run in runs if (fault := self.fault(*run))}

    def unused(self, first: int, last: int) -> tuple[str, ...]:
        """Tensors that a slice must not have."""
        return self.known.of_full if all(self.windows[first:last]) else ()

    @cached_property
    def step(self) -> int:
        step = self.known.step
        return max(1, step if isinstance(step, int) else self._number(step, 1))

    @property
    def n_dense(self) -> int:
        """Layers that a model with experts begins with and that have none."""
        return self._number(DENSE_FIRST, 0)

    @property
    def n_vocab(self) -> int:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return tokens.n_items if tokens is not None else self._number("vocab_size", 0)

    @property
    def shares_values(self) -> bool:
        """Whether the values are a part of the keys (multi-head latent attention)."""
        return self._number("attention.key_length_mla", 0) > 0

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

    @property
    def window(self) -> int:
        """How many tokens back its layers with a window see, at least; 0 if there are none."""
        return max(1, self._number(WINDOW, 0)) if any(self.windows) else 0

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

    @property
    def exact(self) -> bool:
        """Whether slices compute what the whole model does, to the bit."""
        return self.known.exact and self.query_scale == 1

    @property
    def n_selected(self) -> int:
        """Earlier tokens that a row sees at most, those with the highest scores; 0: all."""
        return self._number(self.known.selects, 0)

    @property
    def query_scale(self) -> float:
        """What slices multiply to their queries; see `Rescaled`."""
        if self.known.rescaled is None or self.known.rescaled.n_layer != self.n:
            return 1.0
        n_heads, n_embd = self._number("attention.head_count", 1), self._number("embedding_length", 1)
        return math.sqrt(self._number("attention.key_length", n_embd // n_heads) * n_heads / n_embd)

    @property
    def rewinds(self) -> bool:
        """Whether a sequence can go back: a state cannot."""
        return self.known.states is None

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Of each layer, what a sequence's state takes; libllama's own formulas."""
        n_conv = max(self._number("ssm.conv_kernel", 1) - 1, 0)
        n_heads, length = self._number("attention.head_count", 0), self._number("kda.head_dim", 0)
        inner, state = self._number("ssm.inner_size", 0), self._number("ssm.state_size", 0)
        n_values = n_conv * (inner + 2 * self._number("ssm.group_count", 0) * state) + state * inner
        if length:
            n_values = 3 * n_conv * n_heads * length + n_heads * length * length
        if n_short := self._number("shortconv.l_cache", 0):
            n_values = self._number("embedding_length", 0) * (n_short - 1)
        return tuple(4 * n_values if stateful else 0 for stateful in self.stateful)

    @property
    def attentive(self) -> tuple[bool, ...]:
        """Of each layer, whether it has attention; one may have a state too, or neither."""
        states = self.known.states
        if states and states.zero:
            return tuple(map(bool, self.of_layers(states.zero[0], 0)))
        return tuple(not stateful or (states is not None and states.all) for stateful in self.stateful)

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
        numbers |= {key: of(self.n, self.n_vocab) for key, of in known.missing.items() if not self.has(key)}
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

    def _counted(self, key: str) -> object:
        return self.n if key == "block_count" else self._value(key)

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
