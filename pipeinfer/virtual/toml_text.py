"""Profiles as TOML text: checked values of a table, with errors that name their place, and the profile of a cluster's
measured times. Knows no model, no clock and no MPI, and opens no file. tomli_w is not used: it writes each number of a
list into a line, and tables of times could not be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from types import MappingProxyType
from typing import Any

from pipeinfer.cluster.assignment import Sizes
from pipeinfer.core.run_cost import interpolate
from pipeinfer.errors import UserError
from pipeinfer.text import shortened
from pipeinfer.virtual.costs import MANY_ROWS

LEAST, MOST = 1e-9, 1e12  # beyond any machine in any of the units, and no sum or product of them overflows


@dataclass(frozen=True, slots=True)
class TomlTable:
    """`where`: its place, for errors."""

    where: str
    values: Mapping[str, Any]

    def number(self, key: str, default: float | None = None) -> float:
        """0, or a number from LEAST to MOST. Raises UserError."""
        value = self.values.get(key, default)
        if value is None:
            raise UserError(f"{self.where} lacks {key}; give a number")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (value == 0 or LEAST <= value <= MOST):
            raise UserError(f"{self.where}: {key} = {_shown(value)}; give 0, or a number from {LEAST:g} to {MOST:g}")
        return float(value)

    def positive(self, key: str) -> float:
        value = self.number(key)
        if value == 0:
            raise UserError(f"{self.where}: {key} = 0; give a number above 0")
        return value

    def count(self, key: str, default: int | None = None, most: int = 10_000) -> int:
        value = self.number(key, default)
        if value != int(value) or not 1 <= value <= most:
            raise UserError(f"{self.where}: {key} = {value:g}; give a whole number from 1 to {most}")
        return int(value)

    def flag(self, key: str) -> bool:
        """False if it is missing. Raises UserError."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise UserError(f"{self.where}: {key} = {_shown(value)}; give true or false")
        return value

    def text(self, key: str, among: Sequence[str]) -> str:
        value = self.values.get(key)
        if value not in among:
            raise UserError(f"{self.where}: {key} = {_shown(value)}; there are {', '.join(among) or 'none'}")
        return str(value)

    def texts(self, one: str, several: str, among: Sequence[str]) -> list[str]:
        """One value under the key `one`, or a list of them under `several`."""
        values = self.values.get(several)
        if values is None:
            return [self.text(one, among)]
        if not isinstance(values, list) or not values:
            raise UserError(f"{self.where}: {several} = {_shown(values)}; give a list of names")
        return [TomlTable(f"{self.where}, {several}", {several: value}).text(several, among) for value in values]

    def numbers(self, key: str, n: int | None = None) -> tuple[float, ...]:
        """A list of numbers, `n` if that is given; a lone number is a list of one."""
        values = self.values.get(key)
        if n == 1 and not isinstance(values, list):
            return (self.number(key),)
        if not isinstance(values, list) or not values or (n is not None and len(values) != n):
            count = "numbers" if n is None else f"{n} numbers"
            raise UserError(f"{self.where}: {key} = {_shown(values)}; give a list of {count}")
        return tuple(TomlTable(f"{self.where}, {key}", {key: value}).number(key) for value in values)

    def table(self, key: str, default: Mapping[str, Any] | None = None) -> "TomlTable":
        value = self.values.get(key, default)
        if not isinstance(value, Mapping):
            raise UserError(f"{self.where} lacks the table [{key}]")
        return TomlTable(f"{self.where}, [{key}]", value)

    def tables(self, key: str) -> "dict[str, TomlTable]":
        return {name: self.table(key).table(name) for name in self.table(key, {}).values}

    def list_of(self, key: str) -> "list[TomlTable]":
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
            raise UserError(f"{self.where} lacks [[{key}]]")
        return [TomlTable(f"{self.where}, [[{key}]] {index}", item) for index, item in enumerate(value, start=1)]


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < MOST else f"{'-' * (value < 0)}{MOST:g} and more"
    return shortened(text, 80)


GUESSES_MAX = 32  # rows of a run of guesses; more are a chunk of a prompt
DISORDER_MAX = 1.5


def is_chunk(n_rows: int) -> bool:
    return n_rows > GUESSES_MAX


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """Times of a rank's model, in seconds. `beside_s`: rows of a run -> ranks of its host that compute -> its time."""

    layers: int
    by_rows: dict[int, float]  # rows of a run -> its time with an empty cache, after another run of that size
    context: int = 0
    in_context_s: dict[int, float] = field(default_factory=dict)  # rows of a run -> its time after `context` tokens
    reshape_s: float = 0.0  # more for a run of another size than the one before; rest_s: after a rest
    rest_s: float = 0.0
    prompt_s: float = 0.0  # more for the first run of a prompt in blocks
    beside_s: dict[int, dict[int, float]] = field(default_factory=dict)

    def context_s(self, n_rows: int) -> float:
        """Seconds for each layer, row and token before a run: from the times of guesses, or of chunks."""
        same_kind_s = {size: s for size, s in self.in_context_s.items() if is_chunk(size) == is_chunk(n_rows)}
        timed_s = same_kind_s or self.in_context_s
        sizes = tuple(map(float, timed_s))
        whole = self.context * self.layers
        grown_s = tuple(max(0.0, s - self.by_rows[size]) / (whole * size) for size, s in timed_s.items())
        return interpolate(sizes, grown_s, min(n_rows, sizes[-1])) if sizes else 0.0

    @property
    def disorder(self) -> float:
        """The largest ratio of a run's time to that of a run with more rows; above 1 if the timing was disturbed."""
        runs = sorted(self.by_rows.items())
        kinds = [[seconds for size, seconds in runs if is_chunk(size) is chunks] for chunks in (False, True)]
        return max((few / more for runs_s in kinds for few, more in combinations(runs_s, 2)), default=0.0)

    def row_s(self, context: float) -> float:
        """Seconds of one row after `context` tokens and a rest."""
        return self.by_rows[1] + self.context_s(1) * self.layers * context + self.rest_s


def disturbed_line(models: Sequence[ModelTimes]) -> str:
    """A warning about times that cannot be right; else empty."""
    worst = max((times.disorder for times in models), default=0.0)
    if worst <= DISORDER_MAX:
        return ""
    took = f"a run took up to {worst:.1f} times as long as one of more rows: something else computed meanwhile"
    return f"{took}, and this profile is as wrong; measure again when the machine is quiet"


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds beside the models' own: of a run in each stage, a hop; on the head a run, a verdict, a draft step."""

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
    """The TOML of a measured profile. `title`: lines of a comment. `sizes`: the target's. `drafts`: the smallest first.
    `slowdown`: if all ranks are on one host, rows of a run (1, MANY_ROWS) -> the slowdown of ranks that compute at
    once. `blocks`, `parked`: as in Profile."""
    flags = [f"{key} = true" for key, holds in (("blocks", blocks), ("parked", parked)) if holds]
    lines = [*(f"# {line}" for line in title), f"embd = {n_embd}", *flags, ""]
    lines += _table("[target]", {"layer_bytes": list(sizes.layer_bytes), "output_bytes": sizes.output_bytes})
    lines += _table("[link]", {"latency_us": 1e6 * extra.hop_s, "gbit_per_s": gbit_per_s})
    lines += _table("[head]", {"run_us": 1e6 * extra.run_s, "verdict_us": 1e6 * extra.verdict_s, "draft_us": 0.0})
    if slowdown:
        of_many = {"slowdown_of_many": list(slowdown[MANY_ROWS])}
        lines += _table("[host]", {"slowdown": list(slowdown[1]), **of_many})
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
