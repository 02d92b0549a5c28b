"""The plan of a job: models, assignment of layers, devices and memory of each rank, capacity, numerics. Planning makes
it once; rank 0 broadcasts it; no rank works out any of it again. Knows no request."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeinfer.cluster.assignment import Assignment, Sizes, StagePlan
from pipeinfer.cluster.hosts.host import Host, crowded_hosts, crowding
from pipeinfer.cluster.hosts.resources import Memory, check_fits, check_gpus, paging_lines, spare_memory, spare_on_gpus
from pipeinfer.core.blocks import LARGEST
from pipeinfer.core.stored_blocks import Room, StoredBytes
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import Speculation
from pipeinfer.job.options.plan_file import PlanFile, no_plan
from pipeinfer.job.placement.devices import DevicePlan
from pipeinfer.job.placement.numerics import NumericsPlan
from pipeinfer.models.drafts.translation import Translation, translation_note
from pipeinfer.models.gguf.adapter import ScaledAdapter
from pipeinfer.models.gguf.contents import FileState
from pipeinfer.models.gguf.model_info import DraftHead, ModelInfo, layers_read
from pipeinfer.virtual.costs import Profile

MAX_BATCH = 2048  # prompt tokens a run: every rank has buffers for so many rows
N_CELLS_SPARE = 512  # cells above the context, for guesses and, with exact numerics, for parked cells
CELLS_PADDING = 256  # libllama's
MAX_PROMPTS = 4  # in blocks that are read at a time: each has a context of its own meanwhile
MEANINGS = "tokens of context,cells,prompt tokens a run,guesses a run,nodes a run,requests,prompts at a time,branches"
MEANINGS += ",sequences,guesses at a time"
"""Of the fields of `Capacity`, for users."""

TARGET = -1  # in the place of a draft's number
N_DIGITS = 12  # of a plan's hash
SHARED_CORES = "ranks share cores, and predictions do not know who waits: with guesses they are off by up to a quarter"


# -- capacity: rows, cells, sequences and requests that contexts, caches and buffers have room for


@dataclass(frozen=True, slots=True)
class Capacity:
    """Counts, of all requests together."""

    n_ctx: int  # tokens of all requests that are open at a time
    n_cells: int  # of every KV cache
    n_batch: int  # tokens of a prompt that a run carries at most
    n_guess_rows: int  # rows of a run with guesses, and of a draft's step, at most
    n_nodes: int  # guesses and roots of requests that a run carries at most
    n_requests: int  # open at a time
    n_prompts: int  # prompts in blocks that are read at a time
    n_seq: int  # sequences that trees may lease
    n_target_seq: int  # the same of the target: few where each has a state
    n_target_guesses: int  # of a target that does not rewind: guesses at a time, each in a sequence of its own

    @property
    def n_rows(self) -> int:
        """Rows of a run outside of blocks, at most: a chunk of the prompt with the root, or guesses."""
        return max(self.n_batch, self.n_nodes) + 1  # of a scored prompt a run carries up to `n_nodes`, and the root

    @property
    def n_outputs(self) -> int:
        """Rows of a run that may want logits, and one."""
        return max(self.n_guess_rows, self.n_seq) + 1


def capacity_of(speculation: Speculation, n_requests: int, batch_size: int, n_ctx: int, rewinds: bool) -> Capacity:
    """`rewinds`: whether a sequence of the target can lose its newest tokens."""
    n_guess_rows = speculation.n_guess_rows
    rows = min(batch_size, MAX_BATCH, n_ctx), n_guess_rows, max(n_guess_rows, n_requests)
    n_target_seq = speculation.n_target_seq(n_requests, rewinds)
    of_trees = speculation.n_seq(n_requests), n_target_seq, speculation.n_target_guesses(n_requests, rewinds)
    return Capacity(n_ctx, cells_for(n_ctx), *rows, n_requests, min(MAX_PROMPTS, n_requests), *of_trees)


def planned_capacity(plan: PlanFile, needed: Capacity) -> Capacity:
    """The capacity in a plan. Raises UserError where the job needs more, or the plan has no such capacity."""
    try:
        planned = Capacity(**plan.decisions["capacity"])
    except TypeError:
        raise no_plan(plan.path) from None
    for (name, n), meaning in zip(asdict(needed).items(), MEANINGS.split(","), strict=True):
        if n > (room := getattr(planned, name)):
            lack = f"has room for {room} {meaning}, and this job needs {n}"
            raise UserError(f"--plan {plan.path} {lack}; plan with the same --policy, --parallel and -c")
    return planned


def cells_for(n_ctx: int) -> int:
    """KV cells of every cache for contexts of `n_ctx` tokens."""
    return -(-(n_ctx + N_CELLS_SPARE) // CELLS_PADDING) * CELLS_PADDING


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of the engine that an ablation or another policy changes while models stay loaded."""

    cancel: bool  # runs whose rows are all dead are cancelled
    looks_up: bool  # guesses are looked up too
    n_seq: int  # of drafts, as in `Capacity`
    n_target_seq: int  # of the target


def engine_settings(speculation: Speculation, n_requests: int, rewinds: bool) -> EngineSettings:
    sequences = speculation.n_seq(n_requests), speculation.n_target_seq(n_requests, rewinds)
    return EngineSettings(speculation.cancel, speculation.looks_up, *sequences)


# -- the plan


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model as rank 0 read it before the job: its file may be replaced or removed while the job runs."""

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
    head: DraftHead | None = None  # of a draft, what it reads of the target
    rope_factors: str = ""  # as in `ModelInfo`

    @classmethod
    def of(cls, info: ModelInfo) -> "ModelFile":
        counts, layers = (info.n_bytes, info.n_params, info.n_layer, info.n_embd), info.layers
        sizes = info.quantisation, sizes_of(info), layers.rewinds, layers.window
        return cls(info.path, info.fingerprint, *counts, *sizes, info.states, info.head, info.rope_factors)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The plan of one rank."""

    host: Host
    target: DevicePlan  # of its layers of the target
    draft: DevicePlan  # of drafts
    threads: int
    memory: Memory  # that it will hold
    gpu_bytes: int  # that libllama puts on its GPUs
    samplers: int  # threads beside its stage that choose tokens


@dataclass(frozen=True)
class JobPlan:
    """Models on ranks, as long as they are loaded. `translations`: of each draft's token ids, where they differ from
    the target's. `notes`: about texts that are not exact, or longer than the model was trained for."""

    model: ModelFile
    drafts: tuple[ModelFile, ...]  # in the order of the assignment's
    assignment: Assignment
    ranks: tuple[RankPlan, ...]
    capacity: Capacity
    numerics: NumericsPlan
    engine: EngineSettings  # settings of the engine, unless a request has others
    adapters: tuple[ScaledAdapter, ...] = ()  # of the target, by their headers; the name of the numerics has them too
    translations: tuple[Translation | None, ...] = ()
    max_delay_s: float = 0.0  # limit of the time that open texts wait for a chunk of a prompt; 0, inf: none
    looks_up: bool | None = None  # whether lookup guesses too; None: the policy decides
    couple: bool = True  # drafts share the target's random numbers
    pace: Profile | None = None  # the profile to whose times ranks and links are slowed down
    pace_hash: str = ""  # of what its file says, the same with a draft and without one; empty: no pace
    dilation: float = 1.0  # real seconds that count as one of the profile
    slice_cache: Path | None = None  # directory in which hosts keep slices
    kv_disk: int = 0  # bytes of cells that a rank keeps on its disk; 0: none
    kv_ram: int = 0  # the same in its memory
    kv_bytes: StoredBytes = StoredBytes(0, 0)  # noqa: RUF009 (of its blocks there, where they are largest)
    kv_dir: Path | None = None  # the folder for them; None: in the user's cache
    kv_read_only: bool = False  # nothing is written there
    send_layers: bool = True  # rank 0 sends layers to hosts that lack a file
    prepare_ahead: bool = True
    post_ahead: bool = True
    resumed_numerics: str = ""  # name of the numerics of resumed texts; empty: none is resumed
    fitted: str = ""  # what --fit chose, for a job that goes on from this one; empty: nothing
    unused: tuple[str, ...] = ()  # options without effect, a line each
    notes: tuple[str, ...] = ()

    @property
    def room(self) -> Room | None:
        """For blocks of cells on each rank's disk, or in its memory; None: they are not kept."""
        n_bytes = self.kv_disk or self.kv_ram
        return Room(n_bytes, self.kv_bytes) if n_bytes else None

    @property
    def text_numerics(self) -> str:
        """The name of the numerics of its texts: of resumed texts that with which they began."""
        return self.resumed_numerics or self.numerics.name

    @cached_property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(rank.host for rank in self.ranks)

    @property
    def threads(self) -> tuple[int, ...]:
        return tuple(rank.threads for rank in self.ranks)

    @property
    def memory(self) -> tuple[Memory, ...]:
        return tuple(rank.memory for rank in self.ranks)

    def device(self, rank: int) -> DevicePlan:
        """The devices of a rank's layers: of the target's where it has some, else of a draft's."""
        is_draft = self.assignment.stage_of(rank) is None and bool(self.assignment.drafts_on(rank))
        return self.ranks[rank].draft if is_draft else self.ranks[rank].target

    def describe(self, rank: int) -> str:
        """What the rank has, as messages about it say: `layers 4-7 on RPC0`."""
        text, names = self.assignment.describe(rank), self.device_names(rank)
        return f"{text} on {names}" if names and self.device(rank).uses_gpus else text

    def device_names(self, rank: int) -> str:
        """The devices of its layers, as --device takes them; empty: the user named none, and libllama has none."""
        device, present = self.device(rank), self.hosts[rank].gpu_names
        return device.name or "+".join((device.devices or present) if device.uses_gpus else ())

    def parts(self, rank: int) -> dict[int, StagePlan]:
        """The rank's layers of TARGET, and of drafts by number."""
        index = self.assignment.stage_of(rank)
        target = {} if index is None else {TARGET: self.assignment.stages[index]}
        return target | self.assignment.drafts_on(rank)

    def file(self, number: int) -> ModelFile:
        """The file of a draft of this number, or of TARGET."""
        return self.model if number == TARGET else self.drafts[number]

    @property
    def limits_delay(self) -> bool:
        """Whether chunks of prompts are cut so that open texts wait for a limited time."""
        return 0 < self.max_delay_s < math.inf

    @property
    def n_rows_max(self) -> int:
        """Rows a run carries at most: a chunk of the prompt with the root, or guesses."""
        return max(self.capacity.n_rows, LARGEST if self.numerics.blocks else 0)

    @property
    def layers_read(self) -> tuple[int, ...]:
        """Layers of the target whose outputs the draft reads, ascending."""
        return layers_read(draft.head for draft in self.drafts)

    def largest_input(self, rank: int) -> tuple[int, int]:
        """(rows, width of their activations) of the largest run that a rank other than the head's is sent."""
        drafts = [self.drafts[number] for number in self.assignment.drafts_on(rank)]
        return (self.capacity.n_nodes, drafts[0].n_embd) if drafts else (self.n_rows_max, self.model.n_embd)

    def hop_is_out_of_band(self, source: int | None, dest: int | None) -> bool:
        """Whether activations of this hop go from device to device: between the target's stages that torch computes."""
        ends = [rank for rank in (source, dest) if rank is not None and self.assignment.stage_of(rank) is not None]
        return len(ends) == 2 and all(self.hosts[rank].device_messages for rank in ends)

    @property
    def spare_memory(self) -> list[int | None]:
        """Bytes left to each rank by its host's memory or its own limit; negative: missing; None: no limit is known."""
        return spare_memory(self.hosts, self.memory)

    @property
    def spare_on_gpus(self) -> list[int | None]:
        """The same of its GPUs; None also if it needs none."""
        return spare_on_gpus(self.hosts, [rank.gpu_bytes for rank in self.ranks])

    @property
    def shortage(self) -> int:
        """Bytes that are missing where most are; 0: it fits."""
        spare = [*self.spare_memory, *self.spare_on_gpus]
        return max(0, max((-n_bytes for n_bytes in spare if n_bytes is not None), default=0))

    @property
    def fits(self) -> bool:
        """Whether every host and GPU has the memory that its ranks need."""
        return not self.shortage

    @property
    def crowding(self) -> float:
        """Threads that compute on each core, where they are the most; 1 at least."""
        return crowding(self.hosts, self.assignment.computing, self.threads)

    @property
    def warnings(self) -> list[str]:
        """Warnings, a line each: of speed, and of options without effect."""
        notes = map(translation_note, [draft.path for draft in self.drafts], self.translations)
        untimed = [
            f"layers go by size, not by ranks' speed: rank {rank} ({host.name}) could not be timed: {host.untimed}"
            for rank, host in enumerate(self.hosts)
            if host.untimed
        ]
        paged = paging_lines(self.hosts, self.memory)
        crowded = crowded_hosts(self.hosts, self.assignment.computing, self.threads)
        dilated = [f"texts are timed by --pace: {self.dilation:g} real seconds are one"] * (self.dilation > 1)
        return [*filter(None, notes), *dilated, *untimed, *crowded, *paged, *self.unused, *self.notes]

    @cached_property
    def decisions(self) -> dict[str, Any]:
        """All that decides what is computed, with which bits and where, as plain data that --plan reads."""
        return {
            "model": self.model.fingerprint,
            "drafts": [draft.fingerprint for draft in self.drafts],
            "stages": _spans(self.assignment.stages),
            "draft_stages": [_spans(stages) for stages in self.assignment.drafts],
            "ranks": [
                {
                    "host": rank.host.name,
                    "target": rank.target.decisions,
                    "draft": rank.draft.decisions if self.assignment.drafts_on(number) else None,
                    "threads": rank.threads if rank.host.n_cores else None,
                    "samplers": rank.samplers,
                }
                for number, rank in enumerate(self.ranks)
            ],
            "numerics": json.loads(json.dumps(asdict(self.numerics), default=str)),  # as --plan reads it
            "capacity": asdict(self.capacity),
        }

    @cached_property
    def hash(self) -> str:
        """Of its decisions without hosts' names: the same plan on other hosts has the same hash."""
        nameless = [{name: value for name, value in rank.items() if name != "host"} for rank in self.decisions["ranks"]]
        text = json.dumps(self.decisions | {"ranks": nameless}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:N_DIGITS]


def _spans(stages: Sequence[StagePlan]) -> list[list[int]]:
    return [[stage.rank, stage.first, stage.last] for stage in stages]


def check_memory(plan: JobPlan, way_out: str) -> None:
    """Raises UserError when a host or a GPU lacks the memory that its ranks need."""
    check_fits(plan.hosts, plan.memory, way_out)
    check_gpus(plan.hosts, [rank.gpu_bytes for rank in plan.ranks], way_out)


def sizes_of(info: ModelInfo) -> Sizes:
    return Sizes(info.layer_bytes, info.output_bytes, info.layers.faults)
