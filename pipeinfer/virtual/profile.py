"""Profiles of clusters in TOML, by hardware or by measured times. docs/reference/profiles.md has the keys."""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

from pipeinfer.cluster.spread import StageRoom, spread_layers
from pipeinfer.errors import UserError
from pipeinfer.text import count_text
from pipeinfer.virtual.costs import NO_WORK, HeadCost, HostWork, LinkCost, ModelCost, Profile, Work, roofline
from pipeinfer.virtual.toml_text import TomlTable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_EMBD = 1 << 20
MAX_LAYERS = 512  # more than any model has: all splits are searched
SHIPPED = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine: memory bandwidth and arithmetic that inference reaches, and further costs of a layer and a run."""

    name: str
    bytes_per_s: float
    flop_per_s: float
    layer_s: float
    run_s: float
    memory_bytes: float

    def slice_of(self, model: "Model", layers: int, is_last: bool) -> ModelCost:
        layer = roofline(model.layer_bytes, 2 * model.layer_params, self.bytes_per_s, self.flop_per_s, self.layer_s)
        layer = Work(layer.rows, layer.seconds, (model.kv_bytes / self.bytes_per_s,))
        output = roofline(model.output_bytes, 2 * model.output_params, self.bytes_per_s, self.flop_per_s)
        return ModelCost(f"{layers} layers on {self.name}", layers, layer, output if is_last else NO_WORK, self.run_s)


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model: of a layer, and of the output; `kv_bytes` for each token and layer."""

    name: str
    layers: int
    n_embd: int
    layer_bytes: float
    layer_params: float
    output_bytes: float
    output_params: float
    kv_bytes: float


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """The content of a profile."""

    name: str
    top: TomlTable

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
        """The costs of a model pair on the first `n_nodes` nodes (0: all). The first nodes are those of the drafts, if
        there are any. Raises UserError for a wrong file and for what does not fit."""
        if not self.by_hardware:
            return self._measured(n_nodes, pair, has_draft)
        most = self.n_nodes_max
        target, drafts, acceptance = self.models_of(pair)
        n_drafts = len(drafts) if has_draft else 0
        if (n_nodes or most) > most:
            raise UserError(f"{self.name} has {most} nodes, {n_nodes} are asked for; give at most {most}")
        if (n_nodes or most) <= n_drafts:
            few = f"is too few, as a draft has a node of its own; give {1 + n_drafts} at least"
            raise UserError(f"--nodes {n_nodes or most} of {self.name} {few}, or --policy iterative")
        machines = list(self.machines())[: n_nodes or most]
        hosts = machines[n_drafts:]
        if len(hosts) > target.layers:
            few = f"has {target.layers} layers, too few for {len(hosts)} stages"
            most = target.layers + n_drafts
            raise UserError(f"--nodes {len(machines)}: {target.name} {few}; give at most {most}")
        counts = share_layers(hosts, target)
        is_last = [False] * (len(hosts) - 1) + [True]
        parts = zip(hosts, counts, is_last, strict=True)
        stages = [host.slice_of(target, count, has_output) for host, count, has_output in parts]
        n_layers = [draft.layers for draft in drafts]
        name = f"{self.name}, {pair or self.pairs[0]}, {len(machines)} nodes"
        costs = tuple(map(Machine.slice_of, machines, drafts[:n_drafts], n_layers, repeat(True)))
        plain = Profile(
            name, target.n_embd, tuple(stages), costs, self.link(), self._head(), not has_draft, sleeps=True
        )
        return replace(plain, acceptance=acceptance, host=self._host_work())

    def _measured(self, n_nodes: int, pair: str, has_draft: bool) -> Profile:
        stages = tuple(map(_measured_slice, self.top.list_of("stages")))
        n_ranks = self.n_nodes_max
        if n_nodes not in (0, n_ranks):
            raise UserError(f"{self.name} was measured on {n_ranks} ranks and cannot tell of {n_nodes}; use {n_ranks}")
        if pair:
            raise UserError(f"{self.name} was measured with one pair of models; leave --pair {pair} out")
        drafts = tuple(map(_measured_slice, [self.top.table("draft"), *self._refiners]))
        host = self.top.table("host") if "host" in self.top.values else None
        return Profile(
            name=self.name,
            n_embd=self.top.count("embd", most=MAX_EMBD),
            stages=stages if has_draft else spread_over(stages, n_ranks, self._sizes(stages)),
            drafts=drafts if has_draft else (),
            link=self.link(),
            head=self._head(),
            head_is_first=not has_draft,
            slowdown=host.numbers("slowdown") if host else (),
            slowdown_of_many=host.numbers("slowdown_of_many") if host and "slowdown_of_many" in host.values else (),
            acceptance=self.top.numbers("acceptance", len(drafts)) if "acceptance" in self.top.values else (),
            host=self._host_work(),
            blocks=self.top.flag("blocks"),
            parked=self.top.flag("parked"),
        )

    def _sizes(self, stages: Sequence[ModelCost]) -> list[float]:
        """Sizes of the layers, the last with the output; else their times. Raises UserError for a wrong number."""
        n_layers, last = sum(stage.layers for stage in stages), stages[-1]
        if "target" not in self.top.values:
            return [last.layer.at(1)] * (n_layers - 1) + [last.layer.at(1) + last.output.at(1)]
        target = self.top.table("target")
        *sizes, size = target.numbers("layer_bytes", n_layers)
        return [*sizes, size + target.number("output_bytes")]

    @property
    def _refiners(self) -> list[TomlTable]:
        return self.top.list_of("refiners") if "refiners" in self.top.values else []

    def machines(self) -> Iterator[Machine]:
        """The machines of a profile by hardware, in pipeline order."""
        kinds = self.top.tables("nodes")
        for group in self.top.list_of("cluster"):
            name = group.text("node", list(kinds))
            for _ in range(group.count("count", 1)):
                yield _machine(name, kinds[name])

    def models_of(self, name: str) -> tuple[Model, list[Model], tuple[float, ...]]:
        """The target, the drafts and how often their best guesses are right; "": the first pair's. Raises UserError."""
        pairs, models = self.top.tables("pairs"), self.top.tables("models")
        if not pairs:
            raise UserError(f"{self.name} lacks [pairs.NAME]")
        name = name or next(iter(pairs))
        if name not in pairs:
            raise UserError(f"--pair {name}: {self.name} has {', '.join(pairs)}")
        pair = pairs[name]
        target, drafts = pair.text("target", list(models)), pair.texts("draft", "drafts", list(models))
        acceptance = pair.numbers("acceptance", len(drafts))
        return _model(target, models[target]), [_model(draft, models[draft]) for draft in drafts], acceptance

    def link(self) -> LinkCost:
        link = self.top.table("link")
        return LinkCost(1e-6 * link.number("latency_us"), 1e9 / 8 * link.positive("gbit_per_s"))

    def _host_work(self) -> HostWork:
        table = self.top.table("host_work", {})
        keys = ("prepare", "prepare_row", "sample", "meet")
        prepare_s, row_s, sample_s, meet_s = (1e-6 * table.number(f"{key}_us", 0.0) for key in keys)
        return HostWork(prepare_s, row_s, sample_s, meet_s)

    def _head(self) -> HeadCost:
        head = self.top.table("head", {})
        return HeadCost(*(1e-6 * head.number(key, 0.0) for key in ("run_us", "verdict_us", "draft_us")))


def _machine(name: str, table: TomlTable) -> Machine:
    read, compute = (1e9 * table.positive(key) for key in ("gb_per_s", "gflop_per_s"))
    layer_s, run_s = (1e-6 * table.number(key, 0.0) for key in ("layer_us", "run_us"))
    return Machine(name, read, compute, layer_s, run_s, 1e9 * table.number("memory_gb", 1e6))


def _model(name: str, table: TomlTable) -> Model:
    layers, n_embd = table.count("layers", most=MAX_LAYERS), table.count("embd", most=MAX_EMBD)
    layer_bytes, layer_params = (1e6 * table.positive(f"layer_{unit}") for unit in ("mb", "mparam"))
    output_bytes, output_params = (1e6 * table.positive(f"output_{unit}") for unit in ("mb", "mparam"))
    kv_bytes = 1e3 * table.number("kv_kb", 0.0)
    return Model(name, layers, n_embd, layer_bytes, layer_params, output_bytes, output_params, kv_bytes)


def _measured_slice(table: TomlTable) -> ModelCost:
    rows = table.numbers("rows")
    if list(rows) != sorted(set(rows)) or rows[0] < 1:
        raise UserError(f"{table.where}: rows = {list(rows)}; they must ascend from 1")
    layer_s = tuple(1e-3 * value for value in table.numbers("layer_ms", len(rows)))
    if not all(layer_s):
        raise UserError(f"{table.where}: layer_ms = {table.values['layer_ms']}; give times above 0")
    output = NO_WORK
    if "output_ms" in table.values:
        output = Work(rows, tuple(1e-3 * value for value in table.numbers("output_ms", len(rows))))
    layer = Work(rows, layer_s, _context_s(table, len(rows)))
    layers = table.count("layers", most=MAX_LAYERS)
    names = ("run_us", "reshape_us", "rest_us", "prompt_us")
    run_s, reshape_s, rest_s, prompt_s = (1e-6 * table.number(name, 0.0) for name in names)
    return ModelCost(f"{layers} layers", layers, layer, output, run_s, reshape_s, rest_s, prompt_s)


def _context_s(table: TomlTable, n: int) -> tuple[float, ...]:
    """Seconds of attention for each number of rows, or one for all."""
    if isinstance(table.values.get("context_ns"), list):
        return tuple(1e-9 * value for value in table.numbers("context_ns", n))
    return (1e-9 * table.number("context_ns", 0.0),)


def share_layers(machines: Sequence[Machine], model: Model) -> list[int]:
    """Layers for each machine, so that the slowest stage takes least time for single rows. Raises UserError."""
    n_stages, n_layers = len(machines), model.layers
    slices = [machine.slice_of(model, 1, True) for machine in machines]
    rows = [(each.layer.at(1), each.layer.at(1) + each.output.at(1)) for each in slices]
    names = tuple(f"stage {stage}" for stage in range(n_stages))
    room = StageRoom(
        needed=lambda _, first, last: (last - first) * model.layer_bytes + model.output_bytes * (last == n_layers),
        hosts=names,
        free={name: machine.memory_bytes for name, machine in zip(names, machines, strict=True)},
        limits=(math.inf,) * n_stages,
    )
    counts = spread_layers([[layer_s] * (n_layers - 1) + [last_s] for layer_s, last_s in rows], room)
    if not counts:
        n_room = sum(int(machine.memory_bytes // model.layer_bytes) for machine in machines)
        need = f"has {n_layers} layers and an output table; {count_text(n_stages, 'stage')} would hold {n_room} layers"
        raise UserError(f"{model.name} {need}; give more nodes")
    return counts


def spread_over(slices: Sequence[ModelCost], n_ranks: int, sizes: Sequence[float]) -> tuple[ModelCost, ...]:
    """The same layers on all `n_ranks`, split by size as in `run`. Ranks of drafts are as fast as the first stage."""
    n_layers = sum(each.layers for each in slices)
    if n_layers < n_ranks:
        raise UserError(f"{n_layers} layers were measured: no {n_ranks} stages without a draft")
    hosts = [*[slices[0]] * (n_ranks - len(slices)), *slices]
    counts = spread_layers([sizes] * n_ranks) or []
    stages = [
        replace(host, name=f"{n} layers", layers=n, output=NO_WORK) for host, n in zip(hosts, counts, strict=True)
    ]
    return (*stages[:-1], replace(stages[-1], output=hosts[-1].output))


def load_profile(name: str) -> ProfileFile:
    """A shipped profile by its name, or a file. Raises UserError if there is none, with the names of those shipped."""
    path = Path(name)
    if not path.suffix and not os.path.exists(path):  # False also for a name that no file can have
        path = SHIPPED / f"{name}.toml"
    try:
        return parse_profile(path.stem, path.read_text(encoding="utf-8"), f"profile {path.name}")
    except FileNotFoundError:
        raise UserError(f"no profile {name}; give a TOML file or one of {', '.join(shipped_profiles())}") from None
    except OSError as error:
        raise UserError(f"profile {name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of thousands of digits, a deep nest
        raise UserError(f"profile {name}: {error}") from None


def parse_profile(name: str, text: str, where: str) -> ProfileFile:
    """`where`: its name in errors. Raises ValueError and RecursionError for what is no TOML."""
    return ProfileFile(name, TomlTable(where, tomllib.loads(text)))


def shipped_profiles() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))
