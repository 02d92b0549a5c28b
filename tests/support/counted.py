"""Metrics of a request that also count the rows of its prompt that were sent."""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.observe.metrics import RequestMetrics


@dataclass
class Counted(RequestMetrics):
    n_context: int = 0

    def run_sent(
        self, now_s: float, n_rows: int, n_nodes: int, has_root: bool, n_branches: int, n_inflight: int
    ) -> None:
        super().run_sent(now_s, n_rows, n_nodes, has_root, n_branches, n_inflight)
        self.n_context += n_rows - n_nodes
