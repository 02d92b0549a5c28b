"""Cases of a test: the first or the most telling in each run of the tests, the others under the mark `long`."""

from typing import Any

import pytest


def in_long(*values: Any) -> Any:
    """A case of `parametrize` that is run with the long tests alone."""
    return pytest.param(*values, marks=pytest.mark.long)


def cases(n: int, n_long: int) -> list[Any]:
    """Numbers from 0 on, for `parametrize`: those up to `n`, and as `long` the others up to `n_long`."""
    return [*range(n), *map(in_long, range(n, n_long))]
