"""Load what a rank hosts, its slice of the target or a draft, and make what drives it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pipeinfer import __version__
from pipeinfer.cli.context import CLOCK, Context, complain
from pipeinfer.cli.memory import N_GUESS_ROWS, gpu_layers
from pipeinfer.cli.options import RunOptions
from pipeinfer.cli.setup import Job
from pipeinfer.cluster.calibrate import recall_rows, time_rows
from pipeinfer.cluster.pace import Courier, LoadedModel, PacedStage
from pipeinfer.cluster.stage import DraftWorker, LocalPrunings, StageWorker
from pipeinfer.drafting import ModelDrafter
from pipeinfer.errors import UserError
from pipeinfer.kept import user_kept
from pipeinfer.models.gguf_slice import open_slice, read_model_info
from pipeinfer.models.llama import LlamaParams, LlamaStage
from pipeinfer.sequences import SequencePool

if TYPE_CHECKING:
    Progress = Callable[[float], bool]


def load_stage(context: Context, job: Job, on_progress: Progress) -> LoadedModel | None:
    """This rank's slice of the target, if it has one. Raises UserError when this host's file is not rank 0's."""
    index = job.plan.stage_of(context.rank)
    if index is None:
        return None
    options, stage = context.options, job.plan.stages[index]
    info = read_model_info(options.model)
    if info.fingerprint != job.model.fingerprint:
        raise UserError(f"{options.model} differs from rank 0's; copy the same file to every host")
    params = LlamaParams(
        n_cells=job.n_cells,
        n_seq_max=job.n_seq + 1,  # one more, in which exact numerics park rejected cells
        n_batch=job.n_rows_max,
        n_outputs_max=N_GUESS_ROWS + 1,
        n_threads=job.threads[context.rank],
        n_gpu_layers=gpu_layers(options),
        exact=options.numerics == "exact",
    )
    layers = open_slice(info, stage.first, stage.last, options.slice_cache, lambda line: _notice(context, line))
    model = LlamaStage(layers, params, on_progress)
    return PacedStage(model, job.pace.stages[index], CLOCK) if job.pace else model


def _notice(context: Context, line: str) -> None:
    complain(f"rank {context.rank} ({socket.gethostname()}): {line}")


def inexact_line(numerics: str, gpu_ranks: Sequence[int]) -> str:
    """What is to be said when exact numerics were asked for and these ranks have layers of the target on GPUs."""
    if numerics != "exact" or not gpu_ranks:
        return ""
    return (
        f"--numerics exact holds on CPUs only: the layers of {'ranks' if len(gpu_ranks) > 1 else 'rank'} "
        f"{', '.join(map(str, gpu_ranks))} are on GPUs, whose kernels depend on the batch, so that tokens that are all "
        "but tied may differ between policies and splits; -ngl 0 is exact"
    )


def make_worker(context: Context, job: Job, model: LoadedModel) -> StageWorker:
    """What drives a loaded stage through one pipeline's runs."""
    index = job.plan.stage_of(context.rank)
    assert index is not None, f"rank {context.rank} has a model and no stage"
    stage = job.plan.stages[index]
    n_layers = job.pace.stages[index].layers if job.pace else stage.last - stage.first
    return StageWorker(model, LocalPrunings(), CLOCK, index == 0, context.tracer, n_layers)


def load_drafts(context: Context, job: Job, on_progress: Progress) -> dict[int, LoadedModel]:
    """The drafts that this rank hosts, by number, whole, each with a KV cache as large as the target's."""
    return {
        number: _load_draft(context, job, number, on_progress)
        for number, rank in enumerate(job.plan.drafts)
        if rank == context.rank
    }


def _load_draft(context: Context, job: Job, number: int, on_progress: Progress) -> LoadedModel:
    draft = job.drafts[number]
    info = read_model_info(draft.path)
    if info.fingerprint != draft.fingerprint:
        raise UserError(f"{draft.path} differs from rank 0's; copy the same file to every host")
    params = LlamaParams(
        n_cells=job.n_cells,
        n_seq_max=job.n_seq + 1,
        n_batch=N_GUESS_ROWS,
        n_outputs_max=N_GUESS_ROWS,
        n_threads=job.threads[context.rank],
        n_gpu_layers=gpu_layers(context.options),
        exact=False,  # guesses need not be reproducible to the bit: the target decides
    )
    model = LlamaStage(open_slice(info, 0, info.n_layer, None), params, on_progress)
    return PacedStage(model, job.pace.drafts[number], CLOCK) if job.pace else model


def time_loaded(context: Context, job: Job, model: LoadedModel, draft: int | None = None) -> dict[int, float]:
    """What rows cost a loaded model: the stage of this rank, or the draft of that number. Paced ones are timed anew."""
    if job.pace:
        return time_rows(model, CLOCK)
    rank, options = context.rank, context.options
    if draft is None:
        index = job.plan.stage_of(rank)
        assert index is not None, f"rank {rank} has a model and no stage"
        part = f"{job.model.fingerprint} {job.plan.stages[index].layers} {options.numerics}"
    else:
        part = f"{job.drafts[draft].fingerprint} whole fast"
    where = f"{job.hosts[rank].name}, {job.hosts[rank].n_cores} cores, {job.threads[rank]} threads"
    name = f"rows: {part}, {where}, -ngl {options.n_gpu_layers}, pipeinfer {__version__}"
    return recall_rows(model, CLOCK, user_kept(), name)


def make_drafter(job: Job, model: LoadedModel, couple: bool) -> ModelDrafter:
    """A drafter for one pipeline's requests; the model's cache must be empty. `couple`: see ModelDrafter."""
    return ModelDrafter(model, SequencePool(job.n_seq, job.n_cells), N_GUESS_ROWS, model.n_vocab, couple)


def make_draft_worker(context: Context, job: Job, number: int, model: LoadedModel) -> DraftWorker:
    """What drives a loaded larger draft through one pipeline's runs."""
    options, layers = context.options, job.drafts[number].n_layer
    return DraftWorker(
        model, LocalPrunings(), CLOCK, True, context.tracer, layers,
        width=options.speculation.width, couple=options.couple,
    )  # fmt: skip


def guess_words(options: RunOptions) -> int:
    """Words of a larger draft's answer at most."""
    return 2 * options.speculation.width * N_GUESS_ROWS


def make_courier(context: Context, job: Job) -> Courier | None:
    """What makes messages take their modelled time, in a paced job; its clock is rank 0's."""
    if job.pace is None:
        return None
    return Courier(job.pace.link, lambda: CLOCK() + context.clock_offset_s, job.n_embd, job.pace.n_embd)
