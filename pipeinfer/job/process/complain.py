"""The one line about what is wrong, on standard error. Knows nothing of what it says."""

from __future__ import annotations

import sys


def complain(message: str) -> None:
    """Rank 0 only."""
    print(f"pipeinfer: {message}", file=sys.stderr)
