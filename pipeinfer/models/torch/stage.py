"""A StageModel on PyTorch: a slice of layers of the llama family, on a CPU or a GPU. Knows no MPI and no tokenizer."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import ModelFault, UserError
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.llama.check_result import check_result
from pipeinfer.models.llama.loading import token_table
from pipeinfer.models.llama.parts import blocks_of
from pipeinfer.models.llama.threads import ThreadShare
from pipeinfer.models.torch.attention import BlockOfPrompt, BySequence, InOrder, MaskedCells, RowByRow, Seen
from pipeinfer.models.torch.begun import BegunRun
from pipeinfer.models.torch.cells import CellTable
from pipeinfer.models.torch.device_queue import DeviceQueue, Mark
from pipeinfer.models.torch.device_rows import OwnDeviceRows
from pipeinfer.models.torch.experts import runs_without_waiting
from pipeinfer.models.torch.groups import in_groups, rows_together
from pipeinfer.models.torch.hyperparameters import read_hyperparameters
from pipeinfer.models.torch.layer import Layer, Matrix
from pipeinfer.models.torch.params import AUTO, BF16, CPU, CUDA, F32, INT4, INT8, TorchParams
from pipeinfer.models.torch.quantised.int4 import check_device
from pipeinfer.models.torch.replays import Inputs, Replays
from pipeinfer.models.torch.results import OnDevice, OnHost, Result
from pipeinfer.models.torch.rope import RopeTable
from pipeinfer.models.torch.weights import Weights

MORE_ROOM = "use a smaller context (-c), fewer rows (-b) or more ranks"
CACHE_TYPES = {F32: torch.float32, BF16: torch.bfloat16, INT8: torch.bfloat16, INT4: torch.bfloat16}

TENSORS = {F32: torch.float32, BF16: torch.bfloat16}
"""Of weights that are kept as such."""

MOST_EXACT = 8 * 8192
"""Rows times cells of a run that is recorded with exact numerics, whose attention goes cell block by cell block."""

WIRE_TYPES = (torch.float32, torch.bfloat16)
"""What activations travel as from device to device, by whether they are rounded."""


def never() -> bool:
    return False


class TorchStage:
    """Layers [first, last) with their KV cache. A whole model is the stage that is both first and last."""

    def __init__(self, slice_file: SliceFile, params: TorchParams) -> None:
        """Load the slice and close its file. Raises UserError when this is no model for torch or the device is not
        there."""
        try:
            with torch.inference_mode():
                self._open(slice_file, params)
        except torch.OutOfMemoryError:
            raise UserError(f"no room on {self.device} for {self._where} with {params.n_cells} KV cells; "
                            f"{MORE_ROOM}") from None  # fmt: skip
        finally:
            slice_file.close()

    def _open(self, slice_file: SliceFile, params: TorchParams) -> None:
        info, self.params = slice_file.info, params
        self.is_first, self.is_last = slice_file.is_first, slice_file.is_last
        self.n_embd, self.n_vocab, self.n_cells = info.n_embd, info.n_vocab, params.n_cells
        self._where = f"layers {slice_file.first}-{slice_file.last - 1} of {info.path}"
        self._n_layer = slice_file.last - slice_file.first
        self._numbers = numbers = read_hyperparameters(info)
        self._n_group = numbers.n_head // numbers.n_head_kv  # query heads of a key head
        self.device = find_device(params.device, params.local_rank)
        self.dtype = BF16 if params.dtype == AUTO and self.device.type == CUDA else params.dtype.replace(AUTO, F32)
        if self.dtype == INT4:
            check_device(self.device)
        self._queue = DeviceQueue(self.device)
        if self.device.type == CUDA:
            torch.cuda.set_device(self.device)  # MPI moves a device's memory by the current one's means
        self._exact, is_cpu = params.exact, self.device.type == CPU
        self._in_order = self._exact and (params.padded or not is_cpu)
        self.threads = ThreadShare(params.n_threads)
        self._cells = CellTable(params.n_cells, params.n_seq_max)
        may_go_at_once = numbers.n_expert_used and not self._exact and (params.padded or not is_cpu)
        self._experts_at_once = (
            bool(may_go_at_once) and self.dtype in TENSORS and runs_without_waiting(self.device, TENSORS[self.dtype])
        )
        self._load(slice_file)
        # one more cell, for rows that fill up a run
        size = (2 * numbers.n_head_kv, params.n_cells + 1, numbers.head_dim)
        kind = CACHE_TYPES[self.dtype]
        self._caches = [torch.zeros(size, dtype=kind, device=self.device) for _ in self._layers]  # keys, then values
        self._replays: Replays | None = None
        if (self.device.type == CUDA or params.padded) and (not numbers.n_expert_used or self._experts_at_once):
            self._replays = self._make_replays()
        self._table = token_table(slice_file) if self.is_first else None

    def _make_replays(self) -> Replays:
        """Where there is a GPU, with recordings of the usual runs."""
        records = self.device.type == CUDA
        most = MOST_EXACT if self._in_order else None
        replays = Replays(self._compute, self.params.n_cells, self._queue, records, most)
        if records:
            with self._queue.current():
                replays.record_ahead(self._no_inputs())
        return replays

    def _no_inputs(self) -> Inputs:
        """Of a run without rows."""
        cos, sin = self._rope.at(np.zeros(1, np.int32))
        seen = torch.empty((0, 0), dtype=torch.int64 if self._in_order else torch.bool)
        none = torch.empty(0, dtype=torch.int64)
        return Inputs(none, none, torch.empty((0, self.n_embd)), cos[:0], sin[:0], seen)

    def _load(self, slice_file: SliceFile) -> None:
        n_threads, no_order, is_cpu = self.params.n_threads, lambda name: None, self.device.type == CPU
        torch.set_num_threads(1)  # the threads that read are enough
        self._layers: list[Layer] = []
        with closing(Weights(slice_file, self.dtype, self.device, n_threads)) as weights:
            for index in range(self._n_layer):
                self._layers.append(Layer(weights, index, self._numbers, self._exact and is_cpu, self._experts_at_once))
            factors = weights.vector("rope_freqs.weight").cpu().numpy() if weights.has("rope_freqs.weight") else None
            self._rope = RopeTable(self._numbers, factors)
            if self.is_last:
                # a last slice has its head under the name of the token table, unless both are there
                name = "output" if weights.has("output.weight") else "token_embd"
                self._norm, self._head = weights.vector("output_norm.weight"), Matrix(weights, [name], no_order)
                if weights.has("output.bias"):
                    self._head.bias = weights.vector("output.bias")
        torch.set_num_threads(n_threads)
        self._group = self._head_group = 0
        if self._exact:
            self._group = rows_together(self._layers[0].matrices, n_threads)
            self._head_group = rows_together([self._head.weight], n_threads) if self.is_last else 0
            for layer in self._layers:
                layer.group = self._group

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        """See StageModel. On the first stage batch.hidden is ignored. Raises CacheFull, and what `stop` raises.

        ModelFault when the model's file was changed, or the result is no number.
        """
        begun = self.begin(batch, stop)
        return None if begun is None else begun.result()

    def begin(self, batch: Batch, stop: Callable[[], bool]) -> BegunRun[FloatArray] | None:
        """See AsyncStage. On a CPU the run is done when this returns."""
        result = OnHost(self._queue)
        done = self._begin(batch, stop, result)
        return None if done is None else BegunRun(result, done, self._check_result)

    def begin_on_device(self, batch: Batch, stop: Callable[[], bool], rounded: bool) -> BegunRun[OwnDeviceRows] | None:
        """See DeviceStage."""
        assert not self.is_last, "logits are the host's"
        result = OnDevice(self._queue, WIRE_TYPES[rounded])
        done = self._begin(batch, stop, result)
        return None if done is None else BegunRun(result, done, self._check_result)

    def _check_result(self, rows: FloatArray) -> None:
        check_result(rows, are_logits=self.is_last, where=self._where)

    def _begin(self, batch: Batch, stop: Callable[[], bool], result: Result[Any]) -> Mark | None:
        """When the result will be complete; None when told to stop."""
        self._check(batch)
        self._cells.place(batch)
        torch.set_num_threads(self.threads.begin())
        done = None
        try:
            with torch.inference_mode(), self._queue.current():
                done = self._ask_device(batch, stop, result)
        except torch.OutOfMemoryError:
            n_rows = len(batch.positions)
            raise ModelFault(f"no room on {self.device} for a run of {n_rows} rows through {self._where}; "
                             f"{MORE_ROOM}") from None  # fmt: skip
        except BaseException:
            self._cells.forget(batch)
            raise
        finally:
            self.threads.end()
        if done is None:
            self._cells.forget(batch)
        return done

    def _ask_device(self, batch: Batch, stop: Callable[[], bool], result: Result[Any]) -> Mark | None:
        rows, on_device = self._inputs(batch)
        cells, wanted = torch.from_numpy(self._cells.of_rows(batch)), torch.from_numpy(np.flatnonzero(batch.wanted))
        cos, sin = self._rope.at(batch.positions)
        if self._replays is not None and self._replays.takes(len(cells)) and not (self._exact and batch.span):
            if stop():
                return None
            seen = self._cells.order(batch) if self._in_order else self._cells.mask(batch)
            inputs = Inputs(cells, wanted, rows, cos, sin, torch.from_numpy(seen))
            return self._replays.begin(inputs, on_device, self._logits if self.is_last else None, result)
        cos, sin, cells, wanted = map(self._queue.upload, (cos, sin, cells, wanted))
        rows = self._queue.upload(rows) if on_device is None else on_device
        after = self._evaluate(batch, rows, cos, sin, cells, stop)
        if after is None:
            if on_device is not None:
                self._queue.mark().synchronize()  # it may still be read, and is the caller's from here on
            return None
        result.take(self._logits(after.index_select(0, wanted)) if self.is_last else after)
        return self._queue.mark()

    def _inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream before the slice: on the host, or no rows there and all on the device."""
        if self._table is None and batch.on_device is not None:
            assert isinstance(batch.on_device, OwnDeviceRows), "rows on a device of another library's"
            return torch.empty((0, self.n_embd)), batch.on_device.values.float()
        rows = self._table.lookup(batch.tokens) if self._table else batch.hidden
        assert rows is not None, "a stage that is not the first without activations"
        return torch.from_numpy(np.ascontiguousarray(rows, np.float32)), None

    def _evaluate(
        self, batch: Batch, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cells: torch.Tensor,
        stop: Callable[[], bool],
    ) -> torch.Tensor | None:  # fmt: skip
        if self._exact:
            return self._evaluate_exactly(batch, rows, cos, sin, cells, stop)
        if self.device.type == CPU and BySequence.pays(batch, self._cells.end):
            apart = BySequence(batch, self._cells, self._n_group, CACHE_TYPES[self.dtype])
            return self._through_layers(apart, 0, rows, cos, sin, cells, stop)
        seen = self._queue.upload(torch.from_numpy(self._cells.mask(batch)))
        part = MaskedCells(seen, self._n_group, CACHE_TYPES[self.dtype])
        return self._through_layers(part, 0, rows, cos, sin, cells, stop)

    def _compute(self, inputs: Inputs) -> torch.Tensor:
        seen: Seen
        if self._in_order:
            seen = InOrder(inputs.seen, self._group)
        else:
            seen = MaskedCells(inputs.seen, self._n_group, CACHE_TYPES[self.dtype])
        found = self._through_layers(seen, self._group, inputs.rows, inputs.cos, inputs.sin, inputs.cells, never)
        assert found is not None, "nobody asked to stop"
        return found

    def _evaluate_exactly(
        self, batch: Batch, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cells: torch.Tensor,
        stop: Callable[[], bool],
    ) -> torch.Tensor | None:  # fmt: skip
        """Row by row, or block by block of a prompt."""
        if not batch.span:
            seen: Seen
            if self._in_order:
                seen = InOrder(self._queue.upload(torch.from_numpy(self._cells.order(batch))), self._group)
            else:
                seen = RowByRow(batch, self._cells)
            return self._through_layers(seen, self._group, rows, cos, sin, cells, stop)
        found = []
        for first, end in blocks_of(batch):
            own, positions = slice(first, end), batch.positions[first:end].tolist()
            block = BlockOfPrompt(
                positions, batch.seqs[0][0], self._cells, self._n_group, CACHE_TYPES[self.dtype], self._queue.upload
            )
            after = self._through_layers(block, 0, rows[own], cos[own], sin[own], cells[own], stop)
            if after is None:
                return None
            found.append(after)
        return torch.cat(found)

    def _through_layers(
        self, seen: Seen, group: int, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cells: torch.Tensor,
        stop: Callable[[], bool],
    ) -> torch.Tensor | None:  # fmt: skip
        """The residual stream after the slice; None when told to stop. `group`: rows of the groups in which matrices
        multiply them; 0: all at once."""
        n_head = self._numbers.n_head
        for index, (layer, cache) in enumerate(zip(self._layers, self._caches, strict=True)):
            heads = in_groups(group, layer.project, rows, cos, sin)[0].to(cache.dtype)
            cache.index_copy_(1, cells, heads[:, n_head:].transpose(0, 1))
            keys, values = cache.chunk(2)
            attended = seen.attend(heads[:, :n_head], keys, values, self._numbers.scale)
            (rows,) = in_groups(group, layer.finish, rows, attended)
            # not after the last layer of a slice whose result is then there
            if (self.is_last or index + 1 < self._n_layer) and stop():
                return None
        return rows

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """(n_wanted, n_vocab)."""
        if not len(rows):
            return torch.empty((0, self.n_vocab), device=rows.device)
        return in_groups(self._head_group, self._to_logits, rows)[0]

    def _to_logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self._head(torch.nn.functional.rms_norm(rows, rows.shape[1:], self._norm, self._numbers.epsilon))

    def device_memory(self, n_bytes: int) -> torch.Tensor:
        """See DeviceStage."""
        return self._queue.device_memory(n_bytes)

    def device_rows(self, memory: torch.Tensor, n_rows: int, rounded: bool) -> OwnDeviceRows:
        """See DeviceStage."""
        dtype = WIRE_TYPES[rounded]
        values = memory[: n_rows * self.n_embd * dtype.itemsize].view(dtype).view(n_rows, self.n_embd)
        return OwnDeviceRows(values, self._queue)

    def apply(self, ops: Sequence[KvOp]) -> None:
        """See StageModel. Removed cells are free at once, also with exact numerics: rows put those that they see into
        the order of positions."""
        self._cells.apply(ops)

    def next_position(self, seq: int) -> int:
        return self._cells.next_position(seq)

    def clear(self) -> None:
        """Forget every sequence: the cache is as after loading."""
        self._cells.clear()

    def close(self) -> None:
        """Free weights and cache. May be called twice."""
        self._layers, self._caches, self._replays = [], [], None
        if self._table is not None:
            self._table.close()

    def _check(self, batch: Batch) -> None:
        n_rows, n_wanted = len(batch.positions), int(np.count_nonzero(batch.wanted))
        if not 0 < n_rows <= self.params.n_batch:
            raise ValueError(f"a batch of {n_rows} rows, 1 to {self.params.n_batch} are possible")
        if self.is_last and n_wanted > self.params.n_outputs_max:
            raise ValueError(f"{n_wanted} rows want logits, at most {self.params.n_outputs_max} can")


def find_device(asked: str, local_rank: int) -> torch.device:
    """The device of a rank, the `local_rank`th of its host. Raises UserError for one that is not there."""
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == CPU or (asked == AUTO and not n_gpus):
        return torch.device(CPU)
    if not n_gpus:
        raise UserError(f"--backend torch:{asked}: torch {torch.__version__} sees no GPU here; install a build for "
                        "it, or use --backend torch:cpu")  # fmt: skip
    number = int(asked.partition(":")[2]) if ":" in asked else local_rank % n_gpus
    if number >= n_gpus:
        raise UserError(f"--backend torch:{asked}: torch sees {n_gpus} GPUs here, from {CUDA}:0 on; name one of these")
    return torch.device(CUDA, number)
