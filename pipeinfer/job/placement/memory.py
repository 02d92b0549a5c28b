"""The memory that ranks will hold: models, contexts, buffers; and the room that is left for stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import NamedTuple

from pipeinfer.cluster.assignment import Assignment, Stages
from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.hosts.free_memory import Memory, check_fits, free_memory
from pipeinfer.cluster.hosts.gpu_memory import left_on_gpus
from pipeinfer.cluster.spread import StageRoom
from pipeinfer.cluster.stages.samplers import N_BUFFERS
from pipeinfer.core.kv.blocks import LARGEST
from pipeinfer.job.placement.capacity import CELLS_PADDING, Capacity
from pipeinfer.job.placement.devices import DevicePlan, RankDevices
from pipeinfer.job.placement.numerics import NumericsPlan
from pipeinfer.job.placement.torch_memory import torch_memory
from pipeinfer.models.gguf.cache_types import F16_CACHE, CacheTypes
from pipeinfer.models.gguf.head import layers_read
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.gguf.slice import slice_bytes
from pipeinfer.models.heads.head_drafter import N_KEPT
from pipeinfer.models.llama.buffers import buffer_bytes
from pipeinfer.models.llama.params import GROUP_CELLS, in_whole_groups, rows_in_groups
from pipeinfer.models.llama.prefill import N_SEQ, STATE_CELLS

N_SPARE_STATES = 2  # of sequences beside those of requests
N_MESSAGES = 4  # on their way in and out of a rank at a time
TOKEN_BYTES, MERGE_BYTES = 250, 200  # of a vocabulary, on rank 0 (measured)
HEAD_BYTES = 4_000_000  # what rank 0 imports besides (measured)

_slice_bytes = lru_cache(maxsize=1 << 16)(slice_bytes)
"""A planner that looks for ways out asks again and again."""


@dataclass(frozen=True)
class MemoryNeeds:
    """What a target and its drafts take of ranks' memory.

    drafts       the smallest first
    devices      of each rank
    n_in_blocks  rows of a prompt in blocks
    lacks        of each rank, the models whose files are not on its host, as far as that is known
    in_cache     slices are kept on disks
    has_samplers threads may choose tokens beside the last stage
    """

    info: ModelInfo
    drafts: Sequence[ModelInfo]
    capacity: Capacity
    numerics: NumericsPlan
    devices: Sequence[RankDevices]
    n_in_blocks: int
    lacks: Sequence[frozenset[str]] = ()
    in_cache: bool = False
    has_samplers: bool = False

    def of_ranks(self, assignment: Assignment) -> tuple[Memory, ...]:
        """Of every rank."""
        found = self._with_drafts(assignment.n_ranks, assignment.drafts)
        for stage in assignment.stages:
            found[stage.rank] += self.of_stage(self._computed_by(stage.rank), stage.first, stage.last)
        return tuple(found)

    def on_gpus(self, assignment: Assignment) -> tuple[int, ...]:
        """Bytes that libllama puts on each rank's GPUs, without the driver's and without torch's."""
        return tuple(self._on_gpus(assignment.n_ranks, (*assignment.drafts, assignment.stages)))

    def _on_gpus(self, n_ranks: int, placed: Sequence[Stages]) -> list[int]:
        """The same of the models that have their ranks: the drafts, the smallest first, and then the target."""
        found = [0] * n_ranks
        for number, stages in enumerate(placed):
            for stage in stages:
                by = self._computed_by(stage.rank, number < len(self.drafts))
                found[stage.rank] += self._of_gpu(number, by, stage.first, stage.last)
        return found

    def _of_gpu(self, number: int, by: Computed, first: int, last: int) -> int:
        """Of layers [first, last) of a draft, or of the target, whose number comes after theirs."""
        if not by.device.uses_gpus:
            return 0
        is_draft, capacity = number < len(self.drafts), self.capacity
        info, n_rows = (self.drafts[number], capacity.n_guess_rows) if is_draft else (self.info, capacity.n_rows)
        types = self.numerics.draft_cache if is_draft else self.numerics.cache
        n_on_gpu = by.device.n_gpu_layers
        return gpu_bytes(info, first, last, capacity.n_cells, n_rows, self._n_outputs, n_on_gpu, types)

    def room(self, hosts: Sequence[Host], placed: Sequence[Stages], ranks: Sequence[int]) -> StageRoom:
        """What is left on `ranks`, one host a rank, for the next draft, or for the target after all drafts."""
        number, besides = len(placed), self._with_drafts(len(hosts), placed)
        left = {host.name: min(other.memory.host for other in hosts if other.name == host.name) for host in hosts}
        for rank, host in enumerate(hosts):
            left[host.name] -= 0 if rank in ranks else besides[rank].needed
        by = [self._computed_by(rank, number < len(self.drafts)) for rank in ranks]
        placed_there = self._on_gpus(len(hosts), placed)
        gpus, left_there = left_on_gpus(hosts, ranks, placed_there)
        memory = cache(partial(self.of_draft, number) if number < len(self.drafts) else self.of_stage)
        return StageRoom(
            needed=lambda stage, first, last: (besides[ranks[stage]] + memory(by[stage], first, last)).needed,
            hosts=tuple(hosts[rank].name for rank in ranks),
            left=left | left_there,
            own=tuple(hosts[rank].memory.own for rank in ranks),
            on_gpus=lambda stage, first, last: (
                placed_there[ranks[stage]] + self._of_gpu(number, by[stage], first, last)
            ),
            gpus=gpus,
        )

    def _with_drafts(self, n_ranks: int, placed: Sequence[Stages]) -> list[Memory]:
        """The memory of every rank without the layers that are not placed yet."""
        row_bytes = (4 + 2 * len(self.layers_read)) * self.info.n_embd  # activations, and features in bf16
        found = [Memory(buffers=N_MESSAGES * row_bytes * self.capacity.n_rows)] * n_ranks
        # drafts' vocabularies are freed before weights are loaded
        found[0] += Memory(buffers=HEAD_BYTES + vocabulary_bytes(self.info))
        n_features = len(self.layers_read) * self.info.n_embd  # of a token; the draft keeps some
        found[0] += Memory(buffers=4 * n_features * min(self.capacity.n_cells, N_KEPT))
        for number, stages in enumerate(placed):
            for stage in stages:
                found[stage.rank] += self.of_draft(number, self._computed_by(stage.rank, True), stage.first, stage.last)
        return found

    def _computed_by(self, rank: int, is_draft: bool = False) -> Computed:
        lacks = self.lacks[rank] if self.lacks else frozenset[str]()
        return Computed(self.devices[rank].draft if is_draft else self.devices[rank].target, lacks)

    def of_draft(self, number: int, by: Computed, first: int, last: int) -> Memory:
        """Of layers [first, last) of a draft."""
        draft, types = self.drafts[number], self.numerics.draft_cache
        is_cut = last - first < draft.n_layer
        n_rows = self.capacity.n_guess_rows
        messages = Memory(buffers=N_MESSAGES * 4 * n_rows * draft.n_embd if is_cut else 0)
        return messages + self._of_layers(draft, by, first, last, n_rows, exact=False, types=types)

    def of_stage(self, by: Computed, first: int, last: int) -> Memory:
        """Of layers [first, last) of the target."""
        info, capacity, numerics = self.info, self.capacity, self.numerics
        found = self._of_layers(info, by, first, last, capacity.n_rows, numerics.exact, numerics.cache)
        n_read = sum(first <= layer < last for layer in self.layers_read)
        found += Memory(buffers=4 * n_read * capacity.n_rows * info.n_embd)
        if last == info.n_layer and self.has_samplers:
            found += Memory(buffers=N_BUFFERS * 4 * self._n_outputs * info.n_vocab)
        if by.device.is_torch:
            return found
        if rows_in_groups(numerics.repacked):
            found += Memory(kv=GROUP_CELLS * sum(info.kv_bytes_per_cell[first:last]))
        if not info.layers.rewinds:
            n_states = capacity.n_target_seq + N_SPARE_STATES
            return found + Memory(kv=n_states * sum(info.layers.state_bytes[first:last]))
        if self.n_in_blocks:
            n_prompts = capacity.n_prompts
            # prompts that are read at a time have as many rows together as the cache has cells at most
            n_rows = min(n_prompts * self.n_in_blocks, max(self.n_in_blocks, capacity.n_cells))
            found += prefill_memory(info, first, last, n_prompts, n_rows, capacity.n_rows)
        return found

    def _of_layers(
        self, info: ModelInfo, by: Computed, first: int, last: int, n_rows: int, exact: bool, types: CacheTypes
    ) -> Memory:
        """Of layers [first, last) with one context for runs of up to `n_rows`."""
        in_file = self.in_cache
        is_sent = str(info.path) in by.lacks and not in_file  # by rank 0, and there is no cache to keep it in
        # a first stage looks tokens up in the model's file where there is one
        table = Memory(weights=info.input_bytes if first == 0 and last < info.n_layer and is_sent else 0)
        sizes, numerics = (self.capacity.n_cells, n_rows, self._n_outputs), self.numerics
        if by.device.is_torch:
            return table + torch_memory(info, first, last, *sizes, by.device.backend, in_file, is_sent)
        n_on_gpu, mapped = by.device.n_gpu_layers, not numerics.repack or (exact and not numerics.repacked)
        return table + slice_memory(info, first, last, *sizes, exact, in_file, n_on_gpu, is_sent, types, mapped)

    @property
    def _n_outputs(self) -> int:
        """Rows of a run that may want logits."""
        n_outputs = self.capacity.n_outputs
        return in_whole_groups(n_outputs) if rows_in_groups(self.numerics.repacked) else n_outputs

    @property
    def layers_read(self) -> tuple[int, ...]:
        """Of the target, by a draft."""
        return layers_read(draft.head for draft in self.drafts)


class Computed(NamedTuple):
    """The devices of a rank's layers. `lacks`: models without a file there."""

    device: DevicePlan
    lacks: frozenset[str] = frozenset()


def vocabulary_bytes(info: ModelInfo) -> int:
    """Of a loaded vocabulary."""
    merges = info.metadata.get("tokenizer.ggml.merges")
    return TOKEN_BYTES * info.n_vocab + MERGE_BYTES * (merges.n_items if merges else 0)


def check_alone(models: Sequence[tuple[ModelInfo, bool]], n_cells: int, n_rows: int) -> None:
    """Raises UserError when this host has no memory for whole models, each (model, exact), in this process."""
    total = Memory()
    for info, exact in models:
        total += slice_memory(info, 0, info.n_layer, n_cells, n_rows, n_rows, exact, in_file=True)
    check_fits(["this host"], [free_memory()], [total], "use a smaller -n")


def prefill_memory(info: ModelInfo, first: int, last: int, n_prompts: int, n_in_blocks: int, n_rows: int) -> Memory:
    """Of the contexts of so many prompts with `n_in_blocks` rows together, beside the other, and of the cells of a run
    of `n_rows` on their way from one to the other."""
    n_padded = n_in_blocks + (n_prompts - 1) * (CELLS_PADDING - 1)  # each is
    n_cells = -(-n_padded // CELLS_PADDING) * CELLS_PADDING
    cell_bytes = sum(info.kv_bytes_per_cell[first:last])
    one = buffer_bytes(info, last == info.n_layer, n_cells // n_prompts, LARGEST, N_SEQ)
    return Memory(kv=n_cells * cell_bytes, buffers=n_prompts * one + min(n_cells, n_rows) * cell_bytes)


def packing_bytes(info: ModelInfo, first: int, last: int, n_cells: int) -> int:
    """Of the copy through which tombstoned cells are won back: of some cells, or of a sequence with its state."""
    n_copied = n_cells if not info.layers.rewinds else min(n_cells, STATE_CELLS)
    return n_copied * sum(info.kv_bytes_per_cell[first:last]) + sum(info.layers.state_bytes[first:last])


def gpu_bytes(
    info: ModelInfo, first: int, last: int, n_cells: int, n_rows: int, n_outputs: int, n_on_gpu: int, cache: CacheTypes
) -> int:
    """Bytes on a GPU that has the last `n_on_gpu` of layers [first, last), all if negative: weights, KV and buffers."""
    on_gpu = slice(_first_on_gpu(first, last, n_on_gpu), last)
    has_head = last == info.n_layer and not 0 <= n_on_gpu <= last - first
    weights = sum(info.layer_bytes[on_gpu]) + (info.output_bytes if has_head else 0)
    kv = n_cells * sum(cache.cell_bytes(info.kv_shapes[on_gpu]))
    return weights + kv + buffer_bytes(info, has_head, n_cells, n_rows, n_outputs)


def _first_on_gpu(first: int, last: int, n_on_gpu: int) -> int:
    """Of layers [first, last), the last `n_on_gpu` of which are there, all if negative."""
    return first if n_on_gpu < 0 else max(first, last - n_on_gpu)


def slice_memory(
    info: ModelInfo, first: int, last: int, n_cells: int, n_rows: int, n_outputs: int, exact: bool, in_file: bool,
    n_on_gpu: int = 0, is_sent: bool = False, cache: CacheTypes = F16_CACHE, mapped: bool | None = None,
) -> Memory:  # fmt: skip
    """Of layers [first, last) with one context. `in_file`: mapped from a disk. `is_sent`: the whole model is in
    memory. `mapped`: the weights are not repacked; None: with `exact` they are not."""
    is_whole, is_last = (first, last) == (0, info.n_layer), last == info.n_layer
    is_file = is_whole and not info.borrowed
    in_file = in_file or (is_file and not is_sent)
    weights = info.n_bytes if is_file else _slice_bytes(info, first, last)
    is_mapped = exact if mapped is None else mapped
    n_mapped = weights if is_mapped and in_file else 0
    # read weights are laid out anew, and a table that is also the output head is there in both forms
    head_again = 0 if is_mapped or not is_last or (is_whole and not info.tied) else info.input_bytes
    on_host = slice(first, _first_on_gpu(first, last, n_on_gpu))
    return Memory(
        weights=weights - n_mapped + head_again,
        mapped=n_mapped,
        kv=n_cells * sum(cache.cell_bytes(info.kv_shapes[on_host])),
        buffers=buffer_bytes(info, is_last, n_cells, n_rows, n_outputs)
        + (packing_bytes(info, first, last, n_cells) if exact else 0),
        # weights that are not mapped are read out of the slice, which is let go when they are
        loading=0 if is_mapped or in_file else weights,
    )
