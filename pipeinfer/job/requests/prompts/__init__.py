"""The texts that `bench` and experiments.sh continue unless they are given others. Knows where they lie."""

from pathlib import Path

TEXTS = tuple(Path(__file__).with_name(f"{name}.txt") for name in ("program", "tale", "excerpt"))
