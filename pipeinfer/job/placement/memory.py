"""The memory of ranks: models, contexts, buffers; and the room for further stages. Loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

from pipeinfer.cluster.assignment import Assignment, StagePlan, Stages
from pipeinfer.cluster.hosts.host import Host
from pipeinfer.cluster.hosts.resources import MPI_BYTES, Memory, left_on_gpus
from pipeinfer.cluster.spread import StageRoom
from pipeinfer.cluster.stages.cell_store import HEADER, ID_BYTES, WAITING_BYTES
from pipeinfer.cluster.stages.runs import N_BUFFERS
from pipeinfer.core.blocks import LARGEST
from pipeinfer.core.stored_blocks import StoredBytes
from pipeinfer.job.placement.devices import DevicePlan, RankDevices
from pipeinfer.job.placement.job_plan import CELLS_PADDING, Capacity
from pipeinfer.job.placement.numerics import NumericsPlan
from pipeinfer.models.drafts.model_drafter import N_UNREAD
from pipeinfer.models.gguf.layers import F16_CACHE, CacheTypes
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of, layers_read
from pipeinfer.models.gguf.slice import last_table_bytes, slice_bytes
from pipeinfer.models.llama.cell_state import STATE_CELLS, state_bytes
from pipeinfer.models.llama.params import (
    GROUP_CELLS,
    buffer_bytes,
    feed_forward_length,
    graph_bytes,
    in_whole_groups,
    may_lay_out,
    rows_in_groups,
)
from pipeinfer.models.llama.prefill import N_SEQ
from pipeinfer.models.torch.params import AUTO, BF16, CACHE_BYTES, CPU, F32, HEAD_BYTES, INT4, WEIGHT_BYTES

N_SPARE_STATES = 2  # of sequences beside those of requests
N_MESSAGES = 4  # on their way in and out of a rank at a time
TOKEN_BYTES, MERGE_BYTES, EMPTY_TOKEN_BYTES = 250, 150, 40  # of a vocabulary (measured); slices have empty tokens
RANK_0_BYTES = 3_000_000  # of modules that rank 0 alone imports (measured)
TORCH_BYTES = 286_000_000  # of Python, MPI, libllama and torch's build for CPUs on a rank without a model (measured)
N_WIDE = 6  # intermediate results of a row, as gates and up projections, that torch holds at a time

Place = tuple[DevicePlan, frozenset[str]]  # the devices of a rank's layers, and the models without a file there

_slice_bytes = lru_cache(maxsize=1 << 16)(slice_bytes)  # a planner that looks for ways out asks again and again


@dataclass(frozen=True)
class MemoryNeeds:
    """The memory that a target and its drafts need of ranks. `lacks`: of each rank, the models whose files are not on
    its host, as far as that is known. `has_samplers`: threads may choose tokens beside the last stage."""

    info: ModelInfo
    drafts: Sequence[ModelInfo]  # the smallest first
    capacity: Capacity
    numerics: NumericsPlan
    devices: Sequence[RankDevices]  # of each rank
    n_in_blocks: int  # rows of a prompt in blocks
    lacks: Sequence[frozenset[str]] = ()
    in_cache: bool = False  # slices are kept on disks
    has_samplers: bool = False
    adapter_bytes: Sequence[int] = ()  # of each layer of the target; empty: it has no adapters
    stores: bool = False  # the target's cells go to disks, or stay in memory
    kv_ram: int = 0  # bytes of these

    def of_ranks(self, assignment: Assignment) -> tuple[Memory, ...]:
        return tuple(self._of_ranks(assignment.n_ranks, (*assignment.drafts, assignment.stages)))

    def on_gpus(self, assignment: Assignment) -> tuple[int, ...]:
        """Bytes that libllama puts on each rank's GPUs, without the driver's and without torch's."""
        return tuple(self._on_gpus(assignment.n_ranks, (*assignment.drafts, assignment.stages)))

    def room(self, hosts: Sequence[Host], placed: Sequence[Stages], ranks: Sequence[int]) -> StageRoom:
        """The room on `ranks`, one host a rank, for the next draft, or for the target after all drafts."""
        number, needs = len(placed), self._of_ranks(len(hosts), placed)
        free = {host.name: min(other.memory.host for other in hosts if other.name == host.name) for host in hosts}
        for rank, host in enumerate(hosts):
            free[host.name] -= 0 if rank in ranks else needs[rank].needed
        places = [self._place(number, rank) for rank in ranks]
        on_gpus = self._on_gpus(len(hosts), placed)
        gpus, free_on_gpus = left_on_gpus(hosts, ranks, on_gpus)

        @cache
        def needed(stage: int, first: int, last: int) -> int:
            return (needs[ranks[stage]] + self._of_layers(number, places[stage], first, last)).needed

        @cache
        def gpu_bytes(stage: int, first: int, last: int) -> int:
            return on_gpus[ranks[stage]] + self._layers(number, places[stage], first, last).gpu_bytes

        return StageRoom(
            needed=needed,
            hosts=tuple(hosts[rank].name for rank in ranks),
            free=free | free_on_gpus,
            limits=tuple(hosts[rank].memory.process for rank in ranks),
            on_gpus=gpu_bytes,
            gpus=gpus,
        )

    def _of_ranks(self, n_ranks: int, placed: Sequence[Stages]) -> list[Memory]:
        """Of every rank with the models that have their ranks: the drafts, the smallest first, and then the target."""
        row_bytes = (4 + 2 * len(self.layers_read)) * self.info.n_embd  # activations, and features in bf16
        with_others = MPI_BYTES + N_MESSAGES * row_bytes * self.capacity.n_rows
        needs = [Memory(buffers=with_others if n_ranks > 1 else 0)] * n_ranks
        needs[0] += Memory(loading=sum(self.adapter_bytes))  # of all ranks
        # drafts' vocabularies are freed before weights are loaded; the target's has memory in which its texts were read
        needs[0] += Memory(buffers=RANK_0_BYTES + vocabulary_bytes(self.info) * 3 // 4)
        n_features = len(self.layers_read) * self.info.n_embd  # of a token; the draft keeps some
        needs[0] += Memory(buffers=4 * n_features * min(self.capacity.n_cells, N_UNREAD))
        for number, stages in enumerate(placed):
            for stage in stages:
                needs[stage.rank] += self._of_layers(number, self._place(number, stage.rank), stage.first, stage.last)
        return needs

    def _on_gpus(self, n_ranks: int, placed: Sequence[Stages]) -> list[int]:
        n_bytes = [0] * n_ranks
        for number, stage in [(number, stage) for number, stages in enumerate(placed) for stage in stages]:
            layers = self._layers(number, self._place(number, stage.rank), stage.first, stage.last)
            n_bytes[stage.rank] += layers.gpu_bytes
        return n_bytes

    def _place(self, number: int, rank: int) -> Place:
        """Where a rank has layers of a draft, or of the target, whose number comes after theirs."""
        devices = self.devices[rank]
        lacks = self.lacks[rank] if self.lacks else frozenset[str]()
        return devices.draft if number < len(self.drafts) else devices.target, lacks

    def _layers(self, number: int, place: Place, first: int, last: int) -> Layers:
        """Layers [first, last) of that model, in one context."""
        numerics, capacity, is_draft = self.numerics, self.capacity, number < len(self.drafts)
        info, exact = self.drafts[number] if is_draft else self.info, self.numerics.exact and not is_draft
        (device, lacks), n_rows = place, capacity.n_guess_rows if is_draft else capacity.n_rows
        is_mapped = not may_lay_out(info, numerics.repack, exact, numerics.repacked)
        is_sent, at_once = str(info.path) in lacks and not self.in_cache, 0 if is_draft else numerics.at_once
        n_wanted = n_rows if is_draft else self._in_groups(capacity.n_nodes + 1)
        # with states blocks are evaluated in the same context, and those of a prompt that is scored want all logits
        n_least = LARGEST if numerics.blocks and not info.layers.rewinds and not is_draft else 0
        numbers = first, last, capacity.n_cells, n_rows, max(self._n_outputs, n_least), max(n_wanted, n_least)
        types = numerics.draft_cache if is_draft else numerics.cache
        adapters = () if is_draft else self.adapter_bytes
        return Layers(info, *numbers, device, exact, types, is_mapped, self.in_cache, is_sent, at_once, adapters)

    def _of_layers(self, number: int, place: Place, first: int, last: int) -> Memory:
        """Of layers [first, last) of that model, with everything that they have beside their context."""
        layers, capacity, numerics = self._layers(number, place, first, last), self.capacity, self.numerics
        info, needs = layers.info, layers.memory
        # a first stage looks tokens up in the model's file where there is one
        needs += Memory(weights=info.input_bytes if first == 0 and not layers.is_last and layers.is_sent else 0)
        if number < len(self.drafts):
            is_cut = last - first < info.n_layer
            return needs + Memory(buffers=N_MESSAGES * 4 * layers.n_rows * info.n_embd if is_cut else 0)
        n_read = sum(first <= layer < last for layer in self.layers_read)
        needs += Memory(buffers=4 * n_read * capacity.n_rows * info.n_embd)
        if layers.is_last and self.has_samplers:
            needs += Memory(buffers=N_BUFFERS * 4 * self._n_outputs * info.n_vocab)
        if layers.device.is_torch:
            return needs
        if self.stores:  # what waits to be written, and a text that is read back
            states = sum(info.layers.state_bytes[first:last])
            n_most = WAITING_BYTES + LARGEST * layers.cell_bytes + states  # it is exceeded by a block
            n_waiting = min(n_most, capacity.n_cells * layers.cell_bytes + states)
            needs += Memory(buffers=self.kv_ram + n_waiting + capacity.n_ctx * layers.cell_bytes + states)
        if rows_in_groups(numerics.repacked):
            needs += Memory(kv=GROUP_CELLS * info.cell_bytes(first, last))
        if not info.layers.rewinds:
            n_states = capacity.n_target_seq + N_SPARE_STATES
            return needs + Memory(kv=n_states * sum(info.layers.state_bytes[first:last]))
        if self.n_in_blocks:
            n_prompts = capacity.n_prompts
            # prompts that are read at a time have as many rows together as the cache has cells at most
            n_rows = min(n_prompts * self.n_in_blocks, max(self.n_in_blocks, capacity.n_cells))
            needs += prefill_memory(info, first, last, n_prompts, n_rows, capacity.n_rows)
        return needs

    @cached_property
    def _n_outputs(self) -> int:
        return self._in_groups(self.capacity.n_outputs)

    def _in_groups(self, n_rows: int) -> int:
        group = rows_in_groups(self.numerics.repacked)
        return in_whole_groups(n_rows, group) if group else n_rows

    @cached_property
    def layers_read(self) -> tuple[int, ...]:
        return layers_read(draft.head for draft in self.drafts)


class Layers(NamedTuple):
    """Layers [first, last) of a model; its context holds runs of `n_rows`, `n_wanted` logits, room for `n_outputs`."""

    info: ModelInfo
    first: int
    last: int
    n_cells: int
    n_rows: int
    n_outputs: int
    n_wanted: int
    device: DevicePlan = DevicePlan()
    exact: bool = True
    cache: CacheTypes = F16_CACHE
    is_mapped: bool = True  # the weights are not repacked
    in_file: bool = True  # the slice is on a disk, even if it is not the whole model
    is_sent: bool = False  # rank 0 sends the layers, and nothing keeps them
    at_once: int = 0  # rows that are computed at once, if they come in parts
    adapter_bytes: Sequence[int] = ()  # of each layer of the model

    @property
    def is_last(self) -> bool:
        return self.last == self.info.n_layer

    @property
    def is_whole(self) -> bool:
        return self.first == 0 and self.is_last

    @property
    def n_on_gpu(self) -> int:
        """Layers on a GPU, which are the last ones."""
        return self.device.n_on_gpus(self.last - self.first)

    @property
    def cell_bytes(self) -> int:
        """Of one cell of all layers."""
        return self.info.cell_bytes(self.first, self.last, self.cache)

    @property
    def memory(self) -> Memory:
        return self._torch_memory if self.device.is_torch else self._llama_memory

    @property
    def gpu_bytes(self) -> int:
        """Bytes that libllama puts on a GPU: weights, KV and buffers."""
        if not self.device.uses_gpus:
            return 0
        info, first = self.info, self.last - self.n_on_gpu
        kv = self.n_cells * info.cell_bytes(first, self.last, self.cache) + sum(self.adapter_bytes[first : self.last])
        moves_all = self.device.places.moves_experts(self.last - self.first - 1)
        numbers = self.n_cells, min(self.n_rows, self.at_once or self.n_rows), self.n_outputs, not moves_all
        return self._gpu_weights + kv + graph_bytes(info, self._has_gpu_head, *numbers)

    @property
    def _has_gpu_head(self) -> bool:
        return self.is_last and not 0 <= self.device.n_gpu_layers <= self.last - self.first

    @property
    def _gpu_weights(self) -> int:
        """Bytes of the model's weights that libllama puts on a GPU."""
        layers = self.info, self.first, self.last, self.n_on_gpu, self._has_gpu_head
        return self.device.places.gpu_bytes(*layers) if self.device.uses_gpus else 0

    @property
    def _llama_memory(self) -> Memory:
        info, first, last = self.info, self.first, self.last
        is_file = self.is_whole and not info.borrowed
        in_file = self.in_file or (is_file and not self.is_sent)
        weights = info.n_bytes if is_file else _slice_bytes(info, first, last)
        # read weights are laid out anew, and a table that is also the output head is there in both forms
        has_head_again = not self.is_mapped and self.is_last and (info.tied or not self.is_whole)
        adapters = sum(self.adapter_bytes[first:last])
        has_twice = self.exact and self.device.n_gpu_layers == 0  # a context for rows, another for blocks
        n_adapters = 2 * adapters if has_twice else sum(self.adapter_bytes[first : last - self.n_on_gpu])
        rest = max(0, weights - self._gpu_weights)  # what goes to a GPU is read piece by piece
        n_mapped = rest if self.is_mapped and in_file else 0
        stays = self.is_mapped and not in_file and self.n_on_gpu < last - first  # a slice in memory that is mapped
        n_held = weights if stays else rest - n_mapped
        return Memory(
            weights=n_held + n_adapters + (last_table_bytes(info) if has_head_again else 0),
            mapped=n_mapped,
            kv=self.n_cells * info.cell_bytes(first, last - self.n_on_gpu, self.cache),
            buffers=buffer_bytes(info, self.is_last, self.n_cells, self.n_rows, self.n_outputs, self.n_wanted)
            + (vocabulary_bytes(info) if is_file else EMPTY_TOKEN_BYTES * info.n_vocab * self.is_last)
            + (packing_bytes(info, first, last, self.n_cells) if self.exact or info.layers.window else 0),
            # what is read out of a slice in memory is there twice, what goes to a GPU once
            loading=2 * adapters + (0 if in_file else weights - n_held if self.is_mapped else weights),
        )

    @property
    def _torch_memory(self) -> Memory:
        """Without what a GPU holds; `auto` may be on one, and is taken to be on none."""
        info, first, last, backend = self.info, self.first, self.last, self.device.backend
        dtype = F32 if backend.dtype == AUTO and not backend.wants_gpu else backend.dtype.replace(AUTO, BF16)
        n_bytes = CACHE_BYTES[dtype]
        loading = 0 if self.in_file or self.is_whole else slice_bytes(info, first, last)
        model = info.n_bytes * (self.is_whole and self.is_sent)  # stays, for its tokens
        if backend.wants_gpu:
            return Memory(weights=model, runtime=TORCH_BYTES, loading=loading)
        rows = 4 * self.n_rows * (N_WIDE * feed_forward_length(info) + N_WIDE * info.n_embd)
        logits = 2 * 4 * self.n_outputs * info.n_vocab if self.is_last else 0
        mask = 4 * self.n_rows * self.n_cells * _group(info)  # of each query head of a key head, what its rows see
        # keys and values of one layer are gathered in the order of positions
        gathered = self.n_cells * n_bytes // 2 * max(info.kv_bytes_per_cell[first:last])
        return Memory(
            weights=model + weight_bytes(info, first, last, dtype),
            kv=self.n_cells * n_bytes // 2 * info.cell_bytes(first, last),
            buffers=rows + logits + mask + gathered,
            loading=loading,
            runtime=TORCH_BYTES,
        )


def vocabulary_bytes(info: ModelInfo) -> int:
    """Of a loaded vocabulary."""
    merges = info.metadata.get("tokenizer.ggml.merges")
    return TOKEN_BYTES * info.n_vocab + MERGE_BYTES * (merges.n_items if merges else 0)


def prefill_memory(info: ModelInfo, first: int, last: int, n_prompts: int, n_in_blocks: int, n_rows: int) -> Memory:
    """The memory of a context for each of `n_prompts` prompts in blocks, with `n_in_blocks` rows together, and of the
    cells of a run of `n_rows` on their way to the main context."""
    n_padded = n_in_blocks + (n_prompts - 1) * (CELLS_PADDING - 1)  # each prompt's cells are padded
    n_cells = -(-n_padded // CELLS_PADDING) * CELLS_PADDING
    cell_bytes = info.cell_bytes(first, last)
    one = buffer_bytes(info, last == info.n_layer, n_cells // n_prompts, LARGEST, N_SEQ, N_SEQ)
    return Memory(kv=n_cells * cell_bytes, buffers=n_prompts * one + min(n_cells, n_rows) * cell_bytes)


def packing_bytes(info: ModelInfo, first: int, last: int, n_cells: int) -> int:
    """Bytes of the copy through which parked cells are freed: of some cells, or of a sequence with its state."""
    n_copied = n_cells if not info.layers.rewinds else min(n_cells, STATE_CELLS)
    return n_copied * info.cell_bytes(first, last) + sum(info.layers.state_bytes[first:last])


def stored_bytes(info: ModelInfo, cache: CacheTypes, stages: Sequence[StagePlan]) -> StoredBytes:
    """Of blocks that stages keep, where they are largest."""
    layers = [(stage.first, stage.last) for stage in stages]
    sizes = [state_bytes(last - first, info.cell_bytes(first, last, cache)) for first, last in layers]
    block, row = map(max, zip(*sizes, strict=True))
    return StoredBytes(HEADER.size + block, ID_BYTES + row)


@lru_cache(maxsize=1 << 16)
def weight_bytes(info: ModelInfo, first: int, last: int, dtype: str, device: str = CPU) -> int:
    """Bytes of torch's weights of layers [first, last), with the output head and norm on the last slice."""
    n_elements = sum(
        tensor.n_elements
        for tensor in info.tensors
        if (layer := layer_of(tensor.name)) is not None and first <= layer < last
    )
    head = info.tensor("token_embd.weight" if info.tied else "output.weight")
    n_head = head.n_elements if head is not None and last == info.n_layer else 0
    # on a GPU there is no kernel for a head in 8 bits
    head_bytes = HEAD_BYTES[BF16 if dtype == INT4 and device != CPU else dtype]
    return int(n_elements * WEIGHT_BYTES[dtype] + n_head * head_bytes)


def _group(info: ModelInfo) -> int:
    heads = info.layers.of_layers("attention.head_count", 1)[0]
    heads_kv = info.layers.of_layers("attention.head_count_kv", heads if isinstance(heads, int) else 1)[0]
    return max(1, heads // max(1, heads_kv)) if isinstance(heads, int) and isinstance(heads_kv, int) else 1
