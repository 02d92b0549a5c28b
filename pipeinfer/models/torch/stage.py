"""A StageModel on PyTorch: a slice of layers of the llama family, on a CPU or a GPU. Knows no MPI and no tokenizer."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pipeinfer.core.interfaces import Batch
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import ModelFault, UserError
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.llama.rows import blocks_of, check_result, check_rows
from pipeinfer.models.llama.threads import ThreadShare
from pipeinfer.models.llama.token_table import token_table
from pipeinfer.models.torch.attention import CellTable, InOrder, MaskedCells, RowByRow, VisibleCells, is_sparse
from pipeinfer.models.torch.device import DeviceFuture, DeviceQueue, HostFuture, Mark, PendingRows, TorchRows
from pipeinfer.models.torch.layer import Layer, Matrix, RopeTable, runs_without_waiting
from pipeinfer.models.torch.matrices import check_device, in_groups, rows_together
from pipeinfer.models.torch.params import AUTO, BF16, CPU, CUDA, F32, INT4, INT8, TorchParams, read_hyperparameters
from pipeinfer.models.torch.replays import MOST_ROWS, Inputs, Replays
from pipeinfer.models.torch.weights import Weights

MORE_ROOM = "use a smaller context (-c), fewer rows (-b) or more ranks"
CACHE_DTYPES = {F32: torch.float32, BF16: torch.bfloat16, INT8: torch.bfloat16, INT4: torch.bfloat16}

TENSOR_DTYPES = {F32: torch.float32, BF16: torch.bfloat16}  # types of weights that are plain tensors
MOST_EXACT = 8 * 8192
"""Rows times cells of the largest recorded run with exact numerics, whose attention goes block by block of cells."""

WIRE_DTYPES = (torch.float32, torch.bfloat16)  # types of activations from device to device, by whether they are rounded

Stop = Callable[[], bool]
Future = TypeVar("Future", bound=PendingRows)


class TorchStage:
    """Layers [first, last) with their KV cache. A whole model is the stage that is both first and last."""

    def __init__(self, slice_file: SliceFile, params: TorchParams) -> None:
        """Load the slice and close its file. Raises UserError for an unknown model, or if there is no such device."""
        try:
            with torch.inference_mode():
                self._open(slice_file, params)
        except torch.OutOfMemoryError:
            where = f"{self.device} for {self._where} with {params.n_cells} KV cells"
            raise UserError(f"no room on {where}; {MORE_ROOM}") from None
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
        # removed cells are free at once, also with exact numerics: attention reads cells in the order of positions
        self._cells = cells = CellTable(params.n_cells, params.n_seq_max)
        self.apply, self.next_position, self.clear = cells.apply, cells.next_position, cells.clear
        self.device_memory = self._queue.device_memory
        is_padded = params.padded or not is_cpu
        has_tensors = numbers.n_expert_used > 0 and not self._exact and is_padded and self.dtype in TENSOR_DTYPES
        self._experts_at_once = has_tensors and runs_without_waiting(self.device, TENSOR_DTYPES[self.dtype])
        self._load(slice_file)
        # keys, then values; one more cell, for padding
        size = 2 * numbers.n_head_kv, params.n_cells + 1, numbers.head_dim
        self._cache_dtype = CACHE_DTYPES[self.dtype]
        self._caches = [torch.zeros(size, dtype=self._cache_dtype, device=self.device) for _ in self._layers]
        self._replays: Replays | None = None
        if (self.device.type == CUDA or params.padded) and (not numbers.n_expert_used or self._experts_at_once):
            self._replays = self._make_replays()
        self._table = token_table(slice_file) if self.is_first else None

    def _make_replays(self) -> Replays:
        """On a GPU with recordings of the usual runs."""
        records = self.device.type == CUDA
        most = MOST_EXACT if self._in_order else None
        replays = Replays(self._compute, self.params.n_cells, self._queue, records, most)
        if records:
            with self._queue.current():
                replays.record_ahead(self._no_inputs())
        return replays

    def _no_inputs(self) -> Inputs:
        cos, sin = self._rope.at(np.zeros(1, np.int32))
        visible = torch.empty((0, 0), dtype=torch.int64 if self._in_order else torch.bool)
        none = torch.empty(0, dtype=torch.int64)
        return Inputs(none, none, torch.empty((0, self.n_embd)), cos[:0], sin[:0], visible)

    def _load(self, slice_file: SliceFile) -> None:
        n_threads, is_cpu = self.params.n_threads, self.device.type == CPU
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
                self._norm, self._head = weights.vector("output_norm.weight"), Matrix(weights, [name])
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
        ModelFault when the model's file was changed, or the result is no number."""
        future = self.begin(batch, stop)
        return None if future is None else future.result()

    def begin(self, batch: Batch, stop: Callable[[], bool]) -> HostFuture | None:
        """See AsyncStage. On a CPU the run is done when this returns."""
        return self._begin(batch, stop, HostFuture(self._queue, self._check_result))

    def begin_on_device(self, batch: Batch, stop: Callable[[], bool], rounded: bool) -> DeviceFuture | None:
        """See DeviceStage."""
        assert not self.is_last, "logits are the host's"
        return self._begin(batch, stop, DeviceFuture(self._queue, self._check_result, WIRE_DTYPES[rounded]))

    def _check_result(self, rows: FloatArray) -> None:
        check_result(rows, are_logits=self.is_last, where=self._where)

    def _begin(self, batch: Batch, stop: Callable[[], bool], future: Future) -> Future | None:
        """The future, submitted; None when told to stop."""
        n_rows, wanted = len(batch.positions), batch.wanted if self.is_last else None
        # of a prompt that is scored all rows of a block want logits
        check_rows(n_rows, None if batch.span else wanted, self.params.n_batch, self.params.n_outputs_max)
        self._cells.place(batch)
        torch.set_num_threads(self.threads.begin())
        done = None
        try:
            with torch.inference_mode(), self._queue.current():
                done = self._submit(batch, stop, future)
        except torch.OutOfMemoryError:
            where = f"{self.device} for a run of {n_rows} rows through {self._where}"
            raise ModelFault(f"no room on {where}; {MORE_ROOM}") from None
        except BaseException:
            self._cells.forget(batch)
            raise
        finally:
            self.threads.end()
        if done is None:
            self._cells.forget(batch)
            return None
        future.done = done
        return future

    def _submit(self, batch: Batch, stop: Callable[[], bool], result: PendingRows) -> Mark | None:
        """The place in the device's work behind which the result is complete; None when told to stop."""
        rows, on_device = self._input_rows(batch)
        cells, wanted = torch.from_numpy(self._cells.of_rows(batch)), torch.from_numpy(np.flatnonzero(batch.wanted))
        cos, sin = self._rope.at(batch.positions)
        if self._replays is not None and len(cells) <= MOST_ROWS and not (self._exact and batch.span):
            if stop():
                return None
            visible = self._cells.order(batch) if self._in_order else self._cells.mask(batch)
            inputs = Inputs(cells, wanted, rows, cos, sin, torch.from_numpy(visible))
            return self._replays.begin(inputs, on_device, self._logits if self.is_last else None, result)
        cos, sin, cells, wanted = map(self._queue.upload, (cos, sin, cells, wanted))
        rows = self._queue.upload(rows) if on_device is None else on_device
        outputs = []
        for part, visible_cells, group in self._parts(batch):
            output = self._through_layers(visible_cells, group, rows[part], cos[part], sin[part], cells[part], stop)
            if output is None:
                if on_device is not None:
                    self._queue.mark().synchronize()  # it may still be read, and is the caller's from here on
                return None
            outputs.append(output)
        after = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        result.take(self._logits(after.index_select(0, wanted)) if self.is_last else after)
        return self._queue.mark()

    def _input_rows(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream before the slice: on the host, or no rows there and all on the device."""
        if self._table is None and batch.on_device is not None:
            assert isinstance(batch.on_device, TorchRows), "rows on a device of another library"
            return torch.empty((0, self.n_embd)), batch.on_device.values.float()
        rows = self._table.lookup(batch.tokens) if self._table else batch.hidden
        assert rows is not None, "a stage that is not the first without activations"
        return torch.from_numpy(np.ascontiguousarray(rows, np.float32)), None

    def _parts(self, batch: Batch) -> Iterator[tuple[slice, VisibleCells, int]]:
        """Rows that go through the layers together, the cells that they see, and the size of their groups (0: one).
        Exact runs go row by row, or block by block of a prompt."""
        everything = slice(None)
        if self._exact and batch.span:
            for first, end in blocks_of(batch):
                yield slice(first, end), self._by_sequence(batch, slice(first, end)), 0
        elif self._in_order:
            order = self._queue.upload(torch.from_numpy(self._cells.order(batch)))
            yield everything, InOrder(order, self._group), self._group
        elif self._exact:
            yield everything, RowByRow(batch, self._cells), self._group
        elif self.device.type == CPU and is_sparse(batch, self._cells.end):
            yield everything, self._by_sequence(batch, everything), 0
        else:
            visible = self._queue.upload(torch.from_numpy(self._cells.mask(batch)))
            yield everything, MaskedCells.first(visible, self._n_group, self._cache_dtype), 0

    def _by_sequence(self, batch: Batch, rows: slice) -> MaskedCells:
        seqs = [seqs[0] for seqs in batch.seqs[rows]]
        return MaskedCells.by_sequence(
            batch.positions[rows], seqs, self._cells, self._n_group, self._cache_dtype, self._queue.upload
        )

    def _compute(self, inputs: Inputs) -> torch.Tensor:
        """The residual stream after the slice, of a padded run."""
        visible: VisibleCells = InOrder(inputs.visible, self._group)
        if not self._in_order:
            visible = MaskedCells.first(inputs.visible, self._n_group, self._cache_dtype)
        rows, cos, sin, cells = inputs.rows, inputs.cos, inputs.sin, inputs.cells
        output = self._through_layers(visible, self._group, rows, cos, sin, cells, lambda: False)
        assert output is not None
        return output

    def _through_layers(
        self, visible: VisibleCells, group: int, rows: Tensor, cos: Tensor, sin: Tensor, cells: Tensor, stop: Stop
    ) -> torch.Tensor | None:
        """The residual stream after the slice; None when told to stop. `group`: rows multiplied at once; 0: all."""
        n_head = self._numbers.n_head
        for index, (layer, cache) in enumerate(zip(self._layers, self._caches, strict=True)):
            heads = in_groups(group, layer.project, rows, cos, sin)[0].to(cache.dtype)
            cache.index_copy_(1, cells, heads[:, n_head:].transpose(0, 1))
            keys, values = cache.chunk(2)
            attended = visible.attend(heads[:, :n_head], keys, values, self._numbers.scale)
            (rows,) = in_groups(group, layer.finish, rows, attended)
            # not after the last layer of a slice whose result is complete then
            if (self.is_last or index + 1 < self._n_layer) and stop():
                return None
        return rows

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """(n_wanted, n_vocab)."""

        def compute(rows: torch.Tensor) -> torch.Tensor:
            return self._head(torch.nn.functional.rms_norm(rows, rows.shape[1:], self._norm, self._numbers.epsilon))

        if not len(rows):
            return torch.empty((0, self.n_vocab), device=rows.device)
        return in_groups(self._head_group, compute, rows)[0]

    def device_rows(self, memory: torch.Tensor, n_rows: int, rounded: bool) -> TorchRows:
        """See DeviceStage."""
        dtype = WIRE_DTYPES[rounded]
        values = memory[: n_rows * self.n_embd * dtype.itemsize].view(dtype).view(n_rows, self.n_embd)
        return TorchRows(values, self._queue)

    def close(self) -> None:
        """Free weights and cache. May be called twice."""
        self._layers, self._caches, self._replays = [], [], None
        if self._table is not None:
            self._table.close()


def find_device(name: str, local_rank: int) -> torch.device:
    """The device of a rank, the `local_rank`th of its host. Raises UserError if there is none of this name."""
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == CPU or (name == AUTO and not n_gpus):
        return torch.device(CPU)
    if not n_gpus:
        way_out = "install a build for it, or use --backend torch:cpu"
        raise UserError(f"--backend torch:{name}: torch {torch.__version__} sees no GPU here; {way_out}")
    number = int(name.partition(":")[2]) if ":" in name else local_rank % n_gpus
    if number >= n_gpus:
        raise UserError(f"--backend torch:{name}: torch sees {n_gpus} GPUs here, from {CUDA}:0 on; name one of these")
    return torch.device(CUDA, number)
