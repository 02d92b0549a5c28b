"""From options, hosts and headers of models to the plan of a job, whether it fits or not. Loads nothing."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from pipeinfer.cluster.assignment import Assignment, assign, draft_widths, parse_split
from pipeinfer.cluster.hosts.cores import Host, share_cores, spare_cores
from pipeinfer.core.kv.blocks import rows_in_blocks
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import ON
from pipeinfer.job.options.options import RunOptions, check_draft_rank, check_wire_type, without_effect
from pipeinfer.job.placement.cache_types import check_cache_types
from pipeinfer.job.placement.capacity import capacity_of, engine_settings
from pipeinfer.job.placement.devices import RankDevices, check_draft_gpu_layers, check_one_backend, plan_devices
from pipeinfer.job.placement.draft_rank import choose_draft_rank
from pipeinfer.job.placement.heads import check_features, check_head, head_of
from pipeinfer.job.placement.job_plan import JobPlan, ModelFile, RankPlan, sizes_of
from pipeinfer.job.placement.memory import MemoryNeeds
from pipeinfer.job.placement.numerics import NumericsPlan, named, numerics_of, repacked_alike
from pipeinfer.job.placement.pace_profile import pace_profile
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.torch.hyperparameters import check_known


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The inputs of a plan. `drafts`: headers of those in use, the smallest first; `n_ctx`: tokens of all requests
    that are open at a time; `n_prompt`: tokens of the longest prompt."""

    options: RunOptions
    hosts: Sequence[Host]
    info: ModelInfo
    drafts: Sequence[ModelInfo]
    n_ctx: int
    n_prompt: int


def lay_out(inputs: PlanInputs) -> JobPlan:
    """Raises UserError for wrong options."""
    options, hosts, info, drafts = inputs.options, inputs.hosts, inputs.info, inputs.drafts
    devices = plan_devices(options, hosts)
    _check(inputs, devices)
    numerics = unnamed_numerics(options, hosts, info, devices)
    capacity = capacity_of(options, inputs.n_ctx, info.layers.rewinds)
    needs = MemoryNeeds(
        info, drafts, capacity, numerics, devices, rows_in_blocks(inputs.n_prompt) if numerics.blocks else 0,
        tuple(host.lacks for host in hosts), options.slice_cache is not None, options.may_have_samplers,
    )  # fmt: skip
    assignment = _assign(inputs, needs)
    target = [devices[stage.rank].target for stage in assignment.stages]
    _check_computable(inputs, assignment, devices)
    threads = threads_of_ranks(options.threads, assignment.computing, hosts)
    last = assignment.stages[-1].rank
    is_spare = target[-1].n_gpu_layers != 0 or spare_cores(hosts, assignment.computing, threads, last) > 0
    samplers = {last: options.n_samplers(last, is_spare)}
    of_ranks = zip(hosts, devices, threads, needs.of_ranks(assignment), needs.on_gpus(assignment), strict=True)
    plan = JobPlan(
        model=ModelFile.of(info),
        drafts=tuple(map(ModelFile.of, drafts)),
        assignment=assignment,
        ranks=tuple(
            RankPlan(host, *of_rank, n_threads, memory, on_gpu, samplers.get(rank, 0))
            for rank, (host, of_rank, n_threads, memory, on_gpu) in enumerate(of_ranks)
        ),
        capacity=capacity,
        numerics=named(numerics, target, hosts[0]),
        engine=engine_settings(options, info.layers.rewinds),
        max_delay_s=options.max_delay_s,
        looks_up=options.lookup,
        couple=options.couple,
        pace=pace_profile(options.pace, len(hosts), len(drafts), assignment.draft_split) if options.pace else None,
        slice_cache=options.slice_cache,
        send_layers=options.send_layers,
        prepare_ahead=options.prepare_ahead,
        post_ahead=options.post_ahead,
        notes=tuple(_notes(inputs)),
    )
    return replace(plan, unused=tuple(_unused(inputs, plan)))


def unnamed_numerics(
    options: RunOptions, hosts: Sequence[Host], info: ModelInfo, devices: Sequence[RankDevices]
) -> NumericsPlan:
    """The numerics before layers are assigned. Drafts may be on GPUs; with layers of the target there neither blocks
    nor parts give them the same bits."""
    ranks = options.target_ranks(len(hosts))
    is_exact = options.numerics == "exact" and all(devices[rank].target.n_gpu_layers == 0 for rank in ranks)
    may_repack, name = options.repack and is_exact, options.wanted_numerics
    repacked = repacked_alike(hosts, info, options.n_expected, name) if may_repack else ()
    return numerics_of(options, repacked, info.layers.known.flash and is_exact)


def _assign(inputs: PlanInputs, needs: MemoryNeeds) -> Assignment:
    options, hosts, info = inputs.options, inputs.hosts, inputs.info
    sizes, target = [sizes_of(draft) for draft in inputs.drafts], sizes_of(info)
    assign_with = partial(
        assign, len(hosts), sizes, target, parse_split(options.layer_split) if options.layer_split else None,
        partial(needs.room, hosts), options.draft_split if sizes else (), [host.speed for host in hosts],
    )  # fmt: skip
    if not sizes or len(hosts) == 1 or head_of(inputs.drafts):
        return assign_with(0)
    if options.may_choose_draft_rank:
        return assign_with(choose_draft_rank(hosts, target, sizes[0], assign_with))
    return assign_with(options.draft_rank or 0)


def threads_of_ranks(threads: tuple[int, ...], computing: Set[int], hosts: Sequence[Host]) -> tuple[int, ...]:
    """Threads of each rank: as given, else, also for 0, a share of its host's cores. Raises UserError for a wrong
    number of values."""
    if len(threads) not in (0, 1, len(hosts)):
        raise UserError(
            f"--threads {','.join(map(str, threads))} has {len(threads)} values, and the number of ranks is "
            f"{len(hosts)}; give one, or one for each rank"
        )
    given = (threads or (0,)) * len(hosts)
    return tuple(own or share for own, share in zip(given, share_cores(hosts, computing), strict=False))


# -- checks and notes


def _check(inputs: PlanInputs, devices: Sequence[RankDevices]) -> None:
    """Raises UserError for options that are wrong under every assignment."""
    options, n_ranks = inputs.options, len(inputs.hosts)
    draft_widths(len(options.drafts), options.draft_split)  # is refused also with a policy that needs no draft
    check_wire_type(options)
    check_cache_types(options, devices, inputs.info, inputs.drafts)
    check_draft_rank(options, n_ranks)
    check_head(options.draft_rank, inputs.drafts)


def _check_computable(inputs: PlanInputs, assignment: Assignment, devices: Sequence[RankDevices]) -> None:
    """Raises UserError where a backend cannot compute its layers, or not exactly."""
    options, ranks = inputs.options, [stage.rank for stage in assignment.stages]
    if options.numerics == "exact":
        check_one_backend(devices, ranks)
    check_features(assignment, devices, inputs.drafts)
    if inputs.drafts:
        drafting = [stage.rank for stages in assignment.drafts for stage in stages]
        check_draft_gpu_layers(options.n_gpu_layers_draft, devices, drafting)
    if any(devices[rank].target.is_torch for rank in ranks):
        check_known(inputs.info)
    for model, stages in zip(inputs.drafts, assignment.drafts, strict=True):
        if any(devices[stage.rank].draft.is_torch for stage in stages):
            check_known(model)


def _unused(inputs: PlanInputs, plan: JobPlan) -> Iterator[str]:
    """Options without effect, a line each."""
    options, assignment = inputs.options, plan.assignment
    yield from without_effect(options, max(map(len, (assignment.stages, *assignment.drafts))))
    hops = pairwise(stage.rank for stage in assignment.stages)
    if options.gpu_aware == ON and not any(plan.hop_is_out_of_band(*hop) for hop in hops):
        why = "messages are paced" if plan.pace else "no two stages that torch computes follow each other"
        yield f"--gpu-aware {ON} is without effect: {why}"


def _notes(inputs: PlanInputs) -> Iterator[str]:
    """Warnings for texts that are not exact, or too long for the model."""
    info, selected, ctx_size = inputs.info, inputs.info.layers.n_selected, inputs.options.ctx_size
    if inputs.options.numerics == "exact" and 0 < selected < inputs.n_ctx:
        yield (
            f"the layers of {info.path.name} see only the {selected} earlier tokens with the highest scores; where "
            "scores are equal libllama chooses by where their cells are, so that a longer text may be another one "
            f"beside other texts or guesses; texts of up to {selected} tokens are exact"
        )
    if ctx_size > info.n_ctx_train and inputs.options.parallel == 1:
        yield (
            f"-c {ctx_size} is more than the {info.n_ctx_train} tokens that the model was trained for; what comes "
            "behind these may be of no use"
        )
