"""Amounts of bytes as texts."""

from __future__ import annotations


def size_text(n_bytes: float) -> str:
    """`3.2 GB`, three digits at most before the unit changes."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.5:
            return f"{n_bytes:.0f} {unit}" if unit in ("B", "kB") else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"
