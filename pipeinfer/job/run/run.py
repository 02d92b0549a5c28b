"""`pipeinfer run` on every rank. Knows what a job is, and nothing of what its ranks do."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.job.launch.context import Context
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deployment import Deployment
from pipeinfer.job.planning.prepare import prepare
from pipeinfer.job.planning.prepared import start_prepared
from pipeinfer.job.requests.journal import Journal, model_id, open_journal
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.experiment import digest


@dataclass(frozen=True, slots=True)
class RunWork:
    """`key`: what is asked, in the notes."""

    request: GenerationRequest
    tokenizer: Tokenizer
    key: str
    journal: Journal


def run_job(options: RunOptions) -> int:
    """Returns the exit code, the same on all ranks when the input is at fault."""
    return start_prepared(options, options, _prepare, _run_head)


def _prepare(options: RunOptions, hosts: Sequence[Host]) -> tuple[Deployment, RunWork]:
    deployment, (request, tokenizer) = prepare(options, hosts)
    asked = replace(request, sampling=replace(request.sampling, seed=options.sampling.seed))
    model = model_id(options, deployment)
    return deployment, RunWork(
        request, tokenizer, digest((asked, model[0], options.rounding)), open_journal(options.resume, model)
    )


def _run_head(context: Context, deployment: Deployment, work: RunWork) -> int:
    from pipeinfer.job.run.head import Head  # draws: only rank 0 pays for importing what it draws with

    with closing(work.journal):
        return Head(context, deployment, work.request, work.tokenizer, work.key, work.journal).run()
