"""Many requests at once on the toy for as long as wanted: random arrivals, prompts that begin alike, policies, stops,
splits, drafts and cells.

`python benchmarks/soak_many.py --trees 100000` goes on with the test suite's cases: every text must be the toy target's
own, every audit hold, and nothing be left when a case ends. Names the case that does not.
"""

from __future__ import annotations

import sys
import time
from itertools import count
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.test_many_requests import run_case


@click.command(help=__doc__)
@click.option("--trees", default=100_000, show_default=True, help="Settled trees to reach.")
@click.option("--first", default=1000, show_default=True, help="The case to begin with.")
def main(trees: int, first: int) -> None:
    start_s, n_trees, n_prompt, n_shared = time.monotonic(), 0, 0, 0
    for case in count(first):
        try:
            found = run_case(case)
        except Exception:
            print(f"case {case}, after {n_trees} settled trees:", file=sys.stderr, flush=True)
            raise
        n_trees, n_prompt, n_shared = n_trees + found.n_trees, n_prompt + found.n_prompt, n_shared + found.n_shared
        if n_trees >= trees:
            break
    print(f"{case - first + 1} cases, {n_trees} settled trees in {time.monotonic() - start_s:.0f} s, {n_shared} of "
          f"{n_prompt} tokens of prompts shared, 0 faults")  # fmt: skip


if __name__ == "__main__":
    main()
