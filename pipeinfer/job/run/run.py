"""`pipeinfer run` on every rank. Knows what a job is, and nothing of what its ranks do."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.job.launch.context import Context
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.prepare import prepare
from pipeinfer.job.planning.prepared import start_prepared
from pipeinfer.job.requests.experiment import ExperimentSettings
from pipeinfer.job.requests.journal import model_id, open_journal
from pipeinfer.job.run.run_work import RunWork
from pipeinfer.observe.experiment import digest


def run_job(options: RunOptions) -> int:
    """Returns the exit code, the same on all ranks when the input is at fault."""
    return start_prepared(options, options, _prepare, _run_head)


def _prepare(options: RunOptions, hosts: Sequence[Host]) -> tuple[JobPlan, RunWork]:
    plan, (request, tokenizer) = prepare(options, hosts)
    asked = replace(request, sampling=replace(request.sampling, seed=options.sampling.seed))
    model = model_id(plan)
    is_split = options.layer_split is not None and not options.plan
    return plan, RunWork(
        request, tokenizer, digest((asked, model[0], options.rounding)), open_journal(options.resume, model),
        ExperimentSettings.of(options), options, options, bool(options.drafts), is_split,
    )  # fmt: skip


def _run_head(context: Context, plan: JobPlan, work: RunWork) -> int:
    from pipeinfer.job.run.head import Head  # draws: only rank 0 pays for importing what it draws with

    with closing(work.journal):
        return Head(context, plan, work).run()
