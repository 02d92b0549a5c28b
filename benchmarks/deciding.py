"""What policies take to decide: one question what to send and one what to draft, by the size of the tree.

`python benchmarks/deciding.py` prints microseconds of processor time for both together, half of the nodes sent.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from pipeinfer.core.engine import Engine
from pipeinfer.core.levels import Level
from pipeinfer.core.policy import Policy, PolicyView
from pipeinfer.core.requests import Request
from pipeinfer.core.run_cost import RunCost
from pipeinfer.core.runs import Guess, Run, Verdict
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.policies import POLICIES

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


class NoDrafter:
    """Is never asked for a step here."""

    can_open = True

    def open(self, request: Request) -> None:
        pass


class Waiter:
    def wait(self, pipelines: Sequence[object], timeout_s: float | None = None) -> None:
        raise AssertionError("nobody waits here")


def opened(n_nodes: int, n_cheap: int, policy: Policy) -> PolicyView:
    """A request whose tree has so many nodes, of which half were sent and half expanded."""
    request = Request(0, [1, 2, 3], 4000, SamplingParams(temp=0.0), 8000)
    level = Level(Silent(), SequencePool(policy.n_sequences, 8000))
    cost = RunCost({1: 0.03, n_cheap: 0.03, 8 * n_cheap: 0.3})
    drafter: Any = NoDrafter()
    engine = Engine(level, drafter, Waiter(), time.perf_counter, run_cost=cost)
    engine.add(request, policy)
    tree, rng = request.tree, random.Random(n_nodes)
    while len(tree.nodes) < n_nodes:
        node = rng.choice([node for node in tree.nodes if not node.expanded])
        shares = [rng.uniform(0.4, 0.9), 0.05, 0.02]
        tree.grow(node, [Guess(token, share) for token, share in enumerate(shares)], [-0.5, -3.0, -4.0])
    for index, node in enumerate(tree.nodes):
        node.run_id = 1 if index < n_nodes // 2 else None
    return engine._active[0].context


def microseconds(policy: Policy, context: PolicyView) -> float:
    """The lower quartile of some rounds: the machine does other things too."""
    rounds = list[int]()
    for _ in range(N_REPEATED):
        start_s = time.process_time_ns()
        policy.send(context)
        policy.draft(context)
        rounds.append(time.process_time_ns() - start_s)
    return sorted(rounds)[N_REPEATED // 4] / 1e3


def main() -> None:
    for name, kind in POLICIES.items():
        found = (f"{microseconds(kind(), opened(size, n, kind())):7.1f}" for n in N_CHEAP for size in SIZES)
        print(f"{name:12}", *found)
    print(f"{'':12}", *(f"{size:4}/{n:2}" for n in N_CHEAP for size in SIZES), " (nodes / rows that cost little)")


if __name__ == "__main__":
    main()
