"""Seconds of a run in the slowest stage, timed at loading and corrected by what stages report, and when it wants a run.
Knows rows, tokens and times; no model, no pipeline, no tree and no policy."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from functools import lru_cache

from pipeinfer.core.levels import InFlightRun
from pipeinfer.core.types import Clock

CHEAP = 1.25  # rows are cheap while a run costs at most so many times a single row; beyond two smaller runs are better
MEMORY = 0.98  # the weight of an observation after the next one
FAITH_IN_TIMES, FAITH_IN_SLOPE = 2.0, 5.0
"""Weights, in observations, of the timed costs and of a timed slope. While all runs have one row, an excess after a
short context means a busy machine, and after a long one attention."""

LARGEST_EXCESS = 3.0  # an observation exceeds what was expected by at most this factor: ranks are interrupted
PER_TOKENS = 1000.0

CHUNK_MEMORY = 4  # chunks of prompts in the running mean of their costs; a long prompt has a dozen
CHUNKS = (8, 16, 32, 64, 128, 256, 512, 1024)  # sizes of chunks that are considered beside those timed
NEARLY, WORTH = 1.25, 2.0  # how much longer prompts may take in larger chunks than in the best, and in the largest
TILED = 2.0  # how much cheaper than linear rows beyond those timed may be, as kernels are tiled


class RunCost:
    """Seconds of a run of n rows after m tokens: scale × (timed(n) + timed slope × n × m) + slope × n × m.

    `timed`: rows -> seconds at an empty cache, in the slowest stage; 1 must be among the rows. Other sizes are
    interpolated. `crowding`: threads that compute on each core. `n_sharing`: ranks that compute on one host at most;
    together they may have been slower at loading by that factor. `chunk`: rows and seconds of a chunk of a prompt,
    which has other kernels; without it chunks cost what runs do. `context_s`: seconds that each token before a row adds
    to it, as timed; 0: unknown. The scale is how much slower everything is than at loading, the slope what attention
    adds; both are fitted by recursive least squares with forgetting."""

    def __init__(
        self,
        timed: Mapping[int, float],
        crowding: float = 1.0,
        chunk: tuple[int, float] | None = None,
        context_s: float = 0.0,
        n_sharing: int = 1,
    ) -> None:
        self._row_s, self._crowding, self._n_sharing = timed[1], crowding, n_sharing
        self._rows = tuple(timed)
        self._known_shares: dict[int, float] = {}  # results of `_timed`
        self._shares = tuple(seconds / self._row_s for seconds in timed.values())  # in units of one row's time
        self._sizes = tuple(zip(self._rows, self._shares, strict=True))
        self._scale, self._slope = 1.0, 0.0
        self._timed_slope = context_s * PER_TOKENS / self._row_s
        # moments of (timed after those tokens, n × m) and their products with what was observed
        self._tt, self._tx, self._xx = 0.0, 0.0, 0.0
        self._ty, self._xy = 0.0, 0.0
        self._cheap: tuple[int, int] | None = None  # tokens before it, rows
        self._chunk_scale = chunk[1] / self.seconds(chunk[0], 0) if chunk else 1.0

    def seconds(self, n_rows: int, n_before: int) -> float:
        """Of a run after `n_before` tokens."""
        return self._row_s * self._expected(self._timed(n_rows), n_rows * n_before / PER_TOKENS)

    def undisturbed_s(self, n_before: int) -> float:
        """The least seconds of a single row while no other rank of its host computes."""
        return self._row_s * (1 + self._timed_slope * n_before / PER_TOKENS) / self._n_sharing

    def n_cheap_rows(self, n_before: int) -> int:
        """The largest timed size of a run that costs hardly more than one row."""
        if self._cheap is None or self._cheap[0] != n_before:
            limit = CHEAP * self._expected(1.0, n_before / PER_TOKENS)
            cheap = 1
            for n, timed in self._sizes:
                if n > cheap and self._expected(timed, n * n_before / PER_TOKENS) <= limit:
                    cheap = n
            self._cheap = n_before, cheap
        return self._cheap[1]

    def n_chunk_rows(self, n_left: int, n_stages: int, most: int) -> int:
        """The size of chunks, at most `most`, in which `n_left` rows of prompts pass the stages soonest. Small chunks
        fill the pipeline, rows of large ones cost less, and messages and waiting ranks cost time that is not known
        here. So it is the largest chunk that is nearly as good as the best, and `most` if little is gained."""
        most = min(most, n_left)
        took = {n: self._prompt_share(n, n_left, n_stages) for n in {most, *self._rows, *CHUNKS} if n <= most}
        best = min(took.values())
        if took[most] <= WORTH * best:
            return most
        return max(n for n, share in took.items() if share <= NEARLY * best)

    def _prompt_share(self, n_rows: int, n_left: int, n_stages: int) -> float:
        n_chunks, share = -(-n_left // n_rows), self._timed(n_rows)
        if n_rows > self._rows[-1]:
            share = max(self._shares[-1], share / TILED)
        return max(n_stages - 1 + n_chunks, self._crowding * n_chunks) * share

    def learn(self, n_rows: int, n_before: int, seconds: float) -> None:
        """A run took the slowest stage so many seconds."""
        x = n_rows * n_before / PER_TOKENS
        t = self._timed(n_rows) + self._timed_slope * x
        y = min(seconds / self._row_s, LARGEST_EXCESS * (self._scale * t + self._slope * x))
        self._tt, self._tx, self._xx = MEMORY * self._tt + t * t, MEMORY * self._tx + t * x, MEMORY * self._xx + x * x
        self._ty, self._xy = MEMORY * self._ty + t * y, MEMORY * self._xy + x * y
        tt, ty = self._tt + FAITH_IN_TIMES, self._ty + FAITH_IN_TIMES
        xx = self._xx + FAITH_IN_SLOPE
        least = -self._timed_slope * ty / (tt - self._tx * self._timed_slope)  # cancels the timed slope
        self._slope = max(least, (tt * self._xy - self._tx * ty) / (tt * xx - self._tx**2))
        self._scale = max(0.0, (ty - self._tx * self._slope) / tt)
        self._cheap = None

    def chunk_seconds(self, n_rows: int, n_before: int) -> float:
        """Of a chunk of a prompt after `n_before` tokens."""
        return self._chunk_scale * self.seconds(n_rows, n_before)

    def learn_chunk(self, n_rows: int, n_before: int, seconds: float) -> None:
        """A chunk of a prompt took the slowest stage so many seconds."""
        if (guesses_s := self.seconds(n_rows, n_before)) > 0:
            scale = min(seconds / guesses_s, LARGEST_EXCESS * self._chunk_scale)
            self._chunk_scale += (scale - self._chunk_scale) / CHUNK_MEMORY

    def _expected(self, timed: float, x: float) -> float:
        return self._scale * timed + (self._scale * self._timed_slope + self._slope) * x

    def _timed(self, n_rows: int) -> float:
        """In units of one row's time, at an empty cache."""
        share = self._known_shares.get(n_rows)
        if share is None:
            share = float(n_rows) if len(self._rows) == 1 else interpolate(self._rows, self._shares, n_rows)
            if n_rows > self._rows[-1] and len(self._rows) > 1:
                share = max(share, self._shares[-1])  # more rows than were timed never cost less
            self._known_shares[n_rows] = share
        return share


@lru_cache(maxsize=1 << 14)
def interpolate(xs: tuple[float, ...], ys: tuple[float, ...], x: float) -> float:
    """The value at `x`: the first before all points, the last line continued after them. `xs` ascend."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    upper = min(bisect_left(xs, x), len(xs) - 1)
    lower = upper - 1
    if xs[upper] == xs[lower]:
        return ys[upper]
    return ys[lower] + (ys[upper] - ys[lower]) * (x - xs[lower]) / (xs[upper] - xs[lower])


# -- pace

PACE_MEMORY = 8  # observations in a running mean of times
MARGIN_S, OFF, LOOKAHEAD = 1e-3, 2.0, 0.5
"""A run is due before the slowest stage is free, to be there in time: by MARGIN_S, and OFF times the recent errors of
costs and of the head, but by LOOKAHEAD of a one-row run at most. A run that is sent later uses more verdicts."""


class Pacer:
    """Adds up the expected costs of what was sent. Without `run_cost` nothing is ever early."""

    def __init__(self, run_cost: RunCost | None, clock: Clock) -> None:
        self.run_cost, self.clock = run_cost, clock
        self._free_s = -math.inf  # when the slowest stage will have done what was sent
        self._off_s = self._late_s = 0.0  # running means: error of costs; how late a run that was due was asked for
        self.answer_s = 0.0  # from sending a run to its verdict, a running mean; 0 before the first
        self.on_way_s = 0.0  # of that, all but the slowest stage's time, the least of recent runs; 0 before the first
        self._n_prompts = 0  # runs of prompts in flight

    def due_s(self, n_before: int, oldest_sent_s: float = math.inf, patience: float = 0.0) -> float:
        """Until when a run would only be queued, or miss a verdict that is about to come. `n_before`: tokens before it.
        `oldest_sent_s`: when the run was sent whose verdict comes next. `patience`: the share of a one-row run for
        which the slowest stage may be idle if that verdict is there by then."""
        if self.run_cost is None:
            return -math.inf
        row_s = self.run_cost.seconds(1, n_before)
        due_s = self._free_s - min(LOOKAHEAD * row_s, MARGIN_S + OFF * (self._off_s + self._late_s))
        if oldest_sent_s + self.answer_s <= due_s + patience * row_s:
            due_s += patience * row_s
        return due_s

    def asked_late(self, seconds: float) -> None:
        """A run was asked for so long after it was due."""
        if self.run_cost:
            self._late_s = _mean(self._late_s, min(seconds, self.run_cost.seconds(1, 0)))

    def sent(self, flight: InFlightRun) -> None:
        """A run was submitted: note when, and what it should cost."""
        flight.sent_s, flight.queued = self.clock(), self._n_prompts > 0
        self._n_prompts += flight.n_context > 0
        if self.run_cost:
            flight.cost_s = self.run_cost.seconds(flight.n_rows, flight.n_before)
            self._free_s = max(self._free_s, flight.sent_s) + flight.cost_s

    def landed(self, flight: InFlightRun, slowest_s: float, left_s: float) -> float:
        """A verdict has come; returns when. Only a run that every stage evaluated as a whole teaches costs.
        `slowest_s`: what it took the slowest stage; 0: unknown. `left_s`: expected costs of runs still in flight."""
        now_s = self.clock()
        self._free_s = min(self._free_s, now_s + left_s)
        self._n_prompts -= flight.n_context > 0
        if not flight.whole:
            return now_s
        if not flight.n_context:
            took_s = now_s - flight.sent_s
            self.answer_s = _mean(self.answer_s, took_s) if self.answer_s else took_s
            if slowest_s:
                self._off_s = _mean(self._off_s, abs(slowest_s - flight.cost_s))
                if not flight.queued:
                    on_way_s = max(0.0, took_s - slowest_s)  # the least: the others met queues
                    self.on_way_s = min(_mean(self.on_way_s, on_way_s), on_way_s) if self.on_way_s else on_way_s
        if slowest_s and self.run_cost:
            learn = self.run_cost.learn_chunk if flight.n_context else self.run_cost.learn
            learn(flight.n_rows, flight.n_before, slowest_s)
        return now_s

    def given_up(self) -> None:
        """Runs were cancelled: the stages are free as soon as they hear of it."""
        self._free_s = -math.inf


def _mean(mean: float, value: float) -> float:
    return mean + (value - mean) / PACE_MEMORY
