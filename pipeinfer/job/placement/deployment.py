"""What every rank needs to load its part of the models: the plan, and what follows from it. Knows no request."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from pipeinfer.cluster.hosts.cores import Host, crowded_hosts, crowding, share_cores, spare_cores
from pipeinfer.cluster.hosts.free_memory import FreeMemory, Memory, check_fits, paging_lines
from pipeinfer.cluster.hosts.gpu_memory import check_gpus
from pipeinfer.cluster.plan import Plan, Sizes, draft_widths, make_plan, parse_split
from pipeinfer.cluster.timing.costs import Profile
from pipeinfer.core.kv.blocks import LARGEST, rows_in_blocks
from pipeinfer.errors import UserError
from pipeinfer.job.options.backends import Backend
from pipeinfer.job.options.limits import ON
from pipeinfer.job.options.options import (
    RunOptions,
    backend_of,
    check_by_rank,
    check_one_backend,
    check_wire_type,
    device_of,
    device_text,
    threads_of_rank,
    without_effect,
)
from pipeinfer.job.placement.cache_types import check_cache_types
from pipeinfer.job.placement.draft_place import check_draft_gpu_layers, options_of_draft
from pipeinfer.job.placement.draft_rank import check_draft_rank, choose_draft_rank
from pipeinfer.job.placement.exactness import in_blocks, repacked_alike
from pipeinfer.job.placement.heads import check_features, check_head, head_of
from pipeinfer.job.placement.memory import CELLS_PADDING, MemoryNeeds, gpu_layers
from pipeinfer.job.placement.model_files import translation_note
from pipeinfer.job.placement.numerics import numerics_name
from pipeinfer.job.placement.pace_profile import pace_profile
from pipeinfer.models.gguf.contents import FileState
from pipeinfer.models.gguf.head import Head, layers_read
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.heads.own_head import draft_of
from pipeinfer.models.llama.params import TypeRows
from pipeinfer.models.text.vocabularies import Translation
from pipeinfer.models.torch.hyperparameters import check_known

MAX_BATCH = 2048  # prompt tokens a run: every rank has buffers for so many rows
N_CELLS_SPARE = 512  # cells above the context, for guesses and, with exact numerics, for parked cells


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model as rank 0 found it, before the job: its file may be replaced or removed while the job runs."""

    path: Path
    fingerprint: str
    n_bytes: int
    n_params: int
    n_layer: int
    n_embd: int
    quantisation: str
    sizes: Sizes
    rewinds: bool = True  # whether a sequence can lose its newest tokens
    window: int = 0  # of layers that see only so many tokens back; 0 if there are none
    states: tuple[FileState, ...] = ()  # of its files on rank 0's host
    head: Head | None = None  # of a draft, what it reads of the target

    @classmethod
    def of(cls, info: ModelInfo) -> "ModelFile":
        return cls(
            info.path, info.fingerprint, info.n_bytes, info.n_params, info.n_layer, info.n_embd, info.quantisation,
            sizes_of(info), info.layers.rewinds, info.layers.window, info.states, info.head,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Deployment:
    """Models on ranks, as long as they are loaded. Rank 0 makes it and broadcasts it.

    n_cells   of every KV cache
    n_batch   tokens of a prompt that a run carries at most
    n_nodes   guesses and roots of requests that a run carries at most
    threads   of each rank
    samplers  threads beside the last stage that choose tokens
    memory    of each rank, what it will hold
    on_gpus   of each rank, the bytes of libllama's on its GPUs
    blocks    a prompt is evaluated in blocks that follow from its length; see pipeinfer.core.kv.blocks
    repacked  types of the target's weights that are repacked with exact numerics, and how rows of each are computed
    numerics  the name of all that decides bits; see pipeinfer.job.placement.numerics
    parked    rejected cells of the target stay taken until all are packed
    translations  of each draft, between the target's token ids and its own, where they differ
    backends  of each rank
    devices   of each rank, as asked for; empty: as it comes
    notes     lines about texts: those that exact numerics do not hold for, or the model was not trained for
    pace      what the ranks and links shall be slowed down to
    """

    plan: Plan
    model: ModelFile
    drafts: tuple[ModelFile, ...]  # in the order of the plan's
    n_cells: int
    n_batch: int
    n_nodes: int
    threads: tuple[int, ...]
    samplers: int
    hosts: tuple[Host, ...]
    memory: tuple[Memory, ...]
    on_gpus: tuple[int, ...]
    blocks: bool = False
    repacked: tuple[TypeRows, ...] = ()
    numerics: str = ""
    parked: bool = False
    pace: Profile | None = None
    backends: tuple[Backend, ...] = ()
    devices: tuple[str, ...] = ()
    translations: tuple[Translation | None, ...] = ()
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def n_rows_max(self) -> int:
        """Rows a run carries at most: a chunk of the prompt with the root, or guesses."""
        return max(self.n_batch + 1, self.n_nodes, LARGEST if self.blocks else 0)

    @property
    def layers_read(self) -> tuple[int, ...]:
        """Layers of the target whose outputs the draft reads, ascending."""
        return layers_read(draft.head for draft in self.drafts)

    def largest_input(self, rank: int) -> tuple[int, int]:
        """(rows, width of their activations) of the largest run that a rank other than the head's is sent."""
        drafts = [self.drafts[number] for number in self.plan.drafts_on(rank)]
        return (self.n_nodes, drafts[0].n_embd) if drafts else (self.n_rows_max, self.model.n_embd)

    def hop_is_out_of_band(self, source: int | None, dest: int | None) -> bool:
        """Whether activations of this hop go from device to device: between stages of the target that torch
        computes."""
        ends = [rank for rank in (source, dest) if rank is not None and self.plan.stage_of(rank) is not None]
        return len(ends) == 2 and all(self.hosts[rank].device_messages for rank in ends)

    @property
    def free_memory(self) -> tuple[list[str], list[FreeMemory]]:
        """Of every rank its host's name, and what memory is left there."""
        return self.host_names, [host.memory for host in self.hosts]

    @property
    def host_names(self) -> list[str]:
        """Of every rank."""
        return [host.name for host in self.hosts]

    @property
    def fits(self) -> bool:
        """Whether every host, and every GPU there, has the memory for what its ranks shall hold."""
        try:
            check_memory(self, "")
        except UserError:
            return False
        return True

    @property
    def crowding(self) -> float:
        """Threads that compute on each core, where they are the most; 1 at least."""
        return crowding(self.hosts, self.plan.computing, self.threads)

    @property
    def warnings(self) -> list[str]:
        """What will make it slow, and what is without effect, a line each."""
        notes = map(translation_note, [draft.path for draft in self.drafts], self.translations)
        untimed = [
            f"layers go by size, not by ranks' speed: rank {rank} ({host.name}) could not be timed: {host.untimed}"
            for rank, host in enumerate(self.hosts)
            if host.untimed
        ]
        paged = paging_lines(*self.free_memory, self.memory)
        return [*filter(None, notes), *untimed, *crowded_hosts(self.hosts, self.plan.computing, self.threads), *paged,
                *self.unused, *self.notes]  # fmt: skip


def check_memory(deployment: Deployment, way_out: str) -> None:
    """Raises UserError when a host, or a GPU there, lacks memory for what its ranks shall hold."""
    check_fits(*deployment.free_memory, deployment.memory, way_out)
    check_gpus(deployment.hosts, deployment.on_gpus, way_out)


def read_drafts(paths: Sequence[Path], target: ModelInfo) -> list[ModelInfo]:
    """Their headers, a head first, then the smallest. Raises UserError for what cannot draft for the target."""
    found = [draft_of(path, target) for path in paths]
    return sorted(found, key=lambda draft: (draft.head is None, draft.n_bytes))


def lay_out(
    options: RunOptions, hosts: Sequence[Host], info: ModelInfo, drafts: Sequence[ModelInfo], n_ctx: int, n_prompt: int
) -> Deployment:
    """The plan, whether it fits or not. `drafts`: those in use, the smallest first. Raises UserError for wrong
    options."""
    split = parse_split(options.layer_split) if options.layer_split else None
    draft_widths(len(options.drafts), options.draft_split)  # is refused also with a policy that needs no draft
    check_by_rank(options, len(hosts))
    check_wire_type(options)
    check_cache_types(options, len(hosts), info, drafts)
    check_draft_rank(options, len(hosts))
    check_head(options, drafts)
    needs, model = memory_needs(options, hosts, info, drafts, n_ctx, n_prompt), ModelFile.of(info)
    plan_with = partial(
        make_plan, len(hosts), (sizes := list(map(sizes_of, drafts))), model.sizes, split,
        partial(needs.room, hosts), options.draft_split if drafts else (), [host.speed for host in hosts],
    )  # fmt: skip
    is_free = bool(drafts) and len(hosts) > 1 and not head_of(drafts)
    rank = choose_draft_rank(options, hosts, model.sizes, sizes[0], plan_with) if is_free else 0
    plan = plan_with(rank)
    _check_computable(options, hosts, plan, info, drafts)
    computed_by = [options_on(options, hosts, plan, rank) for rank in range(len(hosts))]
    names = [device_of(own, rank, len(hosts)) for rank, own in enumerate(computed_by)]
    deployment = Deployment(
        plan=plan,
        model=model,
        drafts=tuple(map(ModelFile.of, drafts)),
        n_cells=needs.n_cells,
        n_batch=_n_batch(options, n_ctx),
        n_nodes=options.n_nodes,
        threads=(threads := threads_of_ranks(options.threads, plan.computing, hosts)),
        samplers=samplers_of(options, plan, hosts, threads),
        hosts=tuple(hosts),
        memory=needs.of_plan(plan),
        on_gpus=needs.on_gpus(plan),
        blocks=in_blocks(options, info, len(hosts), len(drafts)),
        repacked=needs.repacked,
        numerics=numerics_name(options, hosts, plan, needs.repacked),
        parked=_parks(options, plan),
        notes=tuple(_notes(options, info, n_ctx)),
        backends=tuple(backend_of(own, rank) for rank, own in enumerate(computed_by)),
        devices=tuple(device_text(each) if each else "" for each in names),
        pace=pace_profile(options.pace, len(hosts), len(drafts), plan.draft_split) if options.pace else None,
    )
    return replace(deployment, unused=tuple(_unused(options, deployment)))


def options_on(options: RunOptions, hosts: Sequence[Host], plan: Plan, rank: int) -> RunOptions:
    """Those by which a rank computes: the target's layers where it has some, else those of a draft."""
    is_draft = plan.stage_of(rank) is None and bool(plan.drafts_on(rank))
    return options_of_draft(options, len(hosts), rank) if is_draft else options


def _unused(options: RunOptions, deployment: Deployment) -> Iterator[str]:
    """Options without effect, a line each."""
    plan = deployment.plan
    yield from without_effect(options, max(map(len, (plan.stages, *plan.drafts))))
    hops = pairwise(stage.rank for stage in plan.stages)
    if options.gpu_aware == ON and not any(deployment.hop_is_out_of_band(*hop) for hop in hops):
        paced = options.pace is not None
        why = "messages are paced" if paced else "no two stages that torch computes follow each other"
        yield f"--gpu-aware {ON} is without effect: {why}"


def _notes(options: RunOptions, info: ModelInfo, n_ctx: int) -> Iterator[str]:
    """What the user should know of texts that are not exact."""
    selected = info.layers.n_selected
    if options.numerics == "exact" and 0 < selected < n_ctx:
        yield (
            f"the layers of {info.path.name} see only the {selected} earlier tokens with the highest scores; where "
            "scores are equal libllama chooses by where their cells are, so that a longer text may be another one "
            f"beside other texts or guesses; texts of up to {selected} tokens are exact"
        )


def _check_computable(
    options: RunOptions, hosts: Sequence[Host], plan: Plan, info: ModelInfo, drafts: Sequence[ModelInfo]
) -> None:
    """Raises UserError where a backend is asked for layers that it cannot compute, or not as exactly as is asked."""
    check_one_backend(options, [stage.rank for stage in plan.stages])
    check_features(options, plan, drafts)
    check_draft_gpu_layers(options, [stage.rank for stages in plan.drafts for stage in stages])
    if any(backend_of(options, stage.rank).is_torch for stage in plan.stages):
        check_known(info)
    for model, stages in zip(drafts, plan.drafts, strict=True):
        if any(backend_of(options_of_draft(options, len(hosts), stage.rank), stage.rank).is_torch for stage in stages):
            check_known(model)


def memory_needs(
    options: RunOptions, hosts: Sequence[Host], info: ModelInfo, drafts: Sequence[ModelInfo], n_ctx: int, n_prompt: int
) -> MemoryNeeds:
    """Memory of target and drafts for contexts of `n_ctx` tokens. Raises UserError when there are too few ranks."""
    n_rows = max(_n_batch(options, n_ctx) + 1, options.n_nodes)
    n_in_blocks = rows_in_blocks(n_prompt) if in_blocks(options, info, len(hosts), len(drafts)) else 0
    lacks = tuple(host.lacks for host in hosts)
    of_drafts = tuple(options_of_draft(options, len(hosts), rank) for rank in range(len(hosts)))
    repacked = repacked_alike(options, hosts, info, len(drafts))
    return MemoryNeeds(options, info, drafts, cells_for(n_ctx), n_rows, n_in_blocks, lacks, of_drafts, repacked)


def _n_batch(options: RunOptions, n_ctx: int) -> int:
    return min(options.batch_size, MAX_BATCH, n_ctx)


def _parks(options: RunOptions, plan: Plan) -> bool:
    """Whether rejected cells are kept. libllama's exact numerics add in the order of cells; torch sorts them itself."""
    return options.numerics == "exact" and not all(backend_of(options, stage.rank).is_torch for stage in plan.stages)


def cells_for(n_ctx: int) -> int:
    """KV cells of every cache for contexts of `n_ctx` tokens."""
    return -(-(n_ctx + N_CELLS_SPARE) // CELLS_PADDING) * CELLS_PADDING


def sizes_of(info: ModelInfo) -> Sizes:
    return Sizes(info.layer_bytes, info.output_bytes, info.layers.faults)


def threads_of_ranks(threads: tuple[int, ...], computing: Set[int], hosts: Sequence[Host]) -> tuple[int, ...]:
    """Of each rank, as given, else a share of its host's cores. Raises UserError for a wrong number of values."""
    defaults = share_cores(hosts, computing)
    return tuple(threads_of_rank(threads, rank, len(hosts), default) for rank, default in enumerate(defaults))


def samplers_of(options: RunOptions, plan: Plan, hosts: Sequence[Host], threads: Sequence[int]) -> int:
    """Sampler threads beside the last stage: as asked, else one where its rank has a spare core or a GPU. None on rank
    0."""
    rank = plan.stages[-1].rank
    if rank == 0 or not options.may_have_samplers:
        return 0
    if options.samplers is not None:
        return options.samplers
    return int(gpu_layers(options, rank) != 0 or spare_cores(hosts, plan.computing, threads, rank) > 0)
