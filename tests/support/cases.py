"""Random cases: the first of them in each run of the tests, the others under the mark `long`."""

from typing import Any

import pytest


def cases(n: int, n_long: int) -> list[Any]:
    """Numbers from 0 on, for `parametrize`: those up to `n`, and as `long` the others up to `n_long`."""
    return [*range(n), *(pytest.param(number, marks=pytest.mark.long) for number in range(n, n_long))]
