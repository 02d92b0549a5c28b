"""The engine in some sixty lines: where to begin. `tests/core/test_small_engine.py` proves that both send the same.

One request with a prompt of one token, a draft in this process, and a pipeline that answers its oldest run once there
is nothing else to do. `core.engine.Engine` adds many requests, prompts in chunks, KV cells, larger drafts and costs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence

from pipeinfer.core.interfaces import Drafter
from pipeinfer.core.policy import Policy, PolicyView, Send
from pipeinfer.core.requests import Request
from pipeinfer.core.tree import Node, State
from pipeinfer.core.types import NO_TOKEN
from tests.support.toy import Reference, path_to


class SmallEngine(PolicyView):
    """Is the `PolicyView` of its policy. `runs`: in flight, the oldest first. `sent`: all runs, (token, position) a
    row."""

    is_alone, is_at_head, n_stages, n_cheap_rows, n_drafts = True, False, 1, 1, 1
    on_way_s = draft_s = 0.0
    drafting: tuple[Collection[Node], float] = ((), 0.0)

    def __init__(self, request: Request, policy: Policy, drafter: Drafter, target: Reference, n_stages: int) -> None:
        self.request, self.policy, self.drafter, self.target, self.n_stages = request, policy, drafter, target, n_stages
        self.runs = deque[Sequence[Node]]()
        self.sent: list[list[tuple[int, int]]] = []

    # -- the loop

    def complete(self) -> None:
        """Until the request has finished: send a run, else do a draft step, else wait for a verdict."""
        while not self.request.finish:
            self._send() or self._draft() or self._hear()

    def _send(self) -> bool:
        answer, root = self.policy.send(self), self.tree.root
        nodes = answer.nodes if isinstance(answer, Send) else ()
        if not isinstance(answer, Send) and root.run_id is None and not self.runs and not self.policy.draft(self):
            nodes = [root]  # no draft could answer
        for node in nodes:
            node.run_id = len(self.sent) + 1
        if nodes:
            self.runs.append(nodes)
            self.sent.append([(node.token, node.position) for node in nodes])
        return bool(nodes)

    def _draft(self) -> bool:
        nodes = self.policy.draft(self)
        guesses = self.drafter.expand(self.request, nodes, lambda: False) or {}
        for node in guesses:
            chosen = self.policy.keep(node, guesses[node])
            self.tree.grow(node, chosen, [math.log(max(guess.probability, 1e-30)) for guess in chosen])
        return bool(guesses)

    def _hear(self) -> bool:
        nodes = self.runs.popleft()
        paths = [path_to(self.request, node) if node.live else [] for node in nodes]
        tokens = [self.target.next_token(path, self.request.sampling) if path else NO_TOKEN for path in paths]
        self.tree.answer(nodes, tokens)
        if self.tree.root.verdict is not None:
            settled = self.tree.settle()
            self.request.take(settled.tokens)
            self.policy.settled(settled, self)
        return True

    # -- what a policy looks at

    @property
    def n_inflight(self) -> int:
        """Runs with a node that is not dead."""
        return sum(any(node.state is not State.DEAD for node in nodes) for nodes in self.runs)

    n_evaluated = n_inflight

    @property
    def n_dead(self) -> int:
        return len(self.runs) - self.n_inflight

    def clock(self) -> float:
        return 0.0

    def n_inflight_at(self, draft: int) -> int:
        return 0

    def run_s(self, n_rows: int) -> float:
        return 0.0

    def undisturbed_s(self, n_before: int) -> float:
        return 0.0

    def verdict_in_s(self, node: Node) -> float:
        return 0.0

    def early(self, patience: float = 0.0) -> None:
        return None

    def fitting(self, nodes: Sequence[Node]) -> list[Node]:
        return list(nodes)
