"""From options, hosts and headers of models to the plan of a job, and whether it fits. Loads nothing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, starmap

from pipeinfer.cluster.assignment import Assignment, Sizes, assign, draft_widths, parse_split
from pipeinfer.cluster.hosts.host import Host, distinct_speeds, spare_cores, threads_of_ranks
from pipeinfer.core.blocks import rows_in_blocks
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import ON
from pipeinfer.job.options.options import RunOptions, check_wire_type
from pipeinfer.job.options.values import Pace
from pipeinfer.job.placement.checks import (
    check_adapters,
    check_cache_types,
    check_draft_gpu_layers,
    check_exact_cache,
    check_features,
    check_head,
    check_one_backend,
    check_tensor_places,
    head_of,
    not_on_disk,
    read_adapters,
)
from pipeinfer.job.placement.devices import RankDevices, plan_devices
from pipeinfer.job.placement.job_plan import (
    JobPlan,
    ModelFile,
    RankPlan,
    capacity_of,
    check_memory,
    engine_settings,
    planned_capacity,
    sizes_of,
)
from pipeinfer.job.placement.memory import MemoryNeeds, stored_bytes
from pipeinfer.job.placement.numerics import named_numerics, unnamed_numerics
from pipeinfer.job.planning.fit import PlanInputs, fit, resume
from pipeinfer.job.profiling.speeds import Schedule, make_schedule
from pipeinfer.models.drafts.translation import draft_translation
from pipeinfer.models.gguf.adapter import ScaledAdapter, digest_of
from pipeinfer.models.gguf.model_info import LONG, ModelInfo
from pipeinfer.models.llama.tensor_places import has_experts
from pipeinfer.models.torch.params import check_known
from pipeinfer.observe.columns import digest
from pipeinfer.policies import Iterative
from pipeinfer.virtual.costs import Profile
from pipeinfer.virtual.profile import load_profile

CLEAR_GAIN = 1.1  # another rank than 0, which has the engine, drafts if the slowest stage is faster by this factor
DRAFT_SHARE = 0.5  # and if a draft's step there takes at most this part of that stage's time, or the time on rank 0
NOT_REPACKED = (
    "there is no memory to repack the weights, so that numerics are not {} but {}: tokens that are all but tied may "
    "differ from those of ranks where there is; with --no-repack they are the same"
)
OTHER_NUMERICS = (
    "what goes on was begun with numerics {}, and goes on with {}: the text may be another one from here on"
)


class DoesNotFit(UserError):
    """A plan takes more memory than there is; the message has the numbers. `tried`: what --fit has tried."""

    def __init__(self, message: str, plan: JobPlan, tried: str = "") -> None:
        super().__init__("; ".join(filter(None, (message, tried))))
        self.plan, self.tried = plan, tried


def deploy(
    options: RunOptions,
    hosts: Sequence[Host],
    info: ModelInfo,
    drafts: Sequence[ModelInfo],
    n_ctx: int,
    n_prompt: int,
    n_least: int = 0,
) -> JobPlan:
    """The plan; see `PlanInputs`. Raises UserError for wrong options, DoesNotFit for too little memory."""
    inputs, tried = PlanInputs(options, hosts, info, drafts, n_ctx, n_prompt, n_least), ""
    if planned := options.placement.planned:
        planned.check({"model": info.fingerprint, "drafts": [draft.fingerprint for draft in inputs.drafts]})
        plan = _with_required_numerics(inputs)
        planned.check(plan.decisions)
    else:
        earlier = resume(inputs, _with_required_numerics)
        plan, tried = (earlier, "") if earlier else fit(inputs, _with_required_numerics)
    resumed, allows_others = options.numerics.resumed, options.numerics.allow_other_numerics
    way_out = _way_out(plan.assignment, options)
    try:
        check_memory(plan, way_out)
    except UserError as error:
        began = f"; what is to go on was begun with numerics {resumed}, --allow-other-numerics goes on with others"
        raise DoesNotFit(f"{error}{began if resumed and not allows_others else ''}", plan, tried) from None
    if resumed and plan.numerics.name != resumed:
        if not allows_others:
            began = f"what is to go on was begun with numerics {resumed}, and here they are {plan.numerics.name}"
            way_out = "start anew, or go on all the same with --allow-other-numerics"
            raise UserError(f"{began}: the text may be another one from here on; {way_out}")
        plan = replace(plan, notes=(*plan.notes, OTHER_NUMERICS.format(resumed, plan.numerics.name)))
    translations = [None if draft.head else draft_translation(info.path, draft.path) for draft in plan.drafts]
    return replace(plan, translations=tuple(translations), resumed_numerics=resumed)


def _with_required_numerics(inputs: PlanInputs) -> JobPlan:
    """With those that a resumed job, or a plan, has, where that can be and fits, or others are not allowed."""
    numerics, plan = inputs.options.numerics, choose_numerics(inputs)
    if not (name := inputs.options.required_numerics) or plan.numerics.name == name:
        return plan
    both = lay_out(inputs), lay_out(_without_repacking(inputs))
    same = next((each for each in both if each.numerics.name == name), None)
    return same if same and (not numerics.allow_other_numerics or same.fits) else plan


def choose_numerics(inputs: PlanInputs) -> JobPlan:
    """With weights repacked where that is faster and fits, else as in the file, which needs less memory."""
    plan = lay_out(inputs)
    if not plan.numerics.repacked or plan.fits:
        return plan
    mapped = lay_out(_without_repacking(inputs))
    return replace(mapped, notes=(*mapped.notes, NOT_REPACKED.format(plan.numerics.name, mapped.numerics.name)))


def _without_repacking(inputs: PlanInputs) -> PlanInputs:
    return replace(inputs, hosts=[replace(host, repacked=(), grouped=()) for host in inputs.hosts])


def _way_out(assignment: Assignment, options: RunOptions) -> str:
    placement, is_cut = options.placement, len(assignment.stages) > 1
    smaller = "a smaller -cram or context (-c)" if options.context.cache_ram else "a smaller context (-c)"
    first = "no split was found that fits; " if is_cut else ""
    if placement.plan or placement.layer_split is not None:
        first = f"leave {'--plan' if placement.plan else '--layer-split'} out, "
    return f"{first}use {smaller}, more ranks on further hosts, or a smaller quantisation"


def lay_out(inputs: PlanInputs) -> JobPlan:
    """The plan of one choice of numerics, whether it fits or not. Raises UserError for wrong options."""
    options, hosts, info, drafts = inputs.options, inputs.hosts, inputs.info, inputs.drafts
    placement, speculation, n_requests = options.placement, options.speculation, options.traffic.parallel
    devices = plan_devices(placement, hosts)
    _check(inputs, devices)
    ranks, n_expected, name = options.target_ranks(len(hosts)), options.traffic.n_expected, options.required_numerics
    target_devices, target_hosts = [devices[rank].target for rank in ranks], [hosts[rank] for rank in ranks]
    numerics = unnamed_numerics(options.numerics, target_hosts, info, target_devices, n_expected, name)
    adapters = read_adapters(options.models, info)
    if adapters:  # devices were tried without
        numerics = replace(numerics, at_once=0)
    adapter_bytes = tuple(map(sum, zip(*[each.layer_bytes(info.n_layer) for each, _ in adapters], strict=True)))
    rewinds = info.layers.rewinds
    capacity = capacity_of(speculation, n_requests, options.context.batch_size, inputs.n_ctx, rewinds)
    if placement.planned:
        capacity = planned_capacity(placement.planned, capacity)
    n_in_blocks = rows_in_blocks(inputs.n_prompt) if numerics.blocks else 0
    lacks, in_cache = tuple(host.lacks for host in hosts), options.models.slice_cache is not None
    has_samplers = placement.may_have_samplers(n_requests)
    is_kept, context = not not_on_disk(info, numerics.exact), options.context
    kv_disk, kv_ram = is_kept * context.kv_disk, is_kept * (context.cache_ram << 20)
    kinds = has_samplers, adapter_bytes, kv_disk + kv_ram > 0, kv_ram
    needs = MemoryNeeds(info, drafts, capacity, numerics, devices, n_in_blocks, lacks, in_cache, *kinds)
    assignment = _assign(inputs, needs)
    draft_rank = assignment.drafts[0][0].rank if assignment.drafts else 0
    if draft_rank != (placement.draft_rank or 0):  # it was chosen: other ranks have the target
        return lay_out(replace(inputs, options=options.changed(draft_rank=draft_rank)))
    target = [devices[stage.rank].target for stage in assignment.stages]
    _check_computable(inputs, assignment, devices, adapters)
    threads = threads_of_ranks(placement.threads, assignment.computing, hosts)
    last = assignment.stages[-1].rank
    is_spare = target[-1].n_gpu_layers != 0 or spare_cores(hosts, assignment.computing, threads, last) > 0
    samplers = [placement.n_samplers(n_requests, last, is_spare) if rank == last else 0 for rank in range(len(hosts))]
    pace, (targets, drafts_on) = options.experiments.pace, zip(*devices, strict=True)
    memory, on_gpus, is_long = needs.of_ranks(assignment), needs.on_gpus(assignment), info.rope_factors == LONG
    by_rank = zip(hosts, targets, drafts_on, threads, memory, on_gpus, samplers, strict=True)
    plan = JobPlan(
        model=ModelFile.of(info),
        drafts=tuple(map(ModelFile.of, drafts)),
        assignment=assignment,
        ranks=tuple(starmap(RankPlan, by_rank)),
        capacity=capacity,
        numerics=named_numerics(
            numerics, target, hosts[assignment.stages[0].rank], digest_of(adapters), is_long, info.layers.window
        ),
        adapters=adapters,
        engine=engine_settings(speculation, n_requests, rewinds),
        max_delay_s=options.traffic.max_delay_s,
        looks_up=speculation.lookup,
        couple=speculation.couple,
        pace=pace_profile(pace, len(hosts), len(drafts), assignment.draft_split) if pace else None,
        pace_hash=digest(load_profile(pace.profile).top.values) if pace else "",
        dilation=pace.dilation if pace else 1.0,
        slice_cache=options.models.slice_cache,
        send_layers=options.models.send_layers,
        kv_disk=kv_disk,
        kv_ram=kv_ram,
        kv_bytes=stored_bytes(info, numerics.cache, assignment.stages),
        kv_dir=context.kv_dir,
        kv_read_only=context.kv_read_only,
        prepare_ahead=options.experiments.prepare_ahead,
        post_ahead=options.experiments.post_ahead,
        notes=tuple(_notes(inputs)),
    )
    return replace(plan, unused=tuple(_unused(inputs, plan)))


def pace_profile(pace: Pace, n_ranks: int, n_drafts: int, draft_split: Sequence[int] = ()) -> Profile:
    """The profile that `--pace` gives `n_ranks` ranks. Raises UserError when none fits."""
    if max(draft_split, default=1) > 1:
        shown = ",".join(map(str, draft_split))
        raise UserError(f"--pace {pace}: a profile has each draft on 1 rank, --draft-split is {shown}; leave that out")
    profile = load_profile(pace.profile).lay_out(n_ranks, pace.pair, n_drafts > 0)
    if len(profile.drafts) != n_drafts:
        raise UserError(f"--pace {pace} has {len(profile.drafts)} drafts, here are {n_drafts}; give -md as often")
    return profile


def schedule_of(options: RunOptions, hosts: Sequence[Host]) -> Schedule | None:
    """The ranks to time before there is a plan: not alike, and a free split. None also where options are wrong."""
    if options.placement.layer_split or options.experiments.pace:
        return None
    try:
        options.check_draft_rank(len(hosts))
        target_ranks = options.target_ranks(len(hosts))
        return make_schedule(options.placement, hosts, target_ranks, options.may_choose_draft_rank and len(hosts) > 1)
    except UserError:
        return None


# -- layers of each rank


def _assign(inputs: PlanInputs, needs: MemoryNeeds) -> Assignment:
    hosts, info, placement = inputs.hosts, inputs.info, inputs.options.placement
    sizes, target = [sizes_of(draft) for draft in inputs.drafts], sizes_of(info)
    split = parse_split(placement.layer_split) if placement.layer_split else None
    draft_split = placement.draft_split if sizes else ()
    speeds, room = [host.speed for host in hosts], partial(needs.room, hosts)
    assign_with = partial(assign, len(hosts), sizes, target, split, room, draft_split, speeds)
    if not sizes or len(hosts) == 1 or head_of(inputs.drafts):
        return assign_with(0)
    if inputs.options.may_choose_draft_rank:
        return assign_with(choose_draft_rank(hosts, target, sizes[0], assign_with))
    return assign_with(placement.draft_rank or 0)


def choose_draft_rank(
    hosts: Sequence[Host], target: Sizes, draft: Sizes, assign_with: Callable[[int], Assignment]
) -> int:
    """The rank whose loss slows the pipeline least; 0: no clear gain, or no times. `assign_with`: takes that rank."""
    speeds = distinct_speeds([host.speed for host in hosts])
    if not speeds:
        return 0

    def draft_s(rank: int) -> float:
        return sum(speeds[rank].seconds(draft.layer_bytes, draft.output_bytes))

    def slowest_s(rank: int) -> float:
        times = [speed.seconds(target.layer_bytes, target.output_bytes) for speed in speeds]
        return max(sum(times[stage.rank][stage.first : stage.last]) for stage in assign_with(rank).stages)

    by_rank_s = {rank: slowest_s(rank) for rank in range(len(hosts))}
    limits_s = {rank: max(draft_s(0), DRAFT_SHARE * stage_s) for rank, stage_s in by_rank_s.items()}
    fast_enough = [rank for rank in by_rank_s if draft_s(rank) <= limits_s[rank]]
    best = min(fast_enough, key=lambda rank: (by_rank_s[rank], rank))
    return best if by_rank_s[best] * CLEAR_GAIN <= by_rank_s[0] else 0


# -- checks and notes


def _check(inputs: PlanInputs, devices: Sequence[RankDevices]) -> None:
    """Raises UserError for options that are wrong under every assignment."""
    options, placement = inputs.options, inputs.options.placement
    draft_widths(len(options.models.drafts), placement.draft_split)  # also under a policy that needs no draft
    check_wire_type(options.numerics)
    check_cache_types(options.numerics, devices, inputs.info, inputs.drafts)
    options.check_draft_rank(len(inputs.hosts))
    check_head(placement.draft_rank, inputs.drafts)
    if options.context.kv_disk and options.context.cache_ram:
        why = "cells are kept on disk, where the system holds them in free memory, or in memory"
        raise UserError(f"--kv-disk and -cram: {why}; leave one of them out")


def _check_computable(
    inputs: PlanInputs, assignment: Assignment, devices: Sequence[RankDevices], adapters: Sequence[ScaledAdapter]
) -> None:
    """Raises UserError where a backend cannot compute its layers, or not exactly."""
    options, ranks = inputs.options, [stage.rank for stage in assignment.stages]
    if options.numerics.numerics == "exact":
        check_one_backend(devices, ranks)
        check_exact_cache(options.numerics, any(devices[rank].target.uses_gpus for rank in ranks))
    check_features(assignment, devices, inputs.drafts)
    if inputs.drafts:
        drafting = [stage.rank for stages in assignment.drafts for stage in stages]
        check_draft_gpu_layers(options.placement.n_gpu_layers_draft, devices, drafting)
    if any(devices[rank].target.is_torch for rank in ranks):
        check_known(inputs.info)
        if flag := options.context.kept_by:
            raise UserError(f"{flag} keeps cells of llama.cpp alone, and --backend is torch; leave one of them out")
    check_tensor_places(options.placement.override_tensor, inputs.info, assignment.stages, devices, inputs.hosts)
    check_adapters(adapters, inputs.info, devices, ranks, options.numerics.numerics == "exact")
    for model, stages in zip(inputs.drafts, assignment.drafts, strict=True):
        if any(devices[stage.rank].draft.is_torch for stage in stages):
            check_known(model)


def _unused(inputs: PlanInputs, plan: JobPlan) -> Iterator[str]:
    """Options without effect, a line each."""
    options, assignment = inputs.options, plan.assignment
    yield from options.without_effect(max(map(len, (assignment.stages, *assignment.drafts))))
    placement, uses_gpus = options.placement, any(rank.target.uses_gpus for rank in plan.ranks)
    moves = {"-cmoe": placement.cpu_moe, "-ncmoe": any(placement.n_cpu_moe), "-ot": bool(placement.override_tensor)}
    for flag in (flag for flag, is_given in moves.items() if is_given):
        if not uses_gpus:
            yield f"{flag} is without effect: no rank has layers on a GPU (-ngl)"
        elif flag != "-ot" and not has_experts(inputs.info):
            yield f"{flag} is without effect: {inputs.info.path.name} has no experts"
    if (flag := options.context.kept_by) and (why := not_on_disk(inputs.info, plan.numerics.exact)):
        yield f"{flag} is without effect: {why}, and such cells are not kept"
    if options.context.kv_read_only and not options.context.kv_disk:
        yield "--kv-read-only is without effect: neither --kv-disk nor --kv-dir is given"
    if options.models.lora_init_without_apply and not plan.adapters:
        yield "--lora-init-without-apply is without effect: there is no adapter (--lora, --lora-scaled)"
    hops = pairwise(stage.rank for stage in assignment.stages)
    if options.numerics.gpu_aware == ON and not any(plan.hop_is_out_of_band(*hop) for hop in hops):
        why = "messages are paced" if plan.pace else "no two stages that torch computes follow each other"
        yield f"--gpu-aware {ON} is without effect: {why}"


def _notes(inputs: PlanInputs) -> Iterator[str]:
    """Warnings for texts that are not exact, or too long for the model."""
    options, info, selected = inputs.options, inputs.info, inputs.info.layers.n_selected
    if options.numerics.numerics == "exact" and 0 < selected < inputs.n_ctx:
        yield (
            f"the layers of {info.path.name} see only the {selected} earlier tokens with the highest scores; where "
            "scores are equal libllama chooses by where their cells are, so that a longer text may be another one "
            f"beside other texts or guesses; texts of up to {selected} tokens are exact"
        )
    has_company = options.traffic.parallel > 1 or not isinstance(options.speculation.policy, Iterative)
    if options.numerics.numerics == "exact" and not info.layers.architecture.flash and has_company:
        yield (
            f"libllama has no flash attention for {info.path.name}, and adds up by where cells are: a text may be "
            "another one beside other texts or guesses; one text at a time with --policy iterative is exact"
        )
    if (ctx_size := options.context.ctx_size or 0) > info.n_ctx_train and options.traffic.parallel == 1:
        yield (
            f"-c {ctx_size} is more than the {info.n_ctx_train} tokens that the model was trained for; what comes "
            "behind these may be of no use"
        )
