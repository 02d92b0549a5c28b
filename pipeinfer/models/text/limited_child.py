"""The child of a `limited_process`: reads one JSON object from standard input, writes the answer to standard output."""

import contextlib
import json
import resource
import sys
from importlib import import_module


def main(module: str, cpu_s: str, n_bytes: str) -> None:
    work = import_module(module)  # before the question comes: the process may be started ahead
    asked = json.load(sys.stdin)
    limits = ((resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, n_bytes), (resource.RLIMIT_CORE, 0))
    for name, most in limits:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (int(most), int(most)))
    json.dump(work.answer(asked), sys.stdout)
