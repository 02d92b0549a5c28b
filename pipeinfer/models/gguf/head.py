"""What a draft that reads a target's residual stream wants of it. Opens no file."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

OWN_HEAD = Path("mtp")
"""What stands for the head in a target's own file, in the place of a draft's."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a head reads, and what it can say.

    target_layers  the layers of the target whose inputs it reads, in its order; the number of layers: what comes out
    n_embd_target  length of the target's residual stream
    n_tokens       of the target's tokens, how many it can guess
    lacks          tensors that are the target's
    own            it came with the target, in its file or beside it (MTP)
    """

    target_layers: tuple[int, ...]
    n_embd_target: int
    n_tokens: int
    lacks: tuple[str, ...]
    own: bool = False

    @property
    def shift(self) -> int:
        """Positions that the cell of a token is before the token's own."""
        return 0 if self.own else 1

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
