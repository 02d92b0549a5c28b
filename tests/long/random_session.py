"""The `pipeinfer` command, whose session generates random texts under random settings before the one that was asked.

`python -m tests.long.random_session run …`, on every rank: rank 0 prints a line of JSON for each of SESSION_CASES
cases; with SESSION_DELAYS every rank pauses at random, see `tests.support.delayed`. A case follows from its number.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeinfer.cluster.hosts.launch import rank_from_environment
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Finish
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.job.placement.job_plan import EngineSettings
from pipeinfer.policies import PipeInfer
from tests.long.auditing import AuditedEngine, random_policy, random_sampling, some
from tests.support.delayed import Pauses, pause_everywhere

N_CTX, N_VOCAB = 600, 1024
LONGEST, MOST_SEQUENCES = (400, 150), 63


@dataclass(frozen=True, slots=True)
class Case:
    """One text. `n_sequences`: that trees may lease. `stop_after`: tokens after which the text is stopped."""

    prompt: tuple[int, ...]
    n_predict: int
    n_sequences: int
    policy: Policy
    sampling: SamplingParams
    cancel: bool
    stop_after: int | None


def random_case(number: int) -> Case:
    """The first one touches the memory that later ones need."""
    if not number:
        policy = PipeInfer(width=16, split_cutoff=0.0)
        return Case((7,) * LONGEST[0], LONGEST[1], MOST_SEQUENCES, policy, SamplingParams(seed=0), True, None)
    rng = random.Random(number)
    n_prompt, n_predict = rng.randint(1, some(rng, 8, 40, 200, LONGEST[0])), some(rng, 1, 2, 17, 60, 60, LONGEST[1])
    some_tokens = [rng.randrange(3, N_VOCAB) for _ in range(some(rng, 1, 7, n_prompt))]
    prompt = (some_tokens * n_prompt)[:n_prompt]
    return Case(
        tuple(prompt),
        n_predict,
        some(rng, 1, 2, 3, 8, 31, MOST_SEQUENCES),
        random_policy(rng),
        random_sampling(rng),
        rng.random() < 0.85,
        rng.randint(1, n_predict) if rng.random() < 0.1 else None,
    )


def main() -> None:
    from pipeinfer.cli import main as pipeinfer
    from pipeinfer.job.session import ranks, session  # initialise MPI

    if os.environ.get("SESSION_DELAYS"):
        pause_everywhere(Pauses(f"session/{rank_from_environment()}", 1e-3))
    ranks.Engine = AuditedEngine  # type: ignore[misc]
    generate = session.Session.generate

    def generate_many(own: Any, request: Any, *hear: Any, **more: Any) -> Any:
        for number in range(int(os.environ["SESSION_CASES"])):
            case = random_case(number)
            own.ranks.configure(own.engine, settings_of(case, own.plan.looks_up))
            found = generate(
                own,
                replace(
                    request,
                    prompt=case.prompt,
                    n_predict=case.n_predict,
                    n_ctx=N_CTX,
                    sampling=case.sampling,
                    end_tokens=frozenset(),
                    policy=case.policy,
                ),
                Stopping(AuditedEngine.newest, case.stop_after),
            )
            line = {
                "case": number,
                "tokens": found.request.tokens[len(case.prompt) :],
                "leaks": AuditedEngine.newest.leaks(),
                "n_cancelled": found.metrics.n_cancelled,
                "ranks": {rank: [each["rss_bytes"], each["open_files"]] for rank, each in found.reports.items()},
            }
            print(json.dumps(line), flush=True)
        own.ranks.configure(own.engine, own.plan.engine)
        return generate(own, request, *hear, **more)

    setattr(session.Session, "generate", generate_many)  # noqa: B010 (the types differ)
    pipeinfer()


def settings_of(case: Case, lookup: bool | None) -> EngineSettings:
    """Of the engine, where the target rewinds. `lookup`: as asked of the job."""
    looks_up = case.policy.looks_up if lookup is None else lookup and case.policy.drafts
    return EngineSettings(case.cancel, looks_up, case.n_sequences, case.n_sequences)


class Stopping:
    """Ends a text when so many of its tokens have come, as a stop string does."""

    def __init__(self, engine: AuditedEngine, stop_after: int | None) -> None:
        self.engine, self.n_left = engine, stop_after

    def __call__(self, tokens: Sequence[int]) -> None:
        if self.n_left is not None:
            self.n_left -= len(tokens)
            if self.n_left <= 0:
                self.engine.stop(self.engine.request, Finish.END)


if __name__ == "__main__":
    main()
