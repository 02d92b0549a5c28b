"""The `pipeinfer` command, whose session answers the same request again and again: the last time counts.

`python -m tests.support.again run …`: every time must give the same tokens, and figures of its own runs alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeinfer.core.requests import Finish
from pipeinfer.job.placement.job_plan import EngineSettings
from pipeinfer.policies import Iterative


def main() -> None:
    from pipeinfer.cli import main as pipeinfer
    from pipeinfer.job.session.session import Generation, Session  # initialises MPI

    generate = Session.generate

    def generate_again(session: Session, request: Any, *hear: Any, **more: Any) -> Generation:
        def once(request: Any, settings: EngineSettings | None = None) -> list[int]:
            session.ranks.configure(session.engine, settings or session.plan.engine)
            generation = generate(session, request)
            check(generation)
            return generation.request.tokens

        cut = replace(request, n_predict=request.n_predict // 2)
        assert generate(session, cut).request.finish is Finish.LENGTH
        lone = session.plan.capacity.n_requests  # sequences without partitions
        without = replace(session.plan.engine, cancel=False, n_seq=lone, n_target_seq=lone)
        texts = [once(request), once(request, without), once(replace(request, policy=Iterative()))]
        last = generate(session, request, *hear, **more)
        check(last)
        assert texts == [last.request.tokens] * 3
        return last

    setattr(Session, "generate", generate_again)  # noqa: B010 (the types differ)
    pipeinfer()


def check(generation: Any) -> None:
    n_runs = generation.metrics.n_runs
    assert len(generation.ledger.submitted_s) == n_runs
    for rank, report in generation.reports.items():
        if rank and rank not in generation.draft_ledgers:
            runs = [run_id for run_id, *_ in report["runs"] if run_id]
            assert runs == list(generation.ledger.submitted_s), f"rank {rank}"
            assert report["n_messages"] <= n_runs


if __name__ == "__main__":
    main()
