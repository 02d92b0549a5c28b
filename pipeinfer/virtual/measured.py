"""What was measured of a cluster, and the profile in TOML that says so. Knows no model, no clock and no MPI.

The TOML is written here, not by tomli_w: that gives every number of a list a line of its own, so that nobody could
compare the rows of a table, which are to be read side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from types import MappingProxyType

from pipeinfer.cluster.assignment import Sizes
from pipeinfer.cluster.timing.costs import MANY_ROWS
from pipeinfer.core.interpolation import interpolate

GUESSES_MAX = 32  # rows of a run of guesses; more are a chunk of a prompt
DISORDER_MAX = 1.5


def is_chunk(n_rows: int) -> bool:
    return n_rows > GUESSES_MAX


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """What one rank timed: rows of a run -> seconds at an empty cache, after another run of that size; what a run of
    another size adds, what one after a rest adds, and what the first run of a prompt in blocks adds; rows -> seconds of
    a run after `context` tokens; rows -> how many ranks of its host computed at once, 1 being itself -> seconds."""

    layers: int
    by_rows: dict[int, float]
    context: int = 0
    in_context_s: dict[int, float] = field(default_factory=dict)
    reshape_s: float = 0.0
    rest_s: float = 0.0
    prompt_s: float = 0.0
    beside_s: dict[int, dict[int, float]] = field(default_factory=dict)

    def context_s(self, n_rows: int) -> float:
        """Seconds a layer, row and token before a run of so many rows: by what is known of guesses, or of chunks."""
        alike = {size: s for size, s in self.in_context_s.items() if is_chunk(size) == is_chunk(n_rows)}
        timed_s = alike or self.in_context_s
        sizes = tuple(map(float, timed_s))
        grown_s = tuple(
            max(0.0, seconds - self.by_rows[size]) / (self.context * self.layers * size)
            for size, seconds in timed_s.items()
        )
        return interpolate(sizes, grown_s, min(n_rows, sizes[-1])) if sizes else 0.0

    @property
    def disorder(self) -> float:
        """The most times as long that a run took as one of more rows; 1 or less where nothing disturbed the timing."""
        kinds = [
            [seconds for size, seconds in sorted(self.by_rows.items()) if is_chunk(size) is chunks]
            for chunks in (False, True)
        ]
        return max((few / more for runs_s in kinds for few, more in combinations(runs_s, 2)), default=0.0)

    def row_s(self, context: float) -> float:
        """Seconds of one row after so many tokens and a rest."""
        return self.by_rows[1] + self.context_s(1) * self.layers * context + self.rest_s


def disturbed_line(models: Sequence[ModelTimes]) -> str:
    """What the user should know of times that cannot be right; empty if all may be."""
    worst = max((times.disorder for times in models), default=0.0)
    if worst <= DISORDER_MAX:
        return ""
    return (
        f"a run took up to {worst:.1f} times as long as one of more rows: something else computed meanwhile, and this "
        "profile is as wrong; measure again when the machine is quiet"
    )


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds beyond the models' own: of each stage a run, of a hop, of the head for a run, a verdict, a draft step."""

    stage_s: tuple[float, ...]
    hop_s: float
    run_s: float
    verdict_s: float
    draft_s: float


def profile_toml(
    title: Sequence[str],
    n_embd: int,
    sizes: Sizes,
    stages: Sequence[ModelTimes],
    drafts: Sequence[ModelTimes],
    extra: Overheads,
    gbit_per_s: float,
    slowdown: Mapping[int, Sequence[float]] = MappingProxyType({}),
    blocks: bool = False,
    parked: bool = False,
) -> str:
    """A profile by measurement. `title`: lines of a comment. `sizes`: the target's. `drafts`: the smallest first.
    `slowdown`: if all ranks are on one host, rows of a run (1, MANY_ROWS) -> by how much those that compute at once
    slow each other down. `blocks`: prompts are cut into such. `parked`: rejected cells stay taken until all are
    packed."""
    flags = [f"{key} = true" for key, holds in (("blocks", blocks), ("parked", parked)) if holds]
    lines = [*(f"# {line}" for line in title), f"embd = {n_embd}", *flags, ""]
    lines += _table("[target]", {"layer_bytes": list(sizes.layer_bytes), "output_bytes": sizes.output_bytes})
    lines += _table("[link]", {"latency_us": 1e6 * extra.hop_s, "gbit_per_s": gbit_per_s})
    lines += _table("[head]", {"run_us": 1e6 * extra.run_s, "verdict_us": 1e6 * extra.verdict_s, "draft_us": 0.0})
    if slowdown:
        found = {"slowdown": list(slowdown[1]), "slowdown_of_many": list(slowdown[MANY_ROWS])}
        lines += _table("[host]", found)
    for times, run_s in zip(stages, extra.stage_s, strict=True):
        lines += _slice("[[stages]]", times, run_s)
    for number, times in enumerate(drafts):
        lines += _slice("[[refiners]]" if number else "[draft]", times, 0.0 if number else extra.draft_s)
    return "\n".join(lines)


def _slice(header: str, times: ModelTimes, run_s: float) -> list[str]:
    layer_ms = [1e3 * seconds / times.layers for seconds in times.by_rows.values()]
    content: dict[str, object] = {"layers": times.layers, "rows": list(times.by_rows), "layer_ms": layer_ms}
    content["context_ns"] = [1e9 * times.context_s(n_rows) for n_rows in times.by_rows]
    fixed = {"run_us": 1e6 * run_s, "reshape_us": 1e6 * times.reshape_s, "rest_us": 1e6 * times.rest_s}
    fixed["prompt_us"] = 1e6 * times.prompt_s
    return _table(header, content | fixed)


def _table(header: str, content: Mapping[str, object]) -> list[str]:
    return [header, *(f"{key} = {_value(value)}" for key, value in content.items()), ""]


def _value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return f"{round(value, 9):.4g}" if isinstance(value, float) else str(value)
