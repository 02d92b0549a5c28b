"""The `pipeinfer` command, whose session answers the same request again and again: the last time counts.

`python -m tests.support.again run …`: every time must give the same tokens, and figures of its own runs alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeinfer.core.requests import Finish
from pipeinfer.policies import Iterative


def main() -> None:
    from pipeinfer.cli.main import main as pipeinfer
    from pipeinfer.job.session.session import Generation, Session  # initialises MPI

    generate = Session.generate

    def generate_again(session: Session, asked: Any, options: Any, policy: Any, *hear: Any, **more: Any) -> Generation:
        def once(options: Any, policy: Any) -> list[int]:
            found = generate(session, asked, options, policy, lambda tokens: None)
            check(found)
            return found.request.tokens

        cut = replace(asked, n_predict=asked.n_predict // 2)
        assert generate(session, cut, options, policy.begin(), lambda tokens: None).request.finish is Finish.LENGTH
        texts = [
            once(options, policy.begin()),
            once(replace(options, partitions=False, cancel=False), policy.begin()),
            once(options, Iterative()),
        ]
        last = generate(session, asked, options, policy, *hear, **more)
        check(last)
        assert texts == [last.request.tokens] * 3
        return last

    setattr(Session, "generate", generate_again)  # noqa: B010 (the types differ)
    pipeinfer()


def check(generation: Any) -> None:
    n_runs = generation.metrics.n_runs
    assert len(generation.ledger.submitted_s) == n_runs
    for rank, figures in generation.figures.items():
        if rank and rank not in generation.refiners:
            runs = [run_id for run_id, *_ in figures["runs"] if run_id]
            assert runs == list(generation.ledger.submitted_s), f"rank {rank}"
            assert figures["n_messages"] <= n_runs


if __name__ == "__main__":
    main()
