"""The entry point of the `pipeinfer` command: Ctrl-C works before anything takes time, imports included."""

import gc
import os
from collections.abc import Sequence

from pipeinfer.cluster.hosts.launch import rank_from_environment
from pipeinfer.job.process.signals import end_at_once, on_signals
from pipeinfer.job.process.streams import take_streams

COLLECT_AFTER = 20_000
"""New objects after which Python's collector looks at them: by default 700, which takes 60 ms of a start's 500."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script. Exit codes: 0, 2 for bad input, 130 after Ctrl-C, 1 for a fault."""
    has_output = take_streams()  # first: an opened file must not take the number of a closed stream
    on_signals(end_at_once(rank_from_environment()))
    gc.set_threshold(COLLECT_AFTER)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy starts a thread for each core
    from pipeinfer.cli.commands import run_command

    run_command(arguments, has_output)
