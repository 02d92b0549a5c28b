"""The numbers of a model's header on which libllama ends the process, or computes nonsense: checked beforehand.

Shapes are left to libllama, which refuses those that do not fit.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.architecture import PART, WHOLE
from pipeinfer.models.gguf.layers import Layers

MAX_EXPERTS = 1024
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class NumberCheck:
    path: Path
    layers: Layers

    def all(self) -> None:
        """UserError at the first number that cannot be."""
        self._floats()
        self._experts()
        self._heads()
        scaling = self._values("rope.scaling.type", "linear")[0]
        self._require(scaling in ROPE_SCALINGS, f"rope.scaling.type is {scaling!r}")

    def _floats(self) -> None:
        for key, value in self.layers.metadata.items():
            if isinstance(value.value, float):
                sound = math.isfinite(value.value) and (value.value >= 0 or "epsilon" not in key)
                self._require(sound, f"{key} is {value.value}")

    def _experts(self) -> None:
        n, used = self._number("expert_count", 0), self._values("expert_used_count", 0)
        groups, groups_used = self._number("expert_group_count", 0), self._number("expert_group_used_count", 0)
        most = max((item for item in used if isinstance(item, int)), default=0)
        self._require(0 <= n <= MAX_EXPERTS and (0 < most <= n if n else most == 0), f"{most} of {n} experts are used")
        fits = groups <= 1 or (n % groups == 0 and 0 < groups_used < groups)
        self._require(0 <= groups < max(n, 1) and fits, f"{groups_used} of {groups} groups of {n} experts are used")

    def _heads(self) -> None:
        counts = self._values("attention.head_count", 0)
        kv_counts = self._values("attention.head_count_kv", 0) if self.layers.has("attention.head_count_kv") else counts
        n_heads = next((n for n in counts if n), 0)
        n_layers = max(len(counts), len(kv_counts))
        for n, n_kv in zip(_spread(counts, n_layers), _spread(kv_counts, n_layers), strict=False):
            sound = isinstance(n, int) and isinstance(n_kv, int) and 0 < n_kv <= n and n % n_kv == 0
            none = self.layers.known.headless and n_kv == 0
            self._require(sound or none, f"there are {n} heads for {n_kv} of keys and values")
        if not isinstance(n_heads, int) or n_heads == 0:
            return
        default = self._number("embedding_length", 0) // n_heads
        key, value = (self._number(f"attention.{name}_length", default) for name in ("key", "value"))
        rotated, allowed = self._number("rope.dimension_count", key), self.layers.known.heads
        part = 0 <= rotated <= key and rotated % 2 == 0 and allowed != WHOLE
        equal = key == value or allowed not in (WHOLE, PART)
        sound = key > 0 < value and equal and (rotated == key or part)
        self._require(sound, f"heads have {key} and {value} values, {rotated} of them rotated")

    def _values(self, key: str, default: int | str) -> tuple[object, ...]:
        """One value a layer, or one for all."""
        value = self.layers.metadata.get(f"{self.layers.name}.{key}")
        found = default if value is None else value.value
        return (found if found else (default,)) if isinstance(found, tuple) else (found,)

    def _number(self, key: str, default: int) -> int:
        number = self._values(key, default)[0]
        if isinstance(number, int):
            return number
        raise self._damaged(f"{key} is {number!r}")

    def _require(self, sound: bool, otherwise: str) -> None:
        if not sound:
            raise self._damaged(otherwise)

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{self.path} is damaged: {what[:200]}; copy or download the file again")


def _spread(values: tuple[object, ...], n: int) -> tuple[object, ...]:
    """One value for all as one for each of `n`."""
    return values * n if len(values) == 1 else values
