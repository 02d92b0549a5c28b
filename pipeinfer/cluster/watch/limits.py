"""How long the watch waits: for ranks that have not come, and for those that say nothing any more. Standard library
alone."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

JOIN_S = 60.0
"""How long ranks wait for each other at the start; the environment variable may say otherwise."""

JOIN_VARIABLE = "PIPEINFER_JOIN_TIMEOUT"

BEATS = 6
"""So many times in `silent_s` a rank says that it is there."""

LEAST_S, MOST_S = 3, 86400
"""What may be asked for: a host that is busy starting a large model says nothing for a second now and then."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`link_s`: until a host of which the network brings no sign is given up; `silent_s`: until a process is that says
    nothing though it is there. It may be slow without being lost, so unless told it has more time."""

    link_s: float = 6.0
    silent_s: float = 60.0

    @classmethod
    def of(cls, timeout_s: float | None) -> Limits:
        """Both as asked for; None: as usual."""
        return cls() if timeout_s is None else cls(timeout_s, timeout_s)

    @property
    def beat_s(self) -> float:
        """A rank says so often that it is there."""
        return self.silent_s / BEATS

    @property
    def keepalive(self) -> dict[str, int]:
        """The kernel's settings of a connection that ends when `link_s` have brought nothing: it asks after a third of
        them, then in sixths, in whole seconds, and what is never acknowledged is given up as soon."""
        idle_s = max(1, round(self.link_s / 3))
        every_s = max(1, round(self.link_s / 6))
        count = max(1, round((self.link_s - idle_s) / every_s))
        return {
            "TCP_KEEPIDLE": idle_s,
            "TCP_KEEPINTVL": every_s,
            "TCP_KEEPCNT": count,
            "TCP_USER_TIMEOUT": round(1000 * self.link_s),
        }


def join_limit_s() -> float:
    """Seconds that ranks wait for each other at the start."""
    with contextlib.suppress(ValueError):
        return max(1.0, float(os.environ.get(JOIN_VARIABLE, JOIN_S)))
    return JOIN_S
