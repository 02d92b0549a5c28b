"""What layers that see only so many tokens back have given up of a text. Knows its ends; no sequences and no tree.

libllama gives up the cells outside the window when a prompt's are moved in and when all are packed, and where nothing
is parked whenever it wants a cell. Who goes back, or begins with another's tokens, needs those that its own window
holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.core.kv.paths import Base


@dataclass(frozen=True, slots=True)
class Window:
    """`size`: tokens that such layers see, at least; 0 if there are none. `parked`: cells are given up only then."""

    size: int
    parked: bool

    def lose(self, base: Base) -> None:
        """Cells may be given up now: those stay that the text's end sees."""
        if self.size and base.end >= self.size:
            base.lost_at = base.end

    def has(self, base: Base, end: int, n_tokens: int) -> bool:
        """Whether what the end of the first `n_tokens` sees is there. `end`: of all that the text's sequence holds."""
        return not self.size or end < self.size or n_tokens >= (base.lost_at if self.parked else end)
