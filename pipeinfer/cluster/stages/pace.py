"""Slow real ranks down to a profile's costs: stages sleep between layers, messages carry a stamp when they are due.
Models, messages and cancellations stay real; only their times are stretched. Knows no MPI and no particular model."""

import math
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from pipeinfer.cluster.wire import Buffer, Transaction, WireType, activation_bytes, feature_bytes
from pipeinfer.core.interfaces import Batch, FeatureStage, HeadModel, LoadedModel
from pipeinfer.core.types import Clock, FloatArray

N_STAMP = 8  # bytes: when a message is due, a float64
NO_FEATURES = np.empty((0, 0, 0), np.float32)
SHARE_OF_NEW = 0.3  # of the newest measurement in the running mean of the model's time


class StageCost(Protocol):
    """What a stage costs in a profile; see `virtual.costs`."""

    @property
    def run_s(self) -> float: ...
    @property
    def n_stops(self) -> int: ...
    def layer_s(self, n_rows: int, context: int) -> float: ...
    def seconds(self, n_rows: int, context: int, reshapes: bool = ..., *, begins: bool = ...) -> float: ...


class LinkCost(Protocol):
    """What a link costs in a profile."""

    @property
    def latency_s(self) -> float: ...
    def transfer_s(self, n_bytes: float) -> float: ...


class JobClock:
    """The seconds of a job: real ones, or `dilation` real ones each in a job whose pace is dilated."""

    def __init__(self, dilation: float = 1.0) -> None:
        self.dilation = dilation

    def __call__(self) -> float:
        return time.monotonic() / self.dilation

    def sleep(self, seconds: float) -> None:
        time.sleep(self.real_s(seconds))

    def real_s(self, seconds: float) -> float:
        return seconds * self.dilation


REAL_CLOCK = JobClock()


class PacedStage:
    """A model whose evaluations take the time that `cost` says. It first sleeps, layer by layer, and calls `stop` in
    between as a model does; the model's own work comes last, so that a stopped run leaves no trace in it. Of a
    run's cost outside the model (`run_s`) the real one is a part, which is not added."""

    def __init__(self, model: LoadedModel, cost: StageCost, clock: JobClock) -> None:
        self.model, self.cost, self.clock = model, cost, clock
        self.n_embd, self.is_last, self.n_vocab = model.n_embd, model.is_last, model.n_vocab
        self.apply, self.next_position = model.apply, model.next_position
        self.clear, self.close = model.clear, model.close
        self._feature_stage = model if isinstance(model, FeatureStage) else None
        self.n_features = self._feature_stage.n_features if self._feature_stage else 0
        # rows, whether a prompt's blocks begin -> mean seconds of the model itself
        self._model_s: dict[tuple[int, bool], float] = {}
        self._n_rows_before = 0
        self._late_s = 0.0

    @property
    def features(self) -> FloatArray:
        return self._feature_stage.features if self._feature_stage else NO_FEATURES

    def take_late_s(self) -> float:
        """Seconds by which evaluations since the last call ended late."""
        late_s, self._late_s = self._late_s, 0.0
        return late_s

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        start_s, n_rows = self.clock(), len(batch.positions)
        context, kind = int(batch.positions[0]), _kind(batch)
        reshapes, self._n_rows_before = n_rows != self._n_rows_before, n_rows
        real_run_s = self.cost.run_s / self.clock.dilation
        end_s = start_s + self.cost.seconds(n_rows, context, reshapes, begins=batch.begins_blocks) - real_run_s
        begin_s, is_timed = end_s - self._model_s.get(kind, 0.0), kind in self._model_s
        if not self._sleep_through_layers(start_s, begin_s, n_rows, context, stop):
            return None
        result = self._evaluate(batch, stop)
        if result is not None:
            if is_timed:
                self._late_s += max(0.0, self.clock() - end_s)
            self._sleep_until(end_s)
        return result

    def _sleep_through_layers(
        self, first_s: float, end_s: float, n_rows: int, context: int, stop: Callable[[], bool]
    ) -> bool:
        """Sleep until `end_s`; the layers begin at `first_s`. Returns False if stopped after one of them."""
        layer_s = self.cost.layer_s(n_rows, context)
        for index in range(1, self.cost.n_stops + 1):
            if first_s + index * layer_s > end_s:
                break
            self._sleep_until(first_s + index * layer_s)
            if stop():
                return False
        self._sleep_until(end_s)
        return True

    def _evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        start_s, kind = self.clock(), _kind(batch)
        result = self.model.evaluate(batch, stop)
        took_s = self.clock() - start_s
        if result is not None:
            mean_s = self._model_s.get(kind, took_s)
            self._model_s[kind] = mean_s + SHARE_OF_NEW * (took_s - mean_s)
        return result

    def _sleep_until(self, when_s: float) -> None:
        while (left_s := when_s - self.clock()) > 0:
            self.clock.sleep(left_s)


class PacedHead(PacedStage):
    """A paced HeadModel; `encode` is not paced."""

    def __init__(self, model: HeadModel, cost: StageCost, clock: JobClock) -> None:
        super().__init__(model, cost, clock)
        self.head = model

    def encode(self, features: FloatArray) -> FloatArray:
        return self.head.encode(features)

    @property
    def states(self) -> FloatArray:
        return self.head.states


def _kind(batch: Batch) -> tuple[int, bool]:
    return len(batch.positions), batch.begins_blocks


class Courier:
    """Stamps messages with the time at which a link of `cost` would deliver them, on a `clock` common to all ranks.
    Activations count with the profile's width `modelled_embd` in the place of the model's `n_embd`."""

    def __init__(
        self, cost: LinkCost, clock: Clock, n_embd: int, modelled_embd: int, wire_type: WireType = WireType.F32
    ) -> None:
        self.cost, self.clock, self.wire_type = cost, clock, wire_type
        self.n_embd, self.modelled_embd = n_embd, modelled_embd
        self._free_s: dict[tuple[int, bool], float] = {}

    def stamp(self, message: np.ndarray, dest: int, is_transaction: bool) -> Buffer:
        """A copy of the message, followed by its stamp."""
        content = message.view(np.uint8)
        n_bytes = self._modelled_bytes(content) if is_transaction else content.nbytes
        key = (dest, is_transaction)
        self._free_s[key] = max(self.clock(), self._free_s.get(key, -math.inf)) + self.cost.transfer_s(n_bytes)
        due_s = self._free_s[key] + self.cost.latency_s
        return np.concatenate([content, np.array([due_s], np.float64).view(np.uint8)])

    def _modelled_bytes(self, content: Buffer) -> int:
        transaction = Transaction(content, self.n_embd, self.wire_type)
        if transaction.n_rows and content.nbytes == transaction.n_bytes_full:
            more = transaction.n_rows, self.modelled_embd - self.n_embd
            n_features = feature_bytes(*more, transaction.n_features)
            return content.nbytes + n_features + activation_bytes(*more, self.wire_type)
        return content.nbytes

    @staticmethod
    def due_s(received: Buffer) -> float:
        """When a received message, stamp included, is due."""
        return float(received[-N_STAMP:].copy().view(np.float64)[0])
