"""Amounts as texts."""


def size_text(n_bytes: float) -> str:
    """`3.2 GB`, three digits at most before the unit changes."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.5:
            return f"{n_bytes:.0f} {unit}" if unit in ("B", "kB") else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def count_text(n: int, noun: str) -> str:
    """`1 core`, `2 cores`."""
    return f"{n} {noun}{'' if n == 1 else 's'}"
