"""How many rows a device may compute at once so that each has the bits that it has alone, tried with a model's own
layers. Knows no rank.

A row's bits depend on kernels, which are chosen by the number of rows, by the types and shapes of weights, and for
attention by the number and the place of the cells, those of other sequences among them. So layers of each kind compute
the same rows one by one in an empty cache, and several at once behind and between the rows of others."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.types import FloatArray, IntArray
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.llama.tensor_places import TensorPlaces

N_BEFORE, N_ROWS = 8, 32
"""Rows of a sequence: those that are computed one by one every time, and those that come several at once."""

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)  # rows at once
N_BETWEEN = 64
"""Rows of another sequence between each two of the former: a sequence's cells are far apart then, in what libggml gives
different threads."""

N_CELLS = N_BEFORE * (1 + N_BETWEEN) + 4 * N_ROWS * len(SIZES)
TEXT, OTHERS, BESIDE = 0, 1, 2  # sequences


class ExactRows(NamedTuple):
    """`n_rows`: at once, as far as was tried; 0: even single rows differ. `digest`: of the bits of rows alone; equal
    where layers have the same bits."""

    n_rows: int
    digest: str


NONE = ExactRows(0, "")


def prove(info: ModelInfo, params: LlamaParams) -> ExactRows:
    """The rows that the devices of `params` compute exactly, with its threads and cache types. None where layers have
    states or no flash attention, or cannot be loaded."""
    layers = info.layers.architecture
    if layers.states or not layers.flash:
        return NONE
    n_rows, digest = N_ROWS, hashlib.sha256()
    params = replace(
        params,
        n_cells=N_CELLS,
        n_seq_max=4,
        n_batch=N_BETWEEN,
        n_outputs_max=N_BETWEEN,
        exact=True,
        at_once=N_BETWEEN,
        taps=(),
    )
    for first, last in spans_of_kinds(info, params.places):
        try:
            stage = LlamaStage(open_slice(info, first, last), params)
        except UserError:
            return NONE
        try:
            trial = Trial(stage)
            n_rows = min(n_rows, trial.n_rows())
            digest.update(trial.alone.tobytes())
        finally:
            stage.close()
    return ExactRows(n_rows, digest.hexdigest()[:16])


def spans_of_kinds(info: ModelInfo, places: TensorPlaces) -> Iterator[tuple[int, int]]:
    """One layer of each kind, by the types, shapes and devices of its tensors, and the last one, which has the output
    head. More layers where one alone cannot be cut."""
    kinds: dict[tuple[object, ...], int] = {}
    for layer in range(info.n_layer - 1):
        of_layer = (tensor for tensor in info.tensors if layer_of(tensor.name) == layer)
        names = ((each.name.split(".", 2)[2], places.tensor_device(each.name, layer), each) for each in of_layer)
        kind = tuple(sorted((name, device, each.type, each.shape) for name, device, each in names))
        kinds.setdefault(kind, layer)
    for layer in (*kinds.values(), info.n_layer - 1):
        ends = [(layer, layer + 1), *((first, info.n_layer) for first in range(layer, -1, -1))]
        yield next(span for span in ends if span not in info.layers.faults)


class Trial:
    """`alone`: (n, n_out), the outputs of a sequence's rows one by one, with nothing else in the cache."""

    def __init__(self, stage: LlamaStage) -> None:
        generator, self._stage, self._n_threads = np.random.default_rng(0), stage, stage.threads.most
        n, stage.threads.most = N_BEFORE + N_ROWS, 1
        self._tokens = generator.integers(0, stage.n_vocab, 2 * n).astype(np.int32)
        self._hidden = generator.standard_normal((2 * n, stage.n_embd), np.float32)
        self.alone = np.concatenate([self._evaluate([row], [row], [TEXT]) for row in range(n)])
        self._drop(TEXT)

    def n_rows(self) -> int:
        """The most rows at once of which each has the bits that it has alone; 0: even single rows differ."""
        sizes, before = [0], []
        self._stage.threads.most = self._n_threads
        for row in range(N_BEFORE):
            others = np.arange(N_BETWEEN)
            self._evaluate(others, N_BETWEEN * row + others, [OTHERS] * N_BETWEEN)
            before.append(self._evaluate([row], [row], [TEXT]))
        if not np.array_equal(np.concatenate(before), self.alone[:N_BEFORE]):
            return 0
        sizes += takewhile(self._holds, SIZES)
        while sizes[-1] > 1 and not self._holds_beside(sizes[-1]):
            sizes.pop()
        return sizes[-1]

    def _holds(self, size: int) -> bool:
        """Whether a sequence's rows have the bits that they have alone if `size` are computed at once."""
        outputs = np.concatenate([self._evaluate(rows, rows, [TEXT] * len(rows)) for rows in self._rows(size)])
        self._drop(TEXT, N_BEFORE)
        return np.array_equal(outputs, self.alone[N_BEFORE:])

    def _holds_beside(self, size: int) -> bool:
        """The same of rows of two sequences in turns."""
        outputs = []
        for text in self._rows(size // 2):
            rows = np.stack([text, text + N_BEFORE + N_ROWS], axis=1).reshape(-1)
            positions = np.repeat(text, 2) - [0, N_BEFORE] * len(text)
            outputs.append(self._evaluate(rows, positions, [TEXT, BESIDE] * len(text))[::2])
        self._drop(TEXT, N_BEFORE)
        self._drop(BESIDE)
        return np.array_equal(np.concatenate(outputs), self.alone[N_BEFORE:])

    def _rows(self, size: int) -> list[IntArray]:
        rows = np.arange(N_BEFORE, N_BEFORE + N_ROWS, dtype=np.int32)
        return [rows[at : at + size] for at in range(0, N_ROWS, size)]

    def _evaluate(self, rows: npt.ArrayLike, positions: npt.ArrayLike, seqs: list[int]) -> FloatArray:
        rows, stage = np.asarray(rows), self._stage
        hidden = None if stage.is_first else self._hidden[rows]
        at, flags = np.asarray(positions, np.int32), np.ones(len(seqs), np.bool_)
        batch = Batch(self._tokens[rows], at, [(seq,) for seq in seqs], hidden, flags)
        stage.threads.n_threads = stage.threads.most  # however busy the cores are
        result = stage.evaluate(batch, lambda: False)
        assert result is not None
        return result.copy()

    def _drop(self, seq: int, first: int = 0) -> None:
        self._stage.apply([KvOp(OpKind.REMOVE, seq, first=first)])
