"""The random cases of `tests.core.test_many_requests` go on until 100 000 trees have settled, minutes of one core."""

from __future__ import annotations

from itertools import count

import pytest

from tests.core.test_many_requests import run_case

pytestmark = pytest.mark.long

FIRST_CASE, N_TREES = 1000, 100_000


def test_many_random_cases() -> None:
    n_trees = 0
    for case in count(FIRST_CASE):
        try:
            n_trees += run_case(case).n_trees
        except Exception as error:
            raise AssertionError(f"case {case}, after {n_trees} settled trees") from error
        if n_trees >= N_TREES:
            break
    print(f"\n{case - FIRST_CASE + 1} cases, {n_trees} settled trees")
