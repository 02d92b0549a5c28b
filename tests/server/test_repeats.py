"""Prompts that repeat an earlier one behind a change near their beginning."""

import time
from random import Random

from pipeinfer.server.request_log import N_LEAST, Repeats

TEXT = [Random(1).randrange(50_000) for _ in range(4000)]


def test_a_change_near_the_beginning_is_found() -> None:
    repeats = Repeats()
    assert repeats.note("a", [1, 2, 3, *TEXT], 0) is None
    assert repeats.note("a", [1, 2, 9, 9, *TEXT, 5, 6], 2) == (2, 4000 - 15)
    assert repeats.note("a", [1, 2, 9, 9, *TEXT, 5, 6, 7], 3900) is None, "the cache had it"


def test_other_prompts_and_short_ones_are_no_repeats() -> None:
    repeats = Repeats()
    for seed in range(3):
        assert repeats.note("a", [Random(seed).randrange(50_000) for _ in range(2000)], 0) is None
    for at in range(3):
        assert repeats.note("a", [at, *TEXT[: N_LEAST - 2]], 0) is None


def test_long_prompts_take_tens_of_milliseconds() -> None:
    repeats = Repeats()
    for at in range(5):
        begin_s = time.process_time()
        repeats.note("a", [at, *(TEXT * 15)], 0)
    assert time.process_time() - begin_s < 0.5


def test_clients_are_apart() -> None:
    repeats = Repeats()
    assert repeats.note("a", [1, *TEXT], 0) is None and repeats.note("b", [2, *TEXT], 0) is None
    assert repeats.note("b", [3, *TEXT], 0) == (0, 4000 - 15)
