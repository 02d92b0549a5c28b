"""The numbers of a model's header on which libllama ends the process, or computes nonsense: checked beforehand.

Shapes are left to libllama, which refuses those that do not fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.header import Value

MAX_EXPERTS = 1024
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
PARTLY_ROTATED = ("phi3",)
"""Architectures in which only a part of each head may be rotated."""


@dataclass(frozen=True, slots=True)
class NumberCheck:
    path: Path
    architecture: str
    metadata: dict[str, Value]

    def all(self) -> None:
        """UserError at the first number that cannot be."""
        self._floats()
        self._experts()
        self._heads()
        scaling = self._values("rope.scaling.type", "linear")[0]
        self._require(scaling in ROPE_SCALINGS, f"rope.scaling.type is {scaling!r}")

    def _floats(self) -> None:
        for key, value in self.metadata.items():
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
        n_heads = self._number("attention.head_count", 0)
        heads = zip(
            self._values("attention.head_count", 0), self._values("attention.head_count_kv", n_heads), strict=False
        )
        for n, n_kv in heads:
            sound = isinstance(n, int) and isinstance(n_kv, int) and 0 < n_kv <= n and n % n_kv == 0
            self._require(sound, f"there are {n} heads for {n_kv} of keys and values")
        default = self._number("embedding_length", 0) // n_heads
        key, value = (self._number(f"attention.{name}_length", default) for name in ("key", "value"))
        rotated = self._number("rope.dimension_count", key)
        partly = self.architecture in PARTLY_ROTATED and 0 < rotated <= key and rotated % 2 == 0
        sound = key == value > 0 and (rotated == key or partly)
        self._require(sound, f"heads have {key} and {value} values, {rotated} of them rotated")

    def _values(self, key: str, default: int | str) -> tuple[object, ...]:
        """One value a layer, or one for all."""
        value = self.metadata.get(f"{self.architecture}.{key}")
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
