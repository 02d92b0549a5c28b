"""Clusters described in TOML, by their hardware or by what was measured on them -> a `Profile` of costs.

    [link]              latency_us, gbit_per_s
    [head]              run_us, verdict_us, draft_us: the engine's own work (optional)

By hardware, as published:

    [nodes.NAME]        gb_per_s, gflop_per_s: what inference reaches; layer_us, run_us: overheads; memory_gb (optional)
    [[cluster]]         node, count: in pipeline order; the first hosts the head and the draft
    [models.NAME]       layers, embd, layer_mb, layer_mparam, output_mb, output_mparam; kv_kb: a token and layer
    [pairs.NAME]        target, draft, acceptance; or drafts and acceptance as lists, the smallest draft first

By measurement:

    embd; blocks: whether prompts are cut into blocks, as with exact numerics (optional)
    [host]              slowdown: of a host that all ranks share: how many times as long work takes when 1, 2, … of
                        them compute (optional)
    [[stages]], [draft] layers, rows, layer_ms (one for each number of rows), output_ms, run_us, reshape_us,
                        rest_us; context_ns: a row and token before the run (one, or one for each number of rows)
    [[refiners]]        the same, of larger drafts on ranks of their own (optional)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeinfer.cluster.costs import NOTHING, HeadCost, LinkCost, ModelCost, Profile, Work, roofline
from pipeinfer.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LEAST, MOST = 1e-9, 1e12
"""Far beyond any machine in any of the units, and near enough to 1 that no sum or product of them overflows."""

MAX_EMBD = 1 << 20
MAX_SHOWN = 80
SHIPPED = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True)
class Node:
    """A machine: what inference reaches of its memory bandwidth and arithmetic; what a layer and a run cost on top."""

    name: str
    bytes_per_s: float
    flop_per_s: float
    layer_s: float
    run_s: float
    memory_bytes: float

    def slice_of(self, model: Model, layers: int, is_last: bool) -> ModelCost:
        layer = roofline(model.layer_bytes, 2 * model.layer_params, self.bytes_per_s, self.flop_per_s, self.layer_s)
        layer = Work(layer.rows, layer.seconds, (model.kv_bytes / self.bytes_per_s,))
        output = roofline(model.output_bytes, 2 * model.output_params, self.bytes_per_s, self.flop_per_s)
        return ModelCost(f"{layers} layers on {self.name}", layers, layer, output if is_last else NOTHING, self.run_s)


@dataclass(frozen=True, slots=True)
class Model:
    """What a model reads and computes: a layer, and the vocabulary at its end; `kv_bytes` a token and layer."""

    name: str
    layers: int
    n_embd: int
    layer_bytes: float
    layer_params: float
    output_bytes: float
    output_params: float
    kv_bytes: float


@dataclass(frozen=True, slots=True)
class Table:
    """A TOML table that knows where it is, so that errors can say so."""

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
        """False if it is not there. Raises UserError."""
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
        return [Table(f"{self.where}, {several}", {several: value}).text(several, among) for value in values]

    def numbers(self, key: str, n: int | None = None) -> tuple[float, ...]:
        """A list of numbers, `n` if that is given; a lone number is a list of one."""
        values = self.values.get(key)
        if n == 1 and not isinstance(values, list):
            return (self.number(key),)
        if not isinstance(values, list) or not values or (n is not None and len(values) != n):
            wanted = "numbers" if n is None else f"{n} numbers"
            raise UserError(f"{self.where}: {key} = {_shown(values)}; give a list of {wanted}")
        return tuple(Table(f"{self.where}, {key}", {key: value}).number(key) for value in values)

    def table(self, key: str, default: Mapping[str, Any] | None = None) -> Table:
        value = self.values.get(key, default)
        if not isinstance(value, Mapping):
            raise UserError(f"{self.where} lacks the table [{key}]")
        return Table(f"{self.where}, [{key}]", value)

    def tables(self, key: str) -> dict[str, Table]:
        return {name: self.table(key).table(name) for name in self.table(key, {}).values}

    def list_of(self, key: str) -> list[Table]:
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
            raise UserError(f"{self.where} lacks [[{key}]]")
        return [Table(f"{self.where}, [[{key}]] {index}", item) for index, item in enumerate(value, start=1)]


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """A file, read and ready to be laid out."""

    name: str
    top: Table

    @property
    def by_hardware(self) -> bool:
        return "cluster" in self.top.values

    @property
    def pairs(self) -> list[str]:
        return list(self.top.tables("pairs"))

    @property
    def n_nodes_max(self) -> int:
        if not self.by_hardware:
            return len(self.top.list_of("stages")) + 1 + len(self._refiners)
        return sum(group.count("count", 1) for group in self.top.list_of("cluster"))

    def lay_out(self, n_nodes: int = 0, pair: str = "", has_draft: bool = True) -> Profile:
        """The costs of a model pair on the first `n_nodes` nodes (0: all). With drafts the first nodes are theirs, else
        the target has all.

        Raises UserError for whatever is wrong with the file or does not fit.
        """
        if not self.by_hardware:
            return self._measured(n_nodes, pair, has_draft)
        most = self.n_nodes_max
        target, drafts, acceptance = self._pair(pair)
        n_drafts = len(drafts) if has_draft else 0
        if not 1 + n_drafts <= (n_nodes or most) <= most:
            raise UserError(f"{n_nodes} nodes of {self.name}, which has {most}; give {1 + n_drafts} to {most}")
        nodes = list(self._nodes())[: n_nodes or most]
        hosts = nodes[n_drafts:]
        counts = share_layers(hosts, target)
        stages = [
            node.slice_of(target, count, index + 1 == len(hosts))
            for index, (node, count) in enumerate(zip(hosts, counts, strict=True))
        ]
        return Profile(
            name=f"{self.name}, {pair or self.pairs[0]}, {len(nodes)} nodes",
            n_embd=target.n_embd,
            stages=tuple(stages),
            drafts=tuple(
                node.slice_of(draft, draft.layers, True) for node, draft in zip(nodes[:n_drafts], drafts, strict=False)
            ),
            link=self._link(),
            head=self._head(),
            head_is_first=not has_draft,
            sleeps=True,
            acceptance=acceptance,
        )

    def _measured(self, n_nodes: int, pair: str, has_draft: bool) -> Profile:
        stages = tuple(map(_measured_slice, self.top.list_of("stages")))
        n_ranks = self.n_nodes_max
        if n_nodes not in (0, n_ranks):
            raise UserError(f"{self.name} was measured on {n_ranks} ranks and cannot tell of {n_nodes}; use {n_ranks}")
        if pair:
            raise UserError(f"{self.name} was measured with one pair of models; leave --pair {pair} out")
        drafts = tuple(map(_measured_slice, [self.top.table("draft"), *self._refiners]))
        return Profile(
            name=self.name,
            n_embd=self.top.count("embd", most=MAX_EMBD),
            stages=stages if has_draft else spread_over(stages, n_ranks),
            drafts=drafts if has_draft else (),
            link=self._link(),
            head=self._head(),
            head_is_first=not has_draft,
            slowdown=self.top.table("host").numbers("slowdown") if "host" in self.top.values else (),
            acceptance=self.top.numbers("acceptance", len(drafts)) if "acceptance" in self.top.values else (),
            blocks=self.top.flag("blocks"),
        )

    @property
    def _refiners(self) -> list[Table]:
        return self.top.list_of("refiners") if "refiners" in self.top.values else []

    def _nodes(self) -> Iterator[Node]:
        kinds = self.top.tables("nodes")
        for group in self.top.list_of("cluster"):
            name = group.text("node", list(kinds))
            for _ in range(group.count("count", 1)):
                yield _node(name, kinds[name])

    def _pair(self, name: str) -> tuple[Model, list[Model], tuple[float, ...]]:
        pairs, models = self.top.tables("pairs"), self.top.tables("models")
        if not pairs:
            raise UserError(f"{self.name} lacks [pairs.NAME]")
        name = name or next(iter(pairs))
        if name not in pairs:
            raise UserError(f"--pair {name}: {self.name} has {', '.join(pairs)}")
        pair = pairs[name]
        target, drafts = pair.text("target", list(models)), pair.texts("draft", "drafts", list(models))
        found = [_model(draft, models[draft]) for draft in drafts]
        return _model(target, models[target]), found, pair.numbers("acceptance", len(found))

    def _link(self) -> LinkCost:
        link = self.top.table("link")
        return LinkCost(1e-6 * link.number("latency_us"), 1e9 / 8 * link.positive("gbit_per_s"))

    def _head(self) -> HeadCost:
        head = self.top.table("head", {})
        return HeadCost(*(1e-6 * head.number(key, 0.0) for key in ("run_us", "verdict_us", "draft_us")))


def _node(name: str, table: Table) -> Node:
    return Node(
        name,
        1e9 * table.positive("gb_per_s"),
        1e9 * table.positive("gflop_per_s"),
        1e-6 * table.number("layer_us", 0.0),
        1e-6 * table.number("run_us", 0.0),
        1e9 * table.number("memory_gb", 1e6),
    )


def _model(name: str, table: Table) -> Model:
    return Model(
        name,
        table.count("layers"),
        table.count("embd", most=MAX_EMBD),
        1e6 * table.positive("layer_mb"),
        1e6 * table.positive("layer_mparam"),
        1e6 * table.positive("output_mb"),
        1e6 * table.positive("output_mparam"),
        1e3 * table.number("kv_kb", 0.0),
    )


def _measured_slice(table: Table) -> ModelCost:
    rows = table.numbers("rows")
    if list(rows) != sorted(set(rows)) or rows[0] < 1:
        raise UserError(f"{table.where}: rows = {list(rows)}; they must ascend from 1")
    layer_s = tuple(1e-3 * value for value in table.numbers("layer_ms", len(rows)))
    if not all(layer_s):
        raise UserError(f"{table.where}: layer_ms = {table.values['layer_ms']}; give times above 0")
    output = NOTHING
    if "output_ms" in table.values:
        output = Work(rows, tuple(1e-3 * value for value in table.numbers("output_ms", len(rows))))
    layer = Work(rows, layer_s, _context_s(table, len(rows)))
    layers = table.count("layers")
    fixed_s = [1e-6 * table.number(name, 0.0) for name in ("run_us", "reshape_us", "rest_us")]
    return ModelCost(f"{layers} layers", layers, layer, output, *fixed_s)


def _context_s(table: Table, n: int) -> tuple[float, ...]:
    """Of each number of rows, or one for all."""
    if isinstance(table.values.get("context_ns"), list):
        return tuple(1e-9 * value for value in table.numbers("context_ns", n))
    return (1e-9 * table.number("context_ns", 0.0),)


def share_layers(nodes: Sequence[Node], model: Model) -> list[int]:
    """Layers for each node, so that the slowest stage is as fast as it can be for single rows. Raises UserError."""
    layer_s = [node.slice_of(model, 1, False).layer.at(1) for node in nodes]
    output_s = nodes[-1].slice_of(model, 1, True).output.at(1)
    room = [int(node.memory_bytes // model.layer_bytes) for node in nodes]
    if len(nodes) > model.layers or sum(room) < model.layers:
        raise UserError(
            f"{model.name} has {model.layers} layers: {len(nodes)} stages have room for {sum(room)}; "
            f"give {'fewer' if len(nodes) > model.layers else 'more'} nodes"
        )
    return even_counts(model.layers, layer_s, output_s, room)


def even_counts(n_layers: int, layer_s: Sequence[float], output_s: float, room: Sequence[int]) -> list[int]:
    """Layers a stage, at most `room`, so that the slowest is as fast as it can be. `layer_s`: of a layer there;
    `output_s`: of the vocabulary in the last."""
    last = len(layer_s) - 1

    def most(limit_s: float) -> list[int]:
        limits = [limit_s] * last + [limit_s - output_s]
        return [
            max(1, min(n, int(limit / one_s + 1e-9))) for limit, one_s, n in zip(limits, layer_s, room, strict=True)
        ]

    # the best limit is one that some stage just fills
    limits = sorted(
        {
            n * one_s + (output_s if i == last else 0.0)
            for i, one_s in enumerate(layer_s)
            for n in range(1, n_layers + 1)
        }
    )
    counts = next(counts for limit in limits if sum(counts := most(limit)) >= n_layers)
    surplus = sum(counts) - n_layers
    while surplus:
        # take the layers that are too many from where they cost most, so that the stages stay even
        index = max((i for i in range(len(counts)) if counts[i] > 1), key=lambda i: counts[i] * layer_s[i])
        counts[index] -= 1
        surplus -= 1
    return counts


def spread_over(stages: Sequence[ModelCost], n_ranks: int) -> tuple[ModelCost, ...]:
    """The same layers on all `n_ranks` ranks, the drafts' too, which are taken to be like the first stage's."""
    hosts = [*[stages[0]] * (n_ranks - len(stages)), *stages]
    n_layers = sum(stage.layers for stage in stages)
    if n_layers < n_ranks:
        raise UserError(f"{n_layers} layers were measured: no {n_ranks} stages without a draft")
    output_s = stages[-1].output.at(1)
    counts = even_counts(n_layers, [host.layer.at(1) for host in hosts], output_s, [n_layers] * n_ranks)
    outputs = [NOTHING] * (n_ranks - 1) + [stages[-1].output]
    return tuple(
        replace(host, name=f"{count} layers", layers=count, output=output)
        for host, count, output in zip(hosts, counts, outputs, strict=True)
    )


def load_profile(name: str) -> ProfileFile:
    """A shipped profile by its name, or a file. Raises UserError when there is no such thing, naming those shipped."""
    path = Path(name)
    if not path.suffix and not os.path.exists(path):  # False also for a name that no file can have
        path = SHIPPED / f"{name}.toml"
    try:
        top = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no profile {name}; give a TOML file or one of {', '.join(shipped_profiles())}") from None
    except OSError as error:
        raise UserError(f"profile {name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of thousands of digits, a deep nest
        raise UserError(f"profile {name}: {error}") from None
    return ProfileFile(path.stem, Table(f"profile {path.name}", top))


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < MOST else f"{'-' * (value < 0)}{MOST:g} and more"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def shipped_profiles() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))
