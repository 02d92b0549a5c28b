"""Seconds of a run in the slowest stage: timed at loading, corrected by what stages report of runs.

Knows numbers of rows and tokens; no model, no pipeline and no clock.
"""

from collections.abc import Mapping

from pipeinfer.core.interpolation import interpolate

CHEAP = 1.25
"""Rows are cheap while a run costs at most so many times a single row; two smaller runs are better beyond it."""

MEMORY = 0.98
"""The weight of an observation after the next one."""

FAITH_IN_TIMES, FAITH_IN_SLOPE = 2.0, 5.0
"""Weights, in observations, of the timed costs and of a timed slope. While all runs have one row, an excess after a
short context means a busy machine, and after a long one attention."""

LARGEST_EXCESS = 3.0
"""The largest factor by which an observation exceeds what was expected: ranks are interrupted now and then."""

PER_TOKENS = 1000.0

CHUNK_MEMORY = 4
"""Chunks of prompts in the running mean of their costs; a long prompt has a dozen."""

CHUNKS = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Sizes of chunks that are considered beside those timed."""

NEARLY, WORTH = 1.25, 2.0
"""How much longer prompts may take in larger chunks than in the best, and in the largest chunk."""

TILED = 2.0
"""How much cheaper than linear rows beyond those timed may be, as kernels are tiled."""


class RunCost:
    """Seconds of a run of n rows after a context: scale × (timed(n) + timed slope × n × context) + slope × n × context.

    `timed`: rows -> seconds at an empty cache, in the slowest stage; 1 must be among the rows. Other sizes are
    interpolated. `crowding`: threads that compute on each core. `n_sharing`: ranks that compute on one host at most;
    together they may have been slower at loading by that factor. `chunk`: rows and seconds of a chunk of a prompt,
    which has other kernels; without it chunks cost what runs do. `context_s`: seconds that each token before a row adds
    to it, as timed; 0: unknown. The scale is how much slower everything is than at loading, the slope what attention
    adds; both are fitted by recursive least squares with forgetting.
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
        """Of a run after `context` tokens."""
        return self._row_s * self._expected(self._timed(n_rows), n_rows * context / PER_TOKENS)

    def undisturbed_s(self, context: int) -> float:
        """The least seconds of a single row while no other rank of its host computes."""
        return self._row_s * (1 + self._timed_slope * context / PER_TOKENS) / self._n_sharing

    def n_cheap_rows(self, context: int) -> int:
        """The largest timed size of a run that costs hardly more than one row."""
        if self._cheap is None or self._cheap[0] != context:
            limit = CHEAP * self._expected(1.0, context / PER_TOKENS)
            cheap = 1
            for n, timed in self._sizes:
                if n > cheap and self._expected(timed, n * context / PER_TOKENS) <= limit:
                    cheap = n
            self._cheap = context, cheap
        return self._cheap[1]

    def n_chunk_rows(self, n_left: int, n_stages: int, most: int) -> int:
        """The size of chunks, at most `most`, in which `n_left` rows of prompts pass the stages soonest.

        Small chunks fill the pipeline, rows of large ones cost less, and messages and waiting ranks cost time that is
        not known here. So it is the largest chunk that is nearly as good as the best, and `most` if little is gained.
        """
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
        """A run took the slowest stage so many seconds."""
        x = n_rows * context / PER_TOKENS
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

    def chunk_seconds(self, n_rows: int, context: int) -> float:
        """Of a chunk of a prompt after `context` tokens."""
        return self._chunk_scale * self.seconds(n_rows, context)

    def learn_chunk(self, n_rows: int, context: int, seconds: float) -> None:
        """A chunk of a prompt took the slowest stage so many seconds."""
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
        # more rows than were timed never cost less
        return max(share, self._shares[-1]) if n_rows > self._rows[-1] else share
