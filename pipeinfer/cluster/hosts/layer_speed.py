"""A rank's speed at a model's layers, as seconds of one row. Knows sizes; loads and times nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

NOW, BEFORE = "timed now", "timed before"
"""Sources of times."""


@dataclass(frozen=True, slots=True)
class LayerSpeed:
    """s_per_byte  of a layer's weights
    output_s    of the output matrix; None: the same as layers of so many bytes
    source      where the times are from
    """

    s_per_byte: float
    output_s: float | None = None
    source: str = ""

    def seconds(self, layer_bytes: Sequence[int], output_bytes: int) -> list[float]:
        """Seconds of each layer; the last one includes the output matrix."""
        *layers, last = (self.s_per_byte * n_bytes for n_bytes in layer_bytes)
        return [*layers, last + (self.s_per_byte * output_bytes if self.output_s is None else self.output_s)]

    def layer_s(self, layer_bytes: Sequence[int]) -> float:
        """Seconds of a layer of the model's mean size."""
        return self.s_per_byte * sum(layer_bytes) / len(layer_bytes)


def distinct_speeds(speeds: Sequence[LayerSpeed | None]) -> list[LayerSpeed]:
    """The speeds, if all are known and they differ; else none, and sizes alone decide."""
    known = [speed for speed in speeds if speed]
    return known if len(known) == len(speeds) and len(set(known)) > 1 else []
