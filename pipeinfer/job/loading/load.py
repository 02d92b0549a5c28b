"""Load what a rank hosts, its slice of the target or of a draft, and make what drives it."""

import gc
import socket
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pipeinfer.cluster.messages.verdicts import verdict_bytes
from pipeinfer.cluster.plan import StagePlan
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
from pipeinfer.job.loading.stages import gpu_of, load_layers, local_rank
from pipeinfer.job.options.options import RunOptions, backend_of
from pipeinfer.job.placement.deployment import Deployment
from pipeinfer.job.placement.draft_place import options_of_draft
from pipeinfer.job.placement.gpus import rank_devices
from pipeinfer.job.placement.memory import gpu_layers
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


def load_own(context: Context, deployment: Deployment) -> tuple[LoadedModel | None, dict[int, LoadedModel]]:
    """This rank's stage of the target, if it has one, and its drafts by number. Collective. Raises UserError."""
    fetch_layers(context, deployment)
    loaded = load_stage(context, deployment), load_drafts(context, deployment)
    context.meter.take_joules()  # loading is no part of what is measured
    gc.collect()
    gc.freeze()  # Python's collector would pass over all that was imported in the middle of a text, for 25 to 80 ms
    return loaded


def stage_report(context: Context, deployment: Deployment, stage: LoadedModel) -> dict[str, Any]:
    """What rank 0 has to know of a stage: what its runs cost, as `RunCosts`, and its `gpu`, as in `gpu_of`."""
    costs = time_stage(context, deployment, stage)
    return {"costs": costs, "gpu": gpu_of(context.options, deployment.hosts, context.rank)}


def load_stage(context: Context, deployment: Deployment) -> LoadedModel | None:
    """This rank's slice of the target, if it has one. Raises UserError when this host's file is not rank 0's."""
    index = deployment.plan.stage_of(context.rank)
    if index is None:
        return None
    options, stage = context.options, deployment.plan.stages[index]
    info = _read(context, deployment, TARGET)
    if stage.last == info.n_layer and not context.vocabulary:
        context.vocabulary = VocabularyFile(info.paths[0])
    params = LlamaParams(
        n_cells=deployment.n_cells,
        # one more, in which exact numerics park rejected cells
        n_seq_max=options.n_target_seq(info.layers.rewinds) + 1,
        n_batch=deployment.n_rows_max,
        n_outputs_max=deployment.n_nodes + 1,
        n_threads=deployment.threads[context.rank],
        n_gpu_layers=gpu_layers(options, context.rank),
        exact=options.numerics == "exact",
        cache=options.cache,
        devices=rank_devices(options, deployment.hosts, context.rank),
        stop_interval_s=STOP_INTERVAL_S,
        repack=options.repack,
        repacked=deployment.repacked,
        taps=tuple(layer - stage.first for layer in deployment.layers_read if stage.first <= layer < stage.last),
    )
    model = _load(context, deployment, TARGET, stage, params, options)
    return _paced(context, model, deployment.pace.stages[index]) if deployment.pace else model


def _paced(context: Context, model: LoadedModel, cost: ModelCost) -> PacedStage:
    stage = PacedHead(model, cost, CLOCK) if isinstance(model, LlamaHead) else PacedStage(model, cost, CLOCK)
    context.paced.append(stage)
    return stage


def _read(context: Context, deployment: Deployment, number: int) -> ModelInfo:
    """Of a draft of this number, or of the target: what came from rank 0, else this host's file."""
    if arrived := context.arrived.get(number):
        return arrived.info
    file = model_file(deployment, number)
    info = draft_of(file.path, read_model_info(deployment.model.path)) if file.head else read_draft(file.path)
    if info.fingerprint != file.fingerprint:
        raise UserError(f"{info.path} differs from rank 0's; copy the same file to every host, or remove it there: "
                        "then its layers come from rank 0")  # fmt: skip
    return info


def _load(
    context: Context, deployment: Deployment, number: int, own: StagePlan, params: LlamaParams, options: RunOptions
) -> LoadedModel:
    """`options`: those by which this rank computes it."""
    rank = context.rank
    return load_layers(
        lambda: _open(context, deployment, number, own),
        params, backend_of(options, rank), local_rank(context.options, deployment.hosts, rank),
    )  # fmt: skip


def _open(context: Context, deployment: Deployment, number: int, own: StagePlan) -> SliceFile:
    if number in context.arrived:
        return context.arrived.pop(number)
    cache, file = context.options.slice_cache, model_file(deployment, number)
    info = _read(context, deployment, number)
    return open_slice(info, own.first, own.last, cache, lambda line: _notice(context, line), file.states)


def _notice(context: Context, line: str) -> None:
    complain(f"rank {context.rank} ({socket.gethostname()}): {line}")


def inexact_line(options: RunOptions, gpus: Mapping[int, str]) -> str:
    """What is to be said when exact numerics are asked of ranks that compute the target's layers so that they may not
    hold. `gpus`: of each of these ranks, see `gpu_of`."""
    if options.numerics != "exact":
        return ""
    by_torch = {rank: gpu for rank, gpu in gpus.items() if backend_of(options, rank).is_torch}
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


def make_worker(context: Context, deployment: Deployment, model: LoadedModel) -> StageWorker:
    """What drives a loaded stage."""
    index = deployment.plan.stage_of(context.rank)
    assert index is not None, f"rank {context.rank} has a model and no stage"
    stage = deployment.plan.stages[index]
    n_layers = deployment.pace.stages[index].layers if deployment.pace else stage.last - stage.first
    constrain = open_grammars(context) if context.vocabulary else None
    following = deployment.plan.stages[index + 1].rank if index + 1 < len(deployment.plan.stages) else None
    leaves_as = context.options.wire_type if deployment.hop_is_out_of_band(context.rank, following) else None
    return StageWorker(model, LocalPrunings(), CLOCK, index == 0, context.tracer, n_layers, constrain, leaves_as)


def open_grammars(context: Context) -> Grammars:
    """Of the vocabulary that this rank has. Where requests come beside others, none of these shall wait for it."""
    assert context.vocabulary
    grammars = Grammars(context.vocabulary.open)
    if context.options.parallel > 1:
        grammars.open_ahead()
    return grammars


def load_drafts(context: Context, deployment: Deployment) -> dict[int, LoadedModel]:
    """What this rank hosts of drafts, by number, each with a KV cache for as many tokens as the target's."""
    return {
        number: _load_draft(context, deployment, number, own)
        for number, own in deployment.plan.drafts_on(context.rank).items()
    }


def _load_draft(context: Context, deployment: Deployment, number: int, own: StagePlan) -> LoadedModel:
    options = options_of_draft(context.options, len(deployment.hosts), context.rank)
    params = LlamaParams(
        n_cells=deployment.n_cells,
        n_seq_max=options.n_seq + 1,
        n_batch=options.n_guess_rows,
        n_outputs_max=options.n_guess_rows,
        n_threads=deployment.threads[context.rank],
        n_gpu_layers=gpu_layers(options, context.rank),
        exact=False,  # guesses need not be reproducible to the bit: the target decides
        cache=options.draft_cache,
        devices=rank_devices(options, deployment.hosts, context.rank),
        stop_interval_s=STOP_INTERVAL_S,
        repack=options.repack,
    )
    model = _load(context, deployment, number, own, params, options)
    if translation := deployment.translations[number]:
        model = TranslatedStage(model, translation)
    return _paced(context, model, deployment.pace.drafts[number]) if deployment.pace else model


def make_drafter(context: Context, deployment: Deployment, options: RunOptions, model: LoadedModel) -> ModelDrafter:
    """On rank 0, which has the target's file. The model's cache must be empty."""
    context.vocabulary = context.vocabulary or VocabularyFile(deployment.model.path)
    pool = SequencePool(options.n_seq, deployment.n_cells, window=deployment.drafts[0].window)
    given = pool, options.n_guess_rows, options.couple, open_grammars(context)
    head = deployment.drafts[0].head
    return HeadDrafter(cast(HeadModel, model), *given, head.shift) if head else ModelDrafter(model, *given)


def make_draft_worker(context: Context, deployment: Deployment, number: int, model: LoadedModel) -> DraftWorker:
    """What drives a loaded draft that is asked by messages, or a stage of it."""
    own, couple = deployment.plan.drafts_on(context.rank)[number], context.options.couple
    n_layers = own.last - own.first
    return DraftWorker(model, LocalPrunings(), CLOCK, own.first == 0, context.tracer, n_layers, couple=couple)


def make_courier(context: Context, deployment: Deployment) -> Courier | None:
    """What makes messages take their modelled time, in a paced job; its clock is rank 0's."""
    pace = deployment.pace
    if pace is None:
        return None
    clock, wire_type = lambda: CLOCK() + context.clock_offset_s, context.options.wire_type
    return Courier(pace.link, clock, deployment.model.n_embd, pace.n_embd, wire_type)
