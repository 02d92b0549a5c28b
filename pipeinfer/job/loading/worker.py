"""The rank of a stage, of the target or of a draft that is elsewhere, from loading to the shutdown."""

import socket

from pipeinfer.cluster.stages.serve import N_POSTED, N_UNDER_WAY, Pipe, StageLoop
from pipeinfer.cluster.stages.stage import StageWorker
from pipeinfer.cluster.transport import Outbox, progress_between
from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.errors import UserError
from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.loading.load import load_own, make_courier, make_draft_worker, make_worker, stage_report
from pipeinfer.job.loading.run_costs import time_draft
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.observe.ledger import StageLedger


def run_stage(context: Context, plan: JobPlan) -> int:
    """Load, serve, and send figures home whenever rank 0 asks for them, until it ends the session.

    Returns the exit code.
    """
    start_s = ready_s = CLOCK()
    worker: StageWorker | None = None
    models: list[LoadedModel] = []
    try:
        stage, drafts = load_own(context, plan)
        models, loaded_s = [*([stage] if stage else []), *drafts.values()], CLOCK() - start_s
        if stage:
            own = stage_report(context, plan, stage)
            worker = make_worker(context, plan, stage)
        else:
            ((number, draft),) = drafts.items()
            own = {"costs": time_draft(context, plan, draft, number)}
            worker = make_draft_worker(context, plan, number, draft)
        ready_s = CLOCK()  # rank 0 may begin a request as soon as it has the report
        context.link.report({"loaded_s": loaded_s} | own)
    except UserError as error:
        context.link.report({"error": f"rank {context.rank} ({socket.gethostname()}): {error}"})
    ranks = [stage.rank for stage in plan.assignment.pipeline_of(context.rank)]
    index = ranks.index(context.rank)
    previous = ranks[index - 1] if index else 0
    following = ranks[index + 1] if index + 1 < len(ranks) else None
    courier = make_courier(context, plan)

    def report(outbox: Outbox, ledger: StageLedger) -> None:
        context.link.report(context.take_figures(worker, outbox, ledger))

    n_rows, n_embd = plan.largest_input(context.rank)
    pipe = Pipe(
        previous, following, n_rows, n_embd, plan.numerics.wire_type, courier, plan.ranks[context.rank].samplers,
        N_UNDER_WAY if plan.prepare_ahead else 1, N_POSTED if plan.post_ahead else 0,
        plan.hop_is_out_of_band(previous, context.rank), len(plan.layers_read),
    )  # fmt: skip
    progress = progress_between(context.link.comm, plan.host_names)
    StageLoop(context.link.comm, pipe, worker, report, ready_s, context.flow, progress).run()
    for model in models:
        model.close()
    context.close_vocabulary()
    return 0 if worker else 2
