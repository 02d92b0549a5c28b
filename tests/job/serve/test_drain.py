"""The end of a service: which signal lets open requests end, and which stops them. No job is started."""

from __future__ import annotations

import signal

from pipeinfer.job.process.stop import ONE_PRESS_S, Drain, StopFlag, Stopper


class Clock:
    now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


class HeadWatch:
    """The watch of rank 0, as far as a stop goes."""

    rank, joined = 0, True

    def ask_stop(self, reason: str) -> None:
        pass


def test_the_first_signal_drains_and_a_later_one_stops() -> None:
    clock = Clock()
    drain = Drain(10, clock)
    assert not drain.began and not drain.is_over and drain.left_s == 0 and not drain.due()
    assert drain.interrupt(signal.SIGINT) and drain.began and drain.exit_code == 130
    clock.now_s += ONE_PRESS_S / 2
    assert drain.interrupt(signal.SIGINT), "the launcher hands on what the terminal has said already"
    clock.now_s += ONE_PRESS_S
    assert not drain.interrupt(signal.SIGTERM) and drain.exit_code == 130
    assert drain.left_s == 10 - 1.5 * ONE_PRESS_S and not drain.is_over
    clock.now_s += 10
    assert drain.is_over and drain.left_s == 0


def test_another_rank_s_stop_is_a_drain_once() -> None:
    """`scancel` tells every rank, and each but rank 0 passes it on."""
    clock, flag = Clock(), StopFlag()
    ends: list[int] = []
    drain = flag.interrupts = Drain(10, clock)
    stopper = Stopper(flag, HeadWatch(), ends.append)  # type: ignore[arg-type]
    stopper.on_signal(signal.SIGTERM)
    clock.now_s += 3
    for rank in (1, 2, 3):
        stopper.on_request(f"rank {rank} was terminated")
    assert drain.began and drain.exit_code == 0 and not flag.reason and not ends
    stopper.on_signal(signal.SIGTERM)
    assert flag.reason == "terminated" and ends == [143]
