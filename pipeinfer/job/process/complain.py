"""The one line about what is wrong, on standard error. Knows nothing of what it says."""

import sys


def complain(message: str) -> None:
    """Rank 0 only."""
    print(f"pipeinfer: {message}", file=sys.stderr)
