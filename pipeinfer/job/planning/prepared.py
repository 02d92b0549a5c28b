"""From options to loaded models on every rank: rank 0 plans, the others follow the plan. Knows no command."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.transport import Link
from pipeinfer.job.launch.context import Context
from pipeinfer.job.launch.start import Crew, start_job
from pipeinfer.job.options.limits import AUTO_LAYERS
from pipeinfer.job.options.options import RunOptions, with_plan
from pipeinfer.job.placement.deploy import DoesNotFit
from pipeinfer.job.placement.devices import check_devices
from pipeinfer.job.placement.gpus import can_offload
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.process.complain import complain
from pipeinfer.job.profiling.hosts import find_hosts
from pipeinfer.job.requests.journal import kept_numerics
from pipeinfer.models.llama.ggml import load_library

T = TypeVar("T")


def get_ready() -> None:
    """Import and load what every stage needs, while rank 0 plans."""
    import pipeinfer.job.loading.worker  # noqa: F401

    load_library()


def _checked(options: RunOptions, n_ranks: int) -> RunOptions:
    """With what --plan decides. Raises UserError, also for values that are not one a rank."""
    options = with_plan(options, n_ranks)
    check_devices(options, n_ranks)
    return options


def without_gpus(link: Link, options: RunOptions) -> RunOptions:
    """As in llama.cpp: where no rank's build knows GPUs, -ngl is passed over with a warning. Collective."""
    layers = options.n_gpu_layers, max(0, options.n_gpu_layers_draft)
    if layers == ((0,), 0) or any(options.device):
        return options
    if any(link.all_gather(can_offload())):
        return options
    if link.rank == 0:
        complain("-ngl is without effect: this llama-cpp-python has no GPU support, all layers are computed on CPUs; "
                 "CMAKE_ARGS=-DGGML_CUDA=on builds one that has")  # fmt: skip
    return replace(options, n_gpu_layers=(0,), n_gpu_layers_draft=AUTO_LAYERS)


Prepare = Callable[[RunOptions, Sequence[Host]], tuple[JobPlan, T] | None]
RunHead = Callable[[Context, JobPlan, T], int]


def start_prepared(settings: object, options: RunOptions, prepare: Prepare[T], run_head: RunHead[T]) -> int:
    """A job, on every rank; returns the exit code. `settings`: must be alike on all, as in `start_job`."""
    return start_job(lambda crew: _run(crew, options, prepare, run_head), settings, options, options.verbose)


def _run(crew: Crew, options: RunOptions, prepare: Prepare[T], run_head: RunHead[T]) -> int:
    """Rank 0 prepares and is the head, the others serve. Returns the exit code; 0 without a plan. Raises
    JobError."""
    link = crew.link
    if link.rank:
        get_ready()

    options, hosts = find_hosts(crew, without_gpus(link, link.agree(lambda: _checked(options, link.size))))
    prepared: tuple[JobPlan, T] | None = None

    def make_plan() -> JobPlan | None:
        nonlocal prepared
        try:
            prepared = prepare(replace(options, kept_numerics=kept_numerics(options.resume)), hosts)
        except DoesNotFit as error:
            from pipeinfer.job.planning.plan_table import show_plan
            from pipeinfer.observe.report import stderr_console

            show_plan(stderr_console(), error.plan)
            raise
        return prepared and prepared[0]

    plan = link.agree(make_plan)
    if plan is None:
        return 0
    context = crew.context(plan, options.trace is not None)
    if not prepared:
        from pipeinfer.job.loading.worker import run_stage

        return run_stage(context, plan)
    return run_head(context, *prepared)
