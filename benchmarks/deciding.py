"""What policies take to decide: one question what to send and one what to draft, by the size of the tree.

`python benchmarks/deciding.py` prints microseconds of processor time for both together, half of the nodes sent.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from pipeinfer.core.levels import Level
from pipeinfer.core.policy import Policy, View
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess, Run, Verdict
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.policies.registry import POLICIES

SIZES = (8, 64, 256)
N_CHEAP = (2, 32)
N_REPEATED = 300


class Silent:
    """A pipeline of eight stages that takes everything and says nothing."""

    n_stages, is_at_head = 8, False

    def submit(self, run: Run) -> None:
        pass

    def poll(self) -> Verdict | None:
        return None

    def cancel(self, run_ids: Sequence[int]) -> None:
        pass

    def prune(self, rows: object) -> None:
        pass


def opened(n_nodes: int, n_cheap: int, policy: Policy) -> View:
    """A request whose tree has so many nodes, of which half were sent and half expanded."""
    request = Request(0, [1, 2, 3], 4000, SamplingParams(temp=0.0), 8000)
    level = Level(Silent(), SequencePool(policy.n_seq, 8000))
    level.open(request)
    tree, rng = request.tree, random.Random(n_nodes)
    while len(tree.nodes) < n_nodes:
        node = rng.choice([node for node in tree.nodes if not node.expanded])
        shares = [rng.uniform(0.4, 0.9), 0.05, 0.02]
        tree.grow(node, [Guess(token, share) for token, share in enumerate(shares)], [-0.5, -3.0, -4.0])
    for index, node in enumerate(tree.nodes):
        node.run_id = 1 if index < n_nodes // 2 else None
    return View(
        request, level, 1, [], lambda: False, lambda context: n_cheap, lambda n_rows: 0.03, lambda: 0.01,
        lambda: ([], 0.0), lambda: True, lambda node: 0.2 + 1e-4 * node.position, lambda: 0.0,
    )  # fmt: skip


def microseconds(policy: Policy, view: View) -> float:
    """The lower quartile of some rounds: the machine does other things too."""
    rounds = list[int]()
    for _ in range(N_REPEATED):
        start_s = time.process_time_ns()
        policy.send(view)
        policy.draft(view)
        rounds.append(time.process_time_ns() - start_s)
    return sorted(rounds)[N_REPEATED // 4] / 1e3


def main() -> None:
    for name, kind in POLICIES.items():
        found = (f"{microseconds(kind(), opened(size, n, kind())):7.1f}" for n in N_CHEAP for size in SIZES)
        print(f"{name:12}", *found)
    print(f"{'':12}", *(f"{size:4}/{n:2}" for n in N_CHEAP for size in SIZES), " (nodes / rows that cost little)")


if __name__ == "__main__":
    main()
