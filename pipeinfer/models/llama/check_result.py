"""Could these numbers come from a sound model? Knows no model."""

import math

import numpy as np

from pipeinfer.core.types import FloatArray
from pipeinfer.errors import ModelFault


def check_result(rows: FloatArray, are_logits: bool, where: str) -> None:
    """ModelFault when a row, (n_rows, n), is not a residual stream or logits that a next step could go on from.

    Every value must be finite, except that logits may be -inf (a token that is ruled out) and must not be all equal.
    One pass over logits, two over a residual stream, in the ordinary case: NaN counts as the highest value.
    """
    if not rows.size:
        return
    highest = rows.item(rows.argmax())
    lowest = highest if are_logits else rows.item(rows.argmin())
    if not (math.isfinite(highest) and math.isfinite(lowest)):
        sound = np.isfinite(rows) | (np.isneginf(rows) & are_logits)
        if not sound.all():
            bad = rows[~sound][0]
            raise _fault(
                f"a value that is no number ({bad}) in row {np.argmin(sound.all(axis=1))} of {len(rows)}", where
            )
    if are_logits and rows.shape[1] > 1:
        for index, row in enumerate(rows):
            if row[0] == row[-1] and (row == row[0]).all():
                raise _fault(f"the same logit ({row[0]}) for every token in row {index} of {len(rows)}", where)


def _fault(what: str, where: str) -> ModelFault:
    return ModelFault(f"{where} computed {what}: the model file is damaged; copy or download it again")
