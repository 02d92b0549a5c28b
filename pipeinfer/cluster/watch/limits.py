"""How long the watch waits for ranks to join, and for silent ones. Standard library alone."""

import contextlib
import os
from dataclasses import dataclass

JOIN_S = 60.0
"""How long ranks wait for each other at the start, unless the environment variable JOIN_VARIABLE is set."""

JOIN_VARIABLE = "PIPEINFER_JOIN_TIMEOUT"

BEATS = 6
"""Heartbeats of a rank in `silent_s`."""

LEAST_S, MOST_S = 3, 86400
"""Range of --rank-timeout: a host that loads a large model is sometimes silent for a second."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`link_s`: time without network packets after which a host is lost; `silent_s`: time without heartbeats after
    which a process is. A slow process is not lost, so the latter's default is longer."""

    link_s: float = 6.0
    silent_s: float = 60.0

    @classmethod
    def of(cls, timeout_s: float | None) -> "Limits":
        """Both limits set to `timeout_s`; None: the defaults."""
        return cls() if timeout_s is None else cls(timeout_s, timeout_s)

    @property
    def beat_s(self) -> float:
        """Seconds between heartbeats."""
        return self.silent_s / BEATS

    @property
    def keepalive(self) -> dict[str, int]:
        """Socket options of a connection that fails after `link_s` without packets: the first probe after a third of
        it, then one every sixth, in whole seconds; unacknowledged data fails it as soon."""
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
    """The value of JOIN_VARIABLE, or JOIN_S."""
    with contextlib.suppress(ValueError):
        return max(1.0, float(os.environ.get(JOIN_VARIABLE, JOIN_S)))
    return JOIN_S
