"""What a draft that reads a target's residual stream wants of it. Opens no file."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Head:
    """What a head reads, and what it can say.

    target_layers  the layers of the target whose inputs it reads, in its order
    n_embd_target  length of the target's residual stream
    n_tokens       of the target's tokens, how many it can guess
    lacks          tensors that are the target's
    """

    target_layers: tuple[int, ...]
    n_embd_target: int
    n_tokens: int
    lacks: tuple[str, ...]

    @property
    def layers_read(self) -> tuple[int, ...]:
        """The layers of the target whose outputs these are, ascending."""
        return tuple(sorted(layer - 1 for layer in self.target_layers))

    @property
    def order(self) -> tuple[int, ...]:
        """Where among `layers_read` each of `target_layers` is."""
        return tuple(self.layers_read.index(layer - 1) for layer in self.target_layers)


def layers_read(heads: Iterable[Head | None]) -> tuple[int, ...]:
    """By the one head among drafts, whose others are None."""
    return next((head.layers_read for head in heads if head), ())
