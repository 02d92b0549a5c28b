"""From options to loaded models on every rank: rank 0 plans, all others do as the deployment says. Knows no command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pipeinfer.cluster.cores import Host
from pipeinfer.cluster.speed import Speed
from pipeinfer.errors import UserError
from pipeinfer.job.launch.context import Context
from pipeinfer.job.launch.start import Crew
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deployment import Deployment, DoesNotFit
from pipeinfer.job.placement.fetch import fetch_models, find_models
from pipeinfer.job.process.complain import complain
from pipeinfer.job.profiling.found_hosts import with_own_gpus, with_times
from pipeinfer.job.profiling.host_speeds import known_speeds, order_matters
from pipeinfer.models.llama.ggml import load_library

T = TypeVar("T")


def get_ready() -> None:
    """Import and load what every stage needs, while rank 0 plans."""
    import pipeinfer.job.loading.worker  # noqa: F401

    load_library()


def run_prepared(
    crew: Crew,
    options: RunOptions,
    prepare: Callable[[RunOptions, Sequence[Host]], tuple[Deployment, T] | None],
    run_head: Callable[[Context, Deployment, T], int],
) -> int:
    """Rank 0 fetches models, prepares and is the head, all others do as the deployment says. Returns the exit code; 0
    where there is nothing to deploy."""
    link = crew.link
    if link.rank:
        get_ready()

    def paths() -> list[Path]:
        nonlocal options
        options = fetch_models(options)
        return [options.model, *options.drafts]

    hosts, error = find_models(link, crew.hosts, paths)
    if not error:
        hosts, error = with_own_gpus(crew, hosts, options)
    speeds: list[Speed] = []
    if not error:
        hosts = with_times(crew, hosts, options)
        speeds = known_speeds(link, hosts) if order_matters(options, hosts) else []
    prepared = None
    if link.rank == 0 and not error:
        prepared, error = _prepared(lambda: prepare(options, hosts))
    deployment, error = link.broadcast((prepared and prepared[0], error) if link.rank == 0 else None)
    if deployment is None:
        if link.rank == 0 and error:
            complain(error)
        return 2 if error else 0
    context = crew.context(options, deployment)
    if not prepared:
        from pipeinfer.job.loading.worker import run_stage

        return run_stage(context, deployment)
    if speeds:
        from pipeinfer.job.planning.first_host import advice  # simulates

        for line in advice(options, deployment, speeds):
            complain(line)
    return run_head(context, *prepared)


def _prepared(prepare: Callable[[], T]) -> tuple[T | None, str]:
    """What comes of it; else what is wrong. What does not fit is shown as planned."""
    try:
        return prepare(), ""
    except DoesNotFit as error:
        from pipeinfer.job.planning.plan_table import show_ranks_of_plan
        from pipeinfer.observe.report import stderr_console

        show_ranks_of_plan(stderr_console(), error.deployment)
        return None, str(error)
    except UserError as error:
        return None, str(error)
