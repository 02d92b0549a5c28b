"""Batches filled up to whole groups of rows: in such batches each row has the same bits. Knows batches, no library."""

from dataclasses import dataclass
from types import EllipsisType

import numpy as np
import numpy.typing as npt

from pipeinfer.core.interfaces import Batch
from pipeinfer.core.types import FloatArray
from pipeinfer.models.llama.params import in_whole_groups


@dataclass(frozen=True, slots=True)
class Filled:
    """A batch as libllama gets it.

    hidden   (n_rows, n_embd), what goes into the first layer, where that is no tokens
    wanted   (n_rows,), of the last stage: the rows that it computes logits for
    logits   which of these logits belong to the batch's own rows that want them
    n_added  rows that were added behind the others
    """

    batch: Batch
    hidden: FloatArray | None
    wanted: npt.NDArray[np.bool_] | None
    logits: npt.NDArray[np.bool_] | slice | EllipsisType = ...
    n_added: int = 0


def fill_up(batch: Batch, hidden: FloatArray | None, wanted: npt.NDArray[np.bool_] | None, seq: int) -> Filled:
    """The batch with its last row again as often as whole groups need it, in sequence `seq`, which must be empty, from
    position 0 on; and with logits of further rows, the added ones first, until these are in whole groups too."""
    n_rows = len(batch.positions)
    n_added = in_whole_groups(n_rows) - n_rows
    rows = np.minimum(np.arange(n_rows + n_added), n_rows - 1)
    positions = np.concatenate([batch.positions, np.arange(n_added, dtype=np.int32)])
    seqs = [*batch.seqs, *[(seq,)] * n_added]
    filled = Batch(batch.tokens[rows], positions, seqs, None, batch.wanted[rows])
    hidden = None if hidden is None else hidden[rows]
    if wanted is None:
        return Filled(filled, hidden, None, n_added=n_added)
    own = np.concatenate([wanted, np.zeros(n_added, np.bool_)])
    n_wanted = int(np.count_nonzero(own))
    others = np.flatnonzero(~own)[::-1]
    computed = own.copy()
    computed[others[: in_whole_groups(n_wanted) - n_wanted]] = True
    is_own = own[computed]
    first = slice(n_wanted)  # a view, where these are the batch's own
    return Filled(filled, hidden, computed, first if is_own[first].all() else is_own, n_added)
