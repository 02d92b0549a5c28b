"""What soaks share: random settings, an engine that audits itself, and memory over time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from pipeinfer.core.engine import Engine
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Observer, Request
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.policies import POLICIES, make_policy
from tests.support.audit import audit_engine

GROWTH_BYTES = 3 << 20  # what a process's memory may vary by
AUDIT_EVERY = 20  # steps of the engine


# -- random settings


def some(rng: random.Random, *values: Any) -> Any:
    return rng.choice(values)


def random_policy(rng: random.Random) -> Policy:
    name = some(rng, *POLICIES, "pipeinfer", "pipeinfer", "pipeinfer")
    given = dict(
        n_draft=some(rng, 1, 4, 8, 20),
        width=some(rng, 1, 2, 4, 8, 16),
        microbatch=some(rng, 0, 0, 1, 2, 5, 32),
        inflight=some(rng, 0, 0, 1, 3, 12),
        accept_cutoff=some(rng, 0.02, 0.0, 0.3),
        split_cutoff=some(rng, 0.05, 0.0, 0.3),
        recovery=some(rng, 0.0, 0.0, 0.2),
        decay=some(rng, 0.01, 0.05),
        continuous=rng.random() < 0.8,
        asynchronous=rng.random() < 0.8,
    )
    return make_policy(name, given)


def random_sampling(rng: random.Random) -> SamplingParams:
    params = SamplingParams(
        seed=rng.getrandbits(32),
        temp=some(rng, 0.0, 0.0, 0.5, 0.8, 1.5),
        top_k=some(rng, 0, 5, 40),
        top_p=some(rng, 0.5, 0.95, 1.0),
        min_p=some(rng, 0.0, 0.05),
    )
    if rng.random() < 0.7:
        return params
    repeat, frequency, presence = some(rng, 1.0, 1.1, 1.5), some(rng, 0.0, 0.2), some(rng, 0.0, 0.3)
    return replace(
        params,
        repeat_last_n=some(rng, 1, 9, 64, 500),
        repeat_penalty=repeat,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )


# -- what must hold after every request


class AuditedEngine(Engine):
    """Audits itself every few steps; the newest instance can be asked what it still holds."""

    newest: AuditedEngine

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        AuditedEngine.newest, self._n_steps = self, 0

    def add(self, request: Request, policy: Policy, observer: Observer | None = None) -> None:
        self.request = request
        self.metrics = observer if isinstance(observer, RequestMetrics) else RequestMetrics()
        super().add(request, policy, self.metrics)

    def step(self) -> None:
        super().step()
        self._n_steps += 1
        if self._n_steps % AUDIT_EVERY == 0:
            audit_engine(self)

    def leaks(self) -> list[str]:
        """What an engine holds after its last request."""
        audit_engine(self)
        found = ["a request, a run or an emission"] if self.busy else []
        pools = [("smallest draft's", getattr(self.speculator.drafter, "pool", None))]
        pools += [(f"level {number}'s", level.pool) for number, level in enumerate(self.levels)]
        for name, pool in pools:
            if pool is not None and pool.n_free != pool.n_seq:
                found.append(f"{pool.n_seq - pool.n_free} of the {name} sequences")
            elif pool is not None and not _has_all_cells(pool):
                found.append(f"{pool.n_cells - pool.n_free_cells} of the {name} cells")
        return found


def _has_all_cells(pool: SequencePool) -> bool:
    """Whether a pool without requests has all its cells once the parked ones are won back."""
    pool.open(-1)
    if pool.can_compact:
        pool.compact()
    has_all = pool.n_free_cells == pool.n_cells
    pool.close(-1)
    return has_all


@dataclass(slots=True)
class Memory:
    """One process's memory over a long time."""

    samples: list[int] = field(default_factory=list)

    def at(self, share: float) -> int:
        """The least of the ten samples around that part of the time: what stays, not what comes and goes."""
        end = max(1, round(share * len(self.samples)))
        return min(self.samples[max(0, end - 10) : end])

    @property
    def grows(self) -> bool:
        return self.at(1.0) > max(self.at(0.1), self.at(0.5)) + GROWTH_BYTES

    def __str__(self) -> str:
        if not self.samples:
            return "not known"
        return ", ".join(f"{share:.0%} {self.at(share) / 1e6:.1f} MB" for share in (0.1, 0.5, 1.0))
