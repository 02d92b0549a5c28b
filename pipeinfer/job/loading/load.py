"""Load a rank's slices of the target and of drafts, and make their workers."""

import gc
import socket
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pipeinfer.cluster.assignment import StagePlan
from pipeinfer.cluster.messages.verdicts import verdict_bytes
from pipeinfer.cluster.stages.pace import Courier, PacedHead, PacedStage
from pipeinfer.cluster.stages.prunings import LocalPrunings
from pipeinfer.cluster.stages.stage import DraftWorker, StageWorker
from pipeinfer.cluster.timing.costs import ModelCost
from pipeinfer.core.interfaces import HeadModel, LoadedModel
from pipeinfer.core.kv.sequences import SequencePool
from pipeinfer.errors import UserError
from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.loading.arrivals import TARGET, fetch_layers, model_file
from pipeinfer.job.loading.run_costs import time_stage
from pipeinfer.job.loading.stages import gpu_of, load_layers
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.process.complain import complain
from pipeinfer.models.drafter import ModelDrafter
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.gguf.slice import SliceFile, open_slice, read_model_info
from pipeinfer.models.heads.head_drafter import HeadDrafter
from pipeinfer.models.heads.header import read_draft
from pipeinfer.models.heads.llama_head import LlamaHead
from pipeinfer.models.heads.own_head import draft_of
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.text.grammar import Grammars
from pipeinfer.models.text.vocabulary_file import VocabularyFile
from pipeinfer.models.translated import TranslatedStage
from pipeinfer.policies.limits import MAX_RUN, MAX_WIDTH

STOP_INTERVAL_S = 4e-3
"""Each question whether to stop takes some 40 microseconds on rank 0, where verdicts are heard then, and divides the
computation of a graph."""

N_GUESS_BYTES = verdict_bytes(MAX_RUN, MAX_WIDTH * MAX_RUN)  # of a draft's answer at most


def load_own(context: Context, plan: JobPlan) -> tuple[LoadedModel | None, dict[int, LoadedModel]]:
    """This rank's stage of the target, if it has one, and its drafts by number. Collective. Raises UserError."""
    fetch_layers(context, plan)
    loaded = load_stage(context, plan), load_drafts(context, plan)
    context.meter.take_joules()  # loading is no part of what is measured
    gc.collect()
    gc.freeze()  # Python's collector would pass over all that was imported in the middle of a text, for 25 to 80 ms
    return loaded


def stage_report(context: Context, plan: JobPlan, stage: LoadedModel) -> dict[str, Any]:
    """The report of a loaded stage: `costs` of its runs, a `RunCosts`, and its `gpu`, as in `gpu_of`."""
    costs = time_stage(context, plan, stage)
    return {"costs": costs, "gpu": gpu_of(plan.ranks[context.rank].target)}


def load_stage(context: Context, plan: JobPlan) -> LoadedModel | None:
    """This rank's slice of the target, if it has one. Raises UserError when this host's file is not rank 0's."""
    index = plan.assignment.stage_of(context.rank)
    if index is None:
        return None
    own, stage = plan.ranks[context.rank], plan.assignment.stages[index]
    numerics, capacity = plan.numerics, plan.capacity
    info = _read(context, plan, TARGET)
    if stage.last == info.n_layer and not context.vocabulary:
        context.vocabulary = VocabularyFile(info.paths[0])
    params = LlamaParams(
        n_cells=capacity.n_cells,
        # one more, in which exact numerics park rejected cells
        n_seq_max=capacity.n_target_seq + 1,
        n_batch=plan.n_rows_max,
        n_outputs_max=capacity.n_nodes + 1,
        n_threads=own.threads,
        n_gpu_layers=own.target.n_gpu_layers,
        exact=numerics.exact,
        cache=numerics.cache,
        devices=own.target.devices,
        stop_interval_s=STOP_INTERVAL_S,
        repack=numerics.repack,
        repacked=numerics.repacked,
        taps=tuple(layer - stage.first for layer in plan.layers_read if stage.first <= layer < stage.last),
    )
    model = load_layers(lambda: _open(context, plan, TARGET, stage), params, own.target)
    return _paced(context, model, plan.pace.stages[index]) if plan.pace else model


def _paced(context: Context, model: LoadedModel, cost: ModelCost) -> PacedStage:
    stage = PacedHead(model, cost, CLOCK) if isinstance(model, LlamaHead) else PacedStage(model, cost, CLOCK)
    context.paced.append(stage)
    return stage


def _read(context: Context, plan: JobPlan, number: int) -> ModelInfo:
    """The header of a draft of this number, or of the target: as rank 0 sent it, else of this host's file."""
    if arrived := context.arrived.get(number):
        return arrived.info
    file = model_file(plan, number)
    info = draft_of(file.path, read_model_info(plan.model.path)) if file.head else read_draft(file.path)
    if info.fingerprint != file.fingerprint:
        raise UserError(f"{info.path} differs from rank 0's; copy the same file to every host, or remove it there: "
                        "then its layers come from rank 0")  # fmt: skip
    return info


def _open(context: Context, plan: JobPlan, number: int, own: StagePlan) -> SliceFile:
    if number in context.arrived:
        return context.arrived.pop(number)
    info, file = _read(context, plan, number), model_file(plan, number)
    return open_slice(info, own.first, own.last, plan.slice_cache, lambda line: _notice(context, line), file.states)


def _notice(context: Context, line: str) -> None:
    complain(f"rank {context.rank} ({socket.gethostname()}): {line}")


def inexact_line(plan: JobPlan, gpus: Mapping[int, str]) -> str:
    """A warning if `--numerics exact` cannot be guaranteed on the target's ranks; else empty. `gpus`: of each of these
    ranks, see `gpu_of`."""
    if not plan.numerics.exact:
        return ""
    by_torch = {rank: gpu for rank, gpu in gpus.items() if plan.ranks[rank].target.is_torch}
    inexact = [rank for rank, gpu in gpus.items() if gpu and rank not in by_torch]
    if inexact:
        return (
            f"--numerics exact holds on CPUs and with --backend torch: the layers of {_ranks(inexact)} are on GPUs of "
            "llama.cpp's, whose kernels depend on the batch, so that tokens that are all but tied may differ between "
            "policies and splits; -ngl 0 and --backend torch are exact"
        )
    kinds = {gpu: [rank for rank in by_torch if by_torch[rank] == gpu] for gpu in by_torch.values()}
    if len(kinds) > 1:
        shown = ", ".join(f"{_ranks(own)} on {gpu or 'a CPU'}" for gpu, own in kinds.items())
        return (
            f"--numerics exact wants devices of one kind for all layers of the target, here torch computes {shown}: "
            "tokens that are all but tied may differ between splits"
        )
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def make_worker(context: Context, plan: JobPlan, model: LoadedModel) -> StageWorker:
    """The worker of a loaded stage."""
    index = plan.assignment.stage_of(context.rank)
    assert index is not None, f"rank {context.rank} has a model and no stage"
    stage = plan.assignment.stages[index]
    n_layers = plan.pace.stages[index].layers if plan.pace else stage.last - stage.first
    constrain = open_grammars(context, plan) if context.vocabulary else None
    following = plan.assignment.stages[index + 1].rank if index + 1 < len(plan.assignment.stages) else None
    leaves_as = plan.numerics.wire_type if plan.hop_is_out_of_band(context.rank, following) else None
    return StageWorker(model, LocalPrunings(), CLOCK, index == 0, context.tracer, n_layers, constrain, leaves_as)


def open_grammars(context: Context, plan: JobPlan) -> Grammars:
    """Grammars of this rank's vocabulary, opened ahead where several requests are open, so that none waits for it."""
    assert context.vocabulary
    grammars = Grammars(context.vocabulary.open)
    if plan.capacity.n_requests > 1:
        grammars.open_ahead()
    return grammars


def load_drafts(context: Context, plan: JobPlan) -> dict[int, LoadedModel]:
    """What this rank hosts of drafts, by number, each with a KV cache for as many tokens as the target's."""
    return {
        number: _load_draft(context, plan, number, own)
        for number, own in plan.assignment.drafts_on(context.rank).items()
    }


def _load_draft(context: Context, plan: JobPlan, number: int, own: StagePlan) -> LoadedModel:
    rank, capacity = plan.ranks[context.rank], plan.capacity
    params = LlamaParams(
        n_cells=capacity.n_cells,
        n_seq_max=capacity.n_seq + 1,
        n_batch=capacity.n_guess_rows,
        n_outputs_max=capacity.n_guess_rows,
        n_threads=rank.threads,
        n_gpu_layers=rank.draft.n_gpu_layers,
        exact=False,  # guesses need not be reproducible to the bit: the target decides
        cache=plan.numerics.draft_cache,
        devices=rank.draft.devices,
        stop_interval_s=STOP_INTERVAL_S,
        repack=plan.numerics.repack,
    )
    model = load_layers(lambda: _open(context, plan, number, own), params, rank.draft)
    if translation := plan.translations[number]:
        model = TranslatedStage(model, translation)
    return _paced(context, model, plan.pace.drafts[number]) if plan.pace else model


def make_drafter(context: Context, plan: JobPlan, model: LoadedModel) -> ModelDrafter:
    """On rank 0, which has the target's file. The model's cache must be empty."""
    context.vocabulary = context.vocabulary or VocabularyFile(plan.model.path)
    pool = SequencePool(plan.capacity.n_seq, plan.capacity.n_cells, window=plan.drafts[0].window)
    given = pool, plan.capacity.n_guess_rows, plan.couple, open_grammars(context, plan)
    head = plan.drafts[0].head
    return HeadDrafter(cast(HeadModel, model), *given, head.shift) if head else ModelDrafter(model, *given)


def make_draft_worker(context: Context, plan: JobPlan, number: int, model: LoadedModel) -> DraftWorker:
    """The worker of a remote draft, or of a stage of one."""
    own = plan.assignment.drafts_on(context.rank)[number]
    n_layers = own.last - own.first
    return DraftWorker(model, LocalPrunings(), CLOCK, own.first == 0, context.tracer, n_layers, couple=plan.couple)


def make_courier(context: Context, plan: JobPlan) -> Courier | None:
    """What makes messages take their modelled time, in a paced job; its clock is rank 0's."""
    pace = plan.pace
    if pace is None:
        return None
    clock = lambda: CLOCK() + context.clock_offset_s  # noqa: E731
    return Courier(pace.link, clock, plan.model.n_embd, pace.n_embd, plan.numerics.wire_type)
