"""The `pipeinfer` command with one rank that comes late to a step which all ranks take together.

`python -m tests.support.late STEP RANK FOLDER run …`: each rank leaves its process id in FOLDER when it comes to the
step, a method of `Link` or `clock_offset_s`; RANK then sleeps for LATE_S. Clocks are compared as between hosts.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

LATE_S = 30.0


def main() -> None:
    from pipeinfer.cli import main as pipeinfer
    from pipeinfer.cluster.hosts import host
    from pipeinfer.cluster.transport import Link  # initialises MPI
    from pipeinfer.job import launch

    host.clock_name = str

    _, step, late_rank, folder, *arguments = sys.argv
    owner: Any = launch if step == "clock_offset_s" else Link
    take = getattr(owner, step)

    def take_late(link: Link, *given: Any) -> Any:
        (Path(folder) / f"{link.rank}.new").write_text(str(os.getpid()))
        (Path(folder) / f"{link.rank}.new").rename(Path(folder) / str(link.rank))
        if link.rank == int(late_rank):
            time.sleep(LATE_S)
        return take(link, *given)

    setattr(owner, step, take_late)
    sys.argv[1:] = arguments
    pipeinfer()


if __name__ == "__main__":
    main()
