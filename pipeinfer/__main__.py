"""`python -m pipeinfer` is the `pipeinfer` command."""

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # -m puts the current folder first: its json.py must not replace the standard library's

from pipeinfer.cli import main

main()
