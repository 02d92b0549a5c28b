"""`pipeinfer run` on every rank. Knows what a job is, and nothing of what its ranks do."""

from pipeinfer.job.launch.context import Context
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deployment import Deployment
from pipeinfer.job.planning.prepare import prepare
from pipeinfer.job.planning.prepared import start_prepared
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.models.text.tokenizer import Tokenizer


def run_job(options: RunOptions) -> int:
    """Returns the exit code, the same on all ranks when the input is at fault."""
    return start_prepared(options, options, prepare, _run_head)


def _run_head(context: Context, deployment: Deployment, asked: tuple[GenerationRequest, Tokenizer]) -> int:
    from pipeinfer.job.run.head import Head  # draws: only rank 0 pays for importing what it draws with

    return Head(context, deployment, *asked).run()
