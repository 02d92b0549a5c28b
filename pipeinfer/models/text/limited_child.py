"""The inside of a `limited_process`: one JSON object is read from standard input, the answer is written to standard
output."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from importlib import import_module


def main(module: str, cpu_s: str, n_bytes: str) -> None:
    work = import_module(module)  # while nobody waits: it may have been started ahead
    asked = json.load(sys.stdin)
    limits = ((resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, n_bytes), (resource.RLIMIT_CORE, 0))
    for name, most in limits:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (int(most), int(most)))
    json.dump(work.answer(asked), sys.stdout)
