"""10 500 random loads in virtual time, 1500 of each policy: nobody is forgotten or starved."""

from __future__ import annotations

import pytest

from pipeinfer.policies import POLICIES
from tests.core.test_random_stops import run_case

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", POLICIES)
def test_nobody_is_forgotten_or_starved(name: str) -> None:
    for seed in range(10_000, 11_500):
        run_case(seed, POLICIES[name])
