"""`python -m pipeinfer` is the `pipeinfer` command."""

from pipeinfer.cli.main import main

main()
