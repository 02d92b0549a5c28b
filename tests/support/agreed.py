"""A job whose ranks agree: `python -m tests.support.agreed WHO`, the ranks on which something is wrong (`1,2`).

Every rank says what it has come to on standard output; the job ends as a command of pipeinfer does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from pipeinfer.cluster.hosts.launch import exit_together
from pipeinfer.errors import JobError, UserError
from pipeinfer.job.launch import Crew, start_job
from pipeinfer.job.options.sections import PlacementOptions


def main() -> int:
    failing = [int(rank) for rank in sys.argv[1].split(",") if rank]

    def part(crew: Crew) -> int:
        link = crew.link

        def act() -> str:
            if link.rank in failing:
                raise UserError(f"no luck on rank {link.rank}")
            return f"of rank {link.rank}"

        def tried(agree: Callable[[Callable[[], str]], str]) -> str:
            try:
                return agree(act)
            except JobError as error:
                return f"raised: {error}"

        said = link.all_gather((tried(link.agree), tried(link.agree_all)))
        if link.rank == 0:
            print(*said, sep="\n", flush=True)
        link.agree_all(act)
        return 0

    return start_job(part, PlacementOptions(), PlacementOptions())


exit_together(main())
