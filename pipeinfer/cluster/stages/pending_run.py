"""A transaction that a stage has begun and whose result may be pending. Knows no MPI, and computes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeinfer.cluster.messages.wire import Transaction
from pipeinfer.core.interfaces import DeviceRows, StageFuture
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.types import Allowed, FloatArray


class Question(NamedTuple):
    """Asks for the token after a row of a run."""

    row: int
    params: SamplingParams
    position: int
    history: Sequence[int]
    n_wanted: int
    allowed: Allowed | None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """StageFuture of a model that evaluates synchronously."""

    rows: FloatArray
    is_done = True

    def result(self) -> FloatArray:
        return self.rows


@dataclass(slots=True, eq=False)
class PendingRun:
    """A transaction whose result may be pending. `rows`: the result of the rows `alive`; None if there are none."""

    transaction: Transaction
    start_s: float
    alive: list[int] = field(default_factory=list)
    rows: StageFuture[FloatArray] | StageFuture[DeviceRows] | None = None
    questions: list[Question] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.rows is None or self.rows.is_done
