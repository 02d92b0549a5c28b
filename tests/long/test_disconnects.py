"""500 clients of four streams leave at random moments: the others have their own texts, and wait no longer for that.

A round begins four streams, and few or none after them, so that nobody else's coming helps a stream that was forgotten.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest

from tests.long.asking import Stream, ask, random_request
from tests.support.serving import Served, growth, open_texts, sizes

pytestmark = pytest.mark.long

N_STREAMS, N_DISCONNECTS, N_DIFFERENT = 4, 500, 40
STALL_S = 10.0
"""Nothing comes of a stream for so long: it is forgotten. A token takes some milliseconds."""

LATEST_PIECE = 8
"""After so many at most a client leaves."""

MARGIN_S = 0.5
"""By so much a wait may be longer than any without disconnects: cores are shared with the clients."""


@dataclass
class Rounds:
    """Streams of a server, four at a time. `alone`: the text of each request by itself."""

    served: Served
    alone: Sequence[str]
    rng: random.Random
    kept: list[Stream] = field(default_factory=list)
    n_left: int = 0
    n_rounds: int = 0
    _local: threading.local = field(default_factory=threading.local)

    def play(self, pool: ThreadPoolExecutor, n_leaving: int) -> None:
        """One round, to the end of all streams that nobody leaves."""
        self.n_rounds += 1
        rng, numbers = self.rng, [self.rng.randrange(N_DIFFERENT) for _ in range(N_STREAMS)]
        plans = [
            (rng.random() * 0.03, rng.randint(0, LATEST_PIECE) if at < n_leaving else -1) for at in range(N_STREAMS)
        ]
        rng.shuffle(plans)
        further = [rng.randrange(N_DIFFERENT)] if rng.random() < 0.2 else []
        round = list(zip(numbers, plans, strict=True))
        for streams in pool.map(lambda each: self._streams(round, [each[0], *further], *each[1]), round):
            self.n_left += sum(stream.left for stream in streams)
            self.kept += [stream for stream in streams if not stream.left]

    def _streams(self, round: object, numbers: Sequence[int], pause_s: float, n_pieces: int) -> list[Stream]:
        """Ask for the first of these requests and read, or leave where that is planned; then the next one follows."""
        time.sleep(pause_s)
        number, *further = numbers
        stream, wanted = Stream(number), self.alone[number]
        try:
            stream.read(self._http, n_pieces)
        except AssertionError as stall:
            raise AssertionError(
                f"round {self.n_rounds} of (request, (pause, pieces until it is left)) {round}, then {further}: {stall}"
            ) from None
        assert stream.text == (wanted[: len(stream.text)] if stream.left else wanted), f"request {number}"
        return [stream, *(self._streams(round, further, 0.0, -1) if stream.left and further else [])]

    @property
    def _http(self) -> httpx.Client:
        """This thread's."""
        if not hasattr(self._local, "http"):
            self._local.http = httpx.Client(base_url=self.served.url, timeout=STALL_S)
        client: httpx.Client = self._local.http
        return client

    def figures(self) -> str:
        ttfts, gaps = (_quantiles(values) for values in self._waits_s)
        return (
            f"{self.n_rounds} rounds, {self.n_left} left, {len(self.kept)} read to their ends; ms, p50, p99, most: "
            f"TTFT {ttfts}; longest gap {gaps}"
        )

    @property
    def _waits_s(self) -> tuple[list[float], list[float]]:
        return [stream.ttft_s for stream in self.kept], [stream.longest_gap_s for stream in self.kept]

    @property
    def longest_s(self) -> tuple[float, float]:
        """The longest wait for a first token, and for any after it."""
        ttfts_s, gaps_s = self._waits_s
        return max(ttfts_s), max(gaps_s)


def _quantiles(values: Sequence[float]) -> str:
    ordered = sorted(values)
    return ", ".join(f"{1e3 * ordered[at]:.0f}" for at in (len(ordered) // 2, int(0.99 * len(ordered)), -1))


@pytest.mark.parametrize("policy", ["auto", "pipeinfer"])
@pytest.mark.parametrize("draft_rank", [0, 1])
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_who_leaves_holds_nobody_up(n_ranks: int, draft_rank: int, policy: str) -> None:
    check(n_ranks, ["--policy", policy, "--draft-rank", str(draft_rank)])


@pytest.mark.parametrize("draft_rank", [0, 1])
def test_who_leaves_makes_room(draft_rank: int) -> None:
    """The context is too small for all streams: some wait until others have ended, or have their cells taken."""
    check(2, ["--draft-rank", str(draft_rank), "-c", "256"])


def check(n_ranks: int, options: Sequence[str]) -> None:
    words = ["--parallel", str(N_STREAMS), *options]
    with Served(n_ranks, words, by_pid=True) as served, ThreadPoolExecutor(N_STREAMS) as pool:
        alone = [ask(served.http, *random_request(number)) for number in range(N_DIFFERENT)]
        calm, hasty = (Rounds(served, alone, random.Random(f"{words}")) for _ in range(2))
        calm.play(pool, 0)
        before = sizes(served)
        while hasty.n_left < N_DISCONNECTS:  # in turns, as the machine may be busier at times
            hasty.play(pool, hasty.rng.randint(1, N_STREAMS - 1))
            hasty.play(pool, hasty.rng.randint(1, N_STREAMS - 1))
            calm.play(pool, 0)
        served.until(lambda: not open_texts(served.http), timeout_s=STALL_S)
        print(f"\nnobody leaves: {calm.figures()}\nsome leave: {hasty.figures()}\n{growth(before, sizes(served))}")
    for found_s, wanted_s in zip(hasty.longest_s, calm.longest_s, strict=True):
        assert found_s < 2 * wanted_s + MARGIN_S
