"""A session from the loaded models to the shutdown, for every command that generates. Knows no command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.process.complain import complain
from pipeinfer.job.session.session import Session
from pipeinfer.observe.progress import ProgressBar
from pipeinfer.observe.report import stderr_console


@contextmanager
def open_session(
    context: Context,
    plan: JobPlan,
    has_work: Callable[[], bool] = lambda: False,
    say: Callable[[str], object] = complain,
    verbose: bool = False,
) -> Iterator[Session]:
    """A session whose models are loaded, closed at the end; within it the job stops in order. `has_work`: as in
    `Session`; `say` takes the plan's warnings; `verbose`: print a line for each rank that has loaded. Raises
    JobError, as `Session.open` does."""
    console = stderr_console()
    progress = ProgressBar(console, CLOCK, "loading", plan.assignment.n_ranks, "ranks")

    def on_loaded(rank: int, loaded_s: float) -> None:
        progress.advance(1)
        if verbose:
            console.print(f"rank {rank} ({plan.assignment.describe(rank)}) loaded in {loaded_s:.1f} s", style="dim")

    session = Session(context, plan, has_work, on_loaded)
    try:
        session.open()
    finally:
        progress.close()
    for warning in plan.warnings:
        say(warning)
    context.flag.orderly = True  # from now on there is something to keep
    yield session
    session.close()  # not after an exception: the watch then ends ranks that may never answer
