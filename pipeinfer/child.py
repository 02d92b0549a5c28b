"""The command line of a Python child process that imports what this process can import. Knows no model and no MPI."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[1])


def python_command(code: str, *arguments: object) -> list[str]:
    """Run `code` with `arguments` as `sys.argv[1:]`. Its `sys.path` is this process's.

    The current directory, which `-c` and `-m` add, is left out: a `json.py` that lies there must not replace the
    standard library's.
    """
    paths = [path for path in sys.path if path]
    if ROOT not in paths:  # `python -m pipeinfer` in the source tree
        paths.insert(0, ROOT)
    return [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}\n{code}", *map(str, arguments)]
