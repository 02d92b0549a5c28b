"""A session from the loaded models to the shutdown, for every command that generates. Knows no command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeinfer.job.launch.context import Context
from pipeinfer.job.placement.deployment import Deployment
from pipeinfer.job.process.complain import complain
from pipeinfer.job.session.session import Session


@contextmanager
def open_session(
    context: Context,
    deployment: Deployment,
    called: Callable[[], bool] = lambda: False,
    on_loaded: Callable[[int, float], object] = lambda rank, loaded_s: None,
    say: Callable[[str], object] = complain,
) -> Iterator[Session]:
    """A session whose models are loaded, closed at the end; within it the job stops in order. `called`, `on_loaded`: as
    in `Session`; `say` takes the deployment's warnings. Raises JobError, as `Session.open` does."""
    session = Session(context, deployment, called, on_loaded)
    session.open()
    for warning in deployment.warnings:
        say(warning)
    context.flag.orderly = True  # from now on there is something to keep
    yield session
    session.close()  # not after an exception: the watch then ends ranks that may never answer
