"""The model of tensor parallelism: an all-reduce takes what its algorithms' messages take, one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.tensor_parallel import NETWORKS, OnNetwork, allreduce_s, published_software_s
from pipeinfer.virtual.costs import LinkCost

LINK = LinkCost(50e-6, 0.94e9 / 8)


def doubled(values: np.ndarray) -> tuple[np.ndarray, float]:
    """Recursive doubling: hosts exchange all they have with one at twice the distance each time. The sums, seconds."""
    took_s, distance = 0.0, 1
    while distance < len(values):
        values = values + values[np.arange(len(values)) ^ distance]
        took_s += LINK.latency_s + LINK.transfer_s(values[0].nbytes)
        distance *= 2
    return values, took_s


def halved(values: np.ndarray) -> tuple[np.ndarray, float]:
    """Rabenseifner's: hosts send the half that the other one sums, until each has its part of the sum; then back."""
    n, took_s, values = len(values), 0.0, values.copy()
    kept = [slice(0, values.shape[1])] * n
    steps = []
    distance = n // 2
    while distance:
        halves = [_half(kept[host], bool(host & distance)) for host in range(n)]
        sums = [values[host, halves[host]] + values[host ^ distance, halves[host]] for host in range(n)]
        for host in range(n):
            values[host, halves[host]] = sums[host]
        took_s += LINK.latency_s + LINK.transfer_s(sums[0].nbytes)
        steps.append((distance, halves))
        kept, distance = halves, distance // 2
    for distance, halves in reversed(steps):
        before = values.copy()
        for host in range(n):
            other = halves[host ^ distance]
            values[host, other] = before[host ^ distance, other]
        took_s += LINK.latency_s + LINK.transfer_s(before[0, halves[0]].nbytes)
    return values, took_s


def _half(part: slice, is_second: bool) -> slice:
    middle = (part.start + part.stop) // 2
    return slice(middle, part.stop) if is_second else slice(part.start, middle)


@pytest.mark.parametrize("n_hosts", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("n_values", [16, 4096, 1 << 18])
def test_an_all_reduce_takes_the_time_of_the_faster_algorithm(n_hosts: int, n_values: int) -> None:
    values = np.random.default_rng(0).integers(0, 100, (n_hosts, n_values)).astype(np.float64)
    took_s = []
    for algorithm in (doubled, halved):
        sums, seconds = algorithm(values)
        assert (sums == values.sum(axis=0)).all()
        took_s.append(seconds)
    assert allreduce_s(LINK, n_hosts, values[0].nbytes) == pytest.approx(min(took_s))


def test_other_numbers_of_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="6 hosts"):
        allreduce_s(LINK, 6, 1e3)


def test_a_layer_is_a_part_of_the_whole_one_and_two_all_reduces() -> None:
    gigabit = NETWORKS[1]
    alone = OnNetwork("ethernet", "qwen-32b-0.5b", 1, network=gigabit, is_cut=True).lay_out(False).stages[0]
    on_8 = OnNetwork("ethernet", "qwen-32b-0.5b", 8, network=gigabit, is_cut=True).lay_out(False).stages[0]
    fixed_s, reduces_s = 30e-6, 2 * allreduce_s(gigabit.link, 8, 2 * 5120)
    assert on_8.layer_s(1, 0) == pytest.approx((alone.layer_s(1, 0) - fixed_s) / 8 + fixed_s + reduces_s)
    assert on_8.layer.context_s[0] == pytest.approx(alone.layer.context_s[0] / 8)


def test_measured_all_reduces_take_longer_than_the_formula() -> None:
    """Else the page's row of them would be to the good of tensor parallelism."""
    assert published_software_s(2, NETWORKS[1].link) > 0
    assert published_software_s(4, NETWORKS[1].link) == pytest.approx(1.0e-3, rel=0.05)
