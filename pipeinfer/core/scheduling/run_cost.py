"""What a run costs the slowest stage: timed at loading, corrected by what the stages report of each run since.

Knows numbers of rows and tokens; no model, no pipeline and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeinfer.core.interpolation import interpolate

CHEAP = 1.25
"""A run may cost this many times a single row: beyond it, two smaller runs use a pipeline better."""

MEMORY = 0.98
"""What an observation still weighs after the next one."""

FAITH_IN_TIMES, FAITH_IN_SLOPE = 2.0, 5.0
"""How firmly it is believed, in observations, that runs take as long as timed and that their context costs no more than
that. If only single rows are seen, an excess after a short context means a busy machine, after a long one attention."""

LARGEST_EXCESS = 3.0
"""An observation counts as this many times what was expected at most: ranks are interrupted now and then."""

PER_TOKENS = 1000.0

CHUNK_MEMORY = 4
"""Chunks of prompts over which it is averaged what such cost: a long prompt has a dozen."""

CHUNKS = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Sizes of chunks that are thought about besides those timed."""

NEARLY, WORTH = 1.25, 2.0
"""How much longer than in the best chunks prompts may take in larger ones, and in the largest."""

TILED = 2.0
"""By how much rows beyond those timed may be cheaper than a straight line has them: kernels work on them in tiles."""


class RunCost:
    """Seconds of a run of n rows after a context: scale × (timed(n) + timed slope × n × context) + slope × n × context.

    `timed`: rows -> seconds at an empty cache, in the slowest stage; 1 must be among the rows. Runs of other sizes:
    straight lines, the last one continued. `crowding`: threads that compute on each core. `n_sharing`: ranks that
    compute on one host at most; together they may have been slower at loading by that factor. `chunk`: rows and seconds
    of a chunk of a prompt, whose kernels are others; without it chunks are thought to be as any run. `context_s`:
    seconds that a row takes longer for each token before it, as timed; 0 where that is not known. The scale is how much
    slower than at loading everything is now, the slope what attention takes besides; both are fitted to what was
    observed by recursive least squares with forgetting.
    """

    def __init__(
        self, timed: Mapping[int, float], crowding: float = 1.0, chunk: tuple[int, float] | None = None,
        context_s: float = 0.0, n_sharing: int = 1,
    ) -> None:  # fmt: skip
        self._row_s, self._crowding, self._n_sharing = timed[1], crowding, n_sharing
        self._rows = tuple(timed)
        self._known: dict[int, float] = {}  # what `_timed` said
        self._shares = tuple(seconds / self._row_s for seconds in timed.values())  # in units of one row's time
        self._sizes = tuple(zip(self._rows, self._shares, strict=True))
        self._scale, self._slope = 1.0, 0.0
        self._timed_slope = context_s * PER_TOKENS / self._row_s
        # moments of (timed at that context, n × context) and their products with what was observed
        self._tt, self._tx, self._xx = 0.0, 0.0, 0.0
        self._ty, self._xy = 0.0, 0.0
        self._cheap: tuple[int, int] | None = None  # context, rows
        self._chunk_scale = chunk[1] / self.seconds(chunk[0], 0) if chunk else 1.0

    def seconds(self, n_rows: int, context: int) -> float:
        """`context`: tokens before the run."""
        return self._row_s * self._expected(self._timed(n_rows), n_rows * context / PER_TOKENS)

    def undisturbed_s(self, context: int) -> float:
        """The least that a single row takes when no other rank of its host computes."""
        return self._row_s * (1 + self._timed_slope * context / PER_TOKENS) / self._n_sharing

    def n_cheap_rows(self, context: int) -> int:
        """The most rows, of the sizes timed, that a run may have without costing much more than one."""
        if self._cheap is None or self._cheap[0] != context:
            limit = CHEAP * self._expected(1.0, context / PER_TOKENS)
            cheap = 1
            for n, timed in self._sizes:
                if n > cheap and self._expected(timed, n * context / PER_TOKENS) <= limit:
                    cheap = n
            self._cheap = context, cheap
        return self._cheap[1]

    def n_chunk_rows(self, n_left: int, n_stages: int, most: int) -> int:
        """In chunks of how many rows, `most` at most, `n_left` rows of prompts are through the stages soon. The first
        chunk takes a stage's time in each of them and every further one that once more: many small ones fill the
        pipeline, few large ones cost a row less, and messages and waiting ranks take time that is not known here. So
        it is the largest chunk that is nearly as good as the best, and the most where that gains little."""
        most = min(most, n_left)
        took = {n: self._prompt_share(n, n_left, n_stages) for n in {most, *self._rows, *CHUNKS} if n <= most}
        best = min(took.values())
        if took[most] <= WORTH * best:
            return most
        return max(n for n, share in took.items() if share <= NEARLY * best)

    def _prompt_share(self, n_rows: int, n_left: int, n_stages: int) -> float:
        n_chunks = -(-n_left // n_rows)
        return max(n_stages - 1 + n_chunks, self._crowding * n_chunks) * self._chunk_share(n_rows)

    def _chunk_share(self, n_rows: int) -> float:
        if n_rows <= self._rows[-1]:
            return self._timed(n_rows)
        return max(self._shares[-1], self._timed(n_rows) / TILED)

    def learn(self, n_rows: int, context: int, seconds: float) -> None:
        """A run has taken the slowest stage so long."""
        x = n_rows * context / PER_TOKENS
        t = self._timed(n_rows) + self._timed_slope * x
        y = min(seconds / self._row_s, LARGEST_EXCESS * (self._scale * t + self._slope * x))
        self._tt, self._tx, self._xx = MEMORY * self._tt + t * t, MEMORY * self._tx + t * x, MEMORY * self._xx + x * x
        self._ty, self._xy = MEMORY * self._ty + t * y, MEMORY * self._xy + x * y
        tt, ty = self._tt + FAITH_IN_TIMES, self._ty + FAITH_IN_TIMES
        xx = self._xx + FAITH_IN_SLOPE
        least = -self._timed_slope * ty / (tt - self._tx * self._timed_slope)  # takes back all that was timed
        self._slope = max(least, (tt * self._xy - self._tx * ty) / (tt * xx - self._tx**2))
        self._scale = max(0.0, (ty - self._tx * self._slope) / tt)
        self._cheap = None

    def chunk_seconds(self, n_rows: int, context: int) -> float:
        """Of rows of a prompt, by how much longer or shorter such took before than runs of guesses would."""
        return self._chunk_scale * self.seconds(n_rows, context)

    def learn_chunk(self, n_rows: int, context: int, seconds: float) -> None:
        """A run with rows of a prompt has taken the slowest stage so long."""
        if (guesses_s := self.seconds(n_rows, context)) > 0:
            scale = min(seconds / guesses_s, LARGEST_EXCESS * self._chunk_scale)
            self._chunk_scale += (scale - self._chunk_scale) / CHUNK_MEMORY

    def _expected(self, timed: float, x: float) -> float:
        return self._scale * timed + (self._scale * self._timed_slope + self._slope) * x

    def _timed(self, n_rows: int) -> float:
        """In units of one row's time, at an empty cache."""
        found = self._known.get(n_rows)
        if found is None:
            found = self._known[n_rows] = self._continued(n_rows)
        return found

    def _continued(self, n_rows: int) -> float:
        if len(self._rows) == 1:
            return float(n_rows)
        share = interpolate(self._rows, self._shares, n_rows)
        # more rows than the most that were timed never cost less than those
        return max(share, self._shares[-1]) if n_rows > self._rows[-1] else share
