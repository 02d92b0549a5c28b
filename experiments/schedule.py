"""How long a net is trained, at which rates, and by which optimisers. Knows no net and no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

Optimisers = list[tuple[torch.optim.Optimizer, float]]
"""Each with its peak rate."""


@dataclass(frozen=True)
class Schedule:
    """One training: tokens a step, its limits, whichever comes first, and the peak learning rates."""

    name: str
    steps: int
    minutes: float
    n_batch_tokens: int = 4096
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    n_warm: int = 40

    def lr_scale(self, step: int, progress: float) -> float:
        """Linear warm-up over `n_warm` steps, flat, then linear to zero over the last 45%."""
        return min(1.0, (step + 1) / self.n_warm) * min(1.0, (1.0 - progress) / 0.45)

    def set_rates(self, optims: Optimisers, step: int, progress: float) -> None:
        for optim, peak in optims:
            for group in optim.param_groups:
                group["lr"] = peak * self.lr_scale(step, progress)


def optimisers(net: nn.Module, schedule: Schedule, tables: Sequence[str] = ("embd",)) -> Optimisers:
    """Muon for the matrices, AdamW for norms and for matrices with one of `tables` in their names, a row a token."""
    trained = [(name, p, any(table in name for table in tables)) for name, p in net.named_parameters()]
    matrices = [p for _, p, is_table in trained if p.ndim == 2 and not is_table]
    others = [p for _, p, is_table in trained if p.ndim != 2 or is_table]
    muon = torch.optim.Muon(matrices, lr=schedule.muon_lr, momentum=0.95, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=schedule.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    return [(muon, schedule.muon_lr), (adam, schedule.adam_lr)]
