"""`python -m pipeinfer` is the `pipeinfer` command."""

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # -m puts the current folder first: a json.py that lies there must not be taken for the library's

from pipeinfer.cli.main import main

main()
