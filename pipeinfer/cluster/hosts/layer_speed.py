"""How fast a rank is at a model's layers, in seconds of one row. Knows sizes; loads and times nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NOW, BEFORE = "timed now", "timed before"
"""Sources: the rank itself."""


@dataclass(frozen=True, slots=True)
class LayerSpeed:
    """s_per_byte  of a layer's weights
    output_s    of the output matrix; None: as long as layers of so many bytes
    source      who says so
    """

    s_per_byte: float
    output_s: float | None = None
    source: str = ""

    def seconds(self, layer_bytes: Sequence[int], output_bytes: int) -> list[float]:
        """Of each layer, the output matrix in the last one."""
        *layers, last = (self.s_per_byte * n_bytes for n_bytes in layer_bytes)
        return [*layers, last + (self.s_per_byte * output_bytes if self.output_s is None else self.output_s)]

    def layer_s(self, layer_bytes: Sequence[int]) -> float:
        """Of a layer of the model's mean size."""
        return self.s_per_byte * sum(layer_bytes) / len(layer_bytes)


def distinct_speeds(speeds: Sequence[LayerSpeed | None]) -> list[LayerSpeed]:
    """Those of all, where every one is known and they are not all alike; else none: then sizes say as much."""
    known = [speed for speed in speeds if speed]
    return known if len(known) == len(speeds) and len(set(known)) > 1 else []
