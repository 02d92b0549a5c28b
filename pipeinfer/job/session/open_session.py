"""A session from the loaded models to the shutdown, for every command that generates. Knows no command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.placement.deployment import Deployment
from pipeinfer.job.process.complain import complain
from pipeinfer.job.session.session import Session
from pipeinfer.observe.progress import ProgressBar
from pipeinfer.observe.report import stderr_console


@contextmanager
def open_session(
    context: Context,
    deployment: Deployment,
    called: Callable[[], bool] = lambda: False,
    say: Callable[[str], object] = complain,
) -> Iterator[Session]:
    """A session whose models are loaded, closed at the end; within it the job stops in order. `called`: as in
    `Session`; `say` takes the deployment's warnings. Raises JobError, as `Session.open` does."""
    console = stderr_console()
    progress = ProgressBar(console, CLOCK, "loading", deployment.plan.n_ranks, "ranks")

    def on_loaded(rank: int, loaded_s: float) -> None:
        progress.advance(1)
        if context.options.verbose:
            console.print(f"rank {rank} ({deployment.plan.describe(rank)}) loaded in {loaded_s:.1f} s", style="dim")

    session = Session(context, deployment, called, on_loaded)
    try:
        session.open()
    finally:
        progress.close()
    for warning in deployment.warnings:
        say(warning)
    context.flag.orderly = True  # from now on there is something to keep
    yield session
    session.close()  # not after an exception: the watch then ends ranks that may never answer
