"""Load a rank's slices of the target and of drafts, make their workers, and serve on ranks other than 0."""

import gc
from collections.abc import Sequence
from typing import Any, cast

from pipeinfer.cluster.assignment import StagePlan
from pipeinfer.cluster.stages.cell_store import BlockFiles, BlockMemory, CellStore
from pipeinfer.cluster.stages.pace import Courier, PacedHead, PacedStage
from pipeinfer.cluster.stages.serve import N_POSTED, N_UNDER_WAY, Pipe, StageLoop
from pipeinfer.cluster.stages.stage import DraftWorker, StageWorker
from pipeinfer.cluster.transport import Outbox, progress_between
from pipeinfer.cluster.verdicts import verdict_bytes
from pipeinfer.cluster.watch.protocol import Flow
from pipeinfer.core.interfaces import Blocks, CellStage, HeadModel, LoadedModel
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.settings import MAX_RUN, MAX_WIDTH
from pipeinfer.disk_cache import cache_folder
from pipeinfer.errors import UserError
from pipeinfer.job.launch import CLOCK, Context
from pipeinfer.job.loading.arrivals import fetch_adapters, fetch_layers
from pipeinfer.job.loading.stages import gpu_of, load_layers, time_draft, time_stage
from pipeinfer.job.placement.job_plan import TARGET, JobPlan, ModelFile
from pipeinfer.job.process.streams import complain
from pipeinfer.models.drafts.head_files import draft_of, read_draft
from pipeinfer.models.drafts.model_drafter import HeadDrafter, ModelDrafter
from pipeinfer.models.drafts.translation import TranslatedStage
from pipeinfer.models.gguf.adapter import ScaledAdapter
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.gguf.slice import SliceFile, open_slice
from pipeinfer.models.llama.ggml import describe_build
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaHead
from pipeinfer.models.text.grammar import Grammars
from pipeinfer.models.text.reasoning import Constraints
from pipeinfer.models.text.tokenizer import VocabularyFile
from pipeinfer.observe.trace import StageLedger

STOP_INTERVAL_S = 4e-3  # a call of `stop` takes 40 us on rank 0, where it receives verdicts, and divides the graph
N_GUESS_BYTES = verdict_bytes(MAX_RUN, MAX_WIDTH * MAX_RUN)  # of a draft's answer at most


def run_stage(context: Context, plan: JobPlan) -> int:
    """Load, serve, and send rank 0 the figures that it requests, until the shutdown. Returns the exit code."""
    start_s, ready_s = CLOCK(), context.clock()
    worker: StageWorker | None = None
    models: list[LoadedModel] = []
    try:
        stage, drafts = load_own(context, plan)
        models, loaded_s = [*([stage] if stage else []), *drafts.values()], CLOCK() - start_s
        if stage:
            figures = stage_report(context, plan, stage)
            worker = make_worker(context, plan, stage)
        else:
            ((number, draft),) = drafts.items()
            figures = {"costs": time_draft(context, plan, draft, number)}
            worker = make_draft_worker(context, plan, number, draft)
        ready_s = context.clock()  # rank 0 may begin a request as soon as it has the report
        context.link.report({"loaded_s": loaded_s} | figures)
    except UserError as error:
        context.link.report({"error": f"{context.name}: {error}"})
    previous, following = plan.assignment.neighbours(context.rank)

    def report(outbox: Outbox, ledger: StageLedger) -> None:
        context.link.report(context.take_figures(worker, outbox, ledger))

    n_rows, n_embd = plan.largest_input(context.rank)
    courier, samplers = make_courier(context, plan), plan.ranks[context.rank].samplers
    sent = n_rows, n_embd, plan.numerics.wire_type, courier, samplers
    n_ahead = N_UNDER_WAY if plan.prepare_ahead else 1, N_POSTED if plan.post_ahead else 0
    is_direct = plan.hop_is_out_of_band(previous, context.rank)
    pipe = Pipe(previous, following, *sent, *n_ahead, is_direct, len(plan.layers_read), context.clock)
    progress = progress_between(context.link.comm, plan.hosts)
    flow = Flow() if plan.pace else context.flow  # paced messages are held back, and no way is cut
    StageLoop(context.link.comm, pipe, worker, report, ready_s, flow, progress).run()
    context.close()
    for model in models:
        model.close()
    return 0 if worker else 2


def load_own(context: Context, plan: JobPlan) -> tuple[LoadedModel | None, dict[int, LoadedModel]]:
    """This rank's stage of the target, if it has one, and its drafts by number, each with a KV cache for as many tokens
    as the target's. Collective. Raises UserError."""
    failed, received = None, dict[int, SliceFile]()
    try:
        received = fetch_layers(context, plan)
    except UserError as error:
        failed = error
    adapters = fetch_adapters(context, plan)  # collective: also where layers could not be taken
    if failed:
        raise failed
    if plan.room and TARGET in plan.parts(context.rank):
        context.blocks = open_blocks(context, plan)  # what is wrong with the folder is said before minutes of loading
    models = {
        number: load_part(context, plan, number, part, received.get(number), adapters)
        for number, part in plan.parts(context.rank).items()
    }
    context.meter.take_joules()  # of loading, which is not measured
    gc.collect()
    gc.freeze()  # Python's collector would pass over all that was imported in the middle of a text, for 25 to 80 ms
    return models.pop(TARGET, None), models


def load_part(
    context: Context,
    plan: JobPlan,
    number: int,
    part: StagePlan,
    received: SliceFile | None,
    adapters: Sequence[ScaledAdapter] = (),
) -> LoadedModel:
    """Layers of a draft of this number, or of TARGET. `received`: the slice that rank 0 sent. `adapters`: of the
    target, cut as it is. Raises UserError when this host's file is not rank 0's."""
    is_target, file = number == TARGET, plan.file(number)
    rank, numerics, capacity = plan.ranks[context.rank], plan.numerics, plan.capacity
    device = rank.target if is_target else rank.draft
    info = received.info if received else _read(file, plan.model)
    if is_target and part.last == info.n_layer and not context.vocabulary:
        context.vocabulary = VocabularyFile(info.paths[0])
    params = LlamaParams(
        n_cells=capacity.n_cells,
        # one more, in which rejected cells are parked
        n_seq_max=(capacity.n_target_seq if is_target else capacity.n_seq) + 1,
        n_batch=plan.n_rows_max if is_target else capacity.n_guess_rows,
        n_outputs_max=capacity.n_nodes + 1 if is_target else capacity.n_guess_rows,
        n_threads=rank.threads,
        n_gpu_layers=device.n_gpu_layers,
        parks=numerics.parked and is_target,
        exact=numerics.exact and is_target,  # guesses need not be reproducible to the bit: the target decides
        cache=numerics.cache if is_target else numerics.draft_cache,
        devices=device.devices,
        places=device.places,
        stop_interval_s=STOP_INTERVAL_S,
        repack=numerics.repack,
        repacked=numerics.repacked if is_target else (),
        at_once=numerics.at_once if is_target else 0,
        rope_factors=file.rope_factors,
        taps=tuple(layer - part.first for layer in plan.layers_read if part.first <= layer < part.last and is_target),
    )

    def open_layers() -> SliceFile:
        notice = lambda line: complain(f"{context.name}: {line}")  # noqa: E731
        return received or open_slice(info, part.first, part.last, plan.slice_cache, notice, file.states)

    model = load_layers(open_layers, params, device, adapters if is_target else ())
    if not is_target and (translation := plan.translations[number]):
        model = TranslatedStage(model, translation)
    if not plan.pace:
        return model
    cost = plan.pace.stages[plan.assignment.stages.index(part)] if is_target else plan.pace.drafts[number]
    clock = context.clock
    paced = PacedHead(model, cost, clock) if isinstance(model, LlamaHead) else PacedStage(model, cost, clock)
    context.paced.append(paced)
    return paced


def _read(file: ModelFile, target: ModelFile) -> ModelInfo:
    info = draft_of(file.path, read_model_info(target.path)) if file.head else read_draft(file.path)
    if info.fingerprint != file.fingerprint:
        way_out = "copy the same file to every host, or remove it there: then its layers come from rank 0"
        raise UserError(f"{info.path} differs from rank 0's; {way_out}")
    return info


def stage_report(context: Context, plan: JobPlan, stage: LoadedModel) -> dict[str, Any]:
    """The report of a loaded stage: `costs` of its runs, a `RunCosts`, its `gpu`, as in `gpu_of`, and the keys of its
    `blocks`, if it stores any. Raises UserError."""
    if context.blocks:
        model = stage.model if isinstance(stage, PacedStage) else stage
        assert isinstance(model, CellStage), "the plan has no such stages"
        context.store = CellStore(context.blocks, model)
    report = {"costs": time_stage(context, plan, stage), "gpu": gpu_of(plan.ranks[context.rank].target)}
    return report | ({"blocks": context.store.files.keys} if context.store else {})


def open_blocks(context: Context, plan: JobPlan) -> Blocks:
    """The blocks of this rank's stage on this host's disk, apart from those of other ranks, or in memory. Raises
    UserError."""
    notice = lambda line: complain(f"{context.name}: {line}")  # noqa: E731
    if plan.kv_ram:
        return BlockMemory(plan.kv_ram, notice)
    part, device = plan.parts(context.rank)[TARGET], plan.ranks[context.rank].target
    slice = f"{plan.model.fingerprint} {part.layers} {plan.numerics} {device.decisions} {describe_build()}"
    folder = (plan.kv_dir or cache_folder() / "kv") / f"rank-{context.rank}"
    return BlockFiles(folder, slice, plan.kv_disk, notice, plan.kv_read_only)


def make_worker(context: Context, plan: JobPlan, model: LoadedModel) -> StageWorker:
    """The worker of a loaded stage."""
    stages = plan.assignment.stages
    index = plan.assignment.stage_of(context.rank)
    assert index is not None, f"rank {context.rank} has a model and no stage"
    n_layers = plan.pace.stages[index].layers if plan.pace else stages[index].last - stages[index].first
    constrain = open_constraints(context, plan) if context.vocabulary else None
    following = stages[index + 1].rank if index + 1 < len(stages) else None
    leaves_as = plan.numerics.wire_type if plan.hop_is_out_of_band(context.rank, following) else None
    store = context.store
    return StageWorker(model, context.clock, index == 0, context.tracer, n_layers, constrain, leaves_as, store)


def open_constraints(context: Context, plan: JobPlan) -> Constraints:
    """Constraints by this rank's vocabulary, opened ahead where several requests are open: none waits for it."""
    assert context.vocabulary
    grammars = Grammars(context.vocabulary.open)
    if plan.capacity.n_requests > 1:
        grammars.open_ahead()
    return Constraints(grammars)


def make_drafter(context: Context, plan: JobPlan, model: LoadedModel) -> ModelDrafter:
    """On rank 0, which has the target's file. The model's cache must be empty."""
    context.vocabulary = context.vocabulary or VocabularyFile(plan.model.path)
    pool = SequencePool(plan.capacity.n_seq, plan.capacity.n_cells, window=plan.drafts[0].window)
    settings = pool, plan.capacity.n_guess_rows, plan.couple, open_constraints(context, plan)
    head = plan.drafts[0].head
    return HeadDrafter(cast(HeadModel, model), *settings, head.shift) if head else ModelDrafter(model, *settings)


def make_draft_worker(context: Context, plan: JobPlan, number: int, model: LoadedModel) -> DraftWorker:
    """The worker of a remote draft, or of a stage of one."""
    part = plan.parts(context.rank)[number]
    n_layers = part.last - part.first
    return DraftWorker(model, context.clock, part.first == 0, context.tracer, n_layers, couple=plan.couple)


def make_courier(context: Context, plan: JobPlan) -> Courier | None:
    """Makes messages of a paced job take their modelled time, on rank 0's clock; None in other jobs."""
    pace = plan.pace
    if pace is None:
        return None
    clock = lambda: context.clock() + context.clock_offset_s  # noqa: E731
    return Courier(pace.link, clock, plan.model.n_embd, pace.n_embd, plan.numerics.wire_type)
