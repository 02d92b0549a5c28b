"""The devices of each rank: its backend, the number of layers on GPUs, and which GPUs of its host. Pure functions of
options and hosts; loads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pipeinfer.cluster.hosts.host import Host, ranks_there
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO_LAYERS, NO_DEVICE
from pipeinfer.job.options.options import JobPlacement
from pipeinfer.job.options.values import Backend
from pipeinfer.models.llama.tensor_places import TensorPlace, TensorPlaces
from pipeinfer.models.torch.params import AUTO, CUDA


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The backend and devices that compute layers on a rank."""

    backend: Backend = Backend()  # noqa: RUF009 (it is frozen)
    n_gpu_layers: int = 0  # layers of a slice that libllama puts on GPUs; negative: all
    devices: tuple[str, ...] | None = None  # names of libllama's devices for them; None: all that it sees; empty: none
    turn: int = 0  # index among the ranks of its host that share the GPUs through torch
    is_named: bool = False  # the user named the devices
    places: TensorPlaces = TensorPlaces()  # noqa: RUF009 (it is frozen)

    @property
    def is_torch(self) -> bool:
        return self.backend.is_torch

    @property
    def uses_gpus(self) -> bool:
        return self.n_gpu_layers != 0 and not self.is_torch

    def n_on_gpus(self, n_layers: int) -> int:
        """How many of a slice's layers libllama puts on GPUs: the last ones."""
        return n_layers if self.n_gpu_layers < 0 else min(n_layers, self.n_gpu_layers)

    @property
    def numeric_backend(self) -> Backend:
        """The backend and its type, without the device: what decides the bits."""
        return Backend(self.backend.name, dtype=self.backend.dtype)

    @property
    def name(self) -> str:
        """The devices as on the command line; empty: the user named none."""
        return "+".join(self.devices or NO_DEVICE) if self.is_named else ""

    @property
    def decisions(self) -> dict[str, Any]:
        """As plain data; see `from_decisions`."""
        devices = None if self.devices is None else list(self.devices)
        places = {"n_cpu_moe": self.places.n_cpu_moe, "override_tensor": list(map(str, self.places.by_name))}
        backend, n_gpu_layers = str(self.backend), self.n_gpu_layers
        return {"backend": backend, "n_gpu_layers": n_gpu_layers, "devices": devices, "turn": self.turn} | places

    @classmethod
    def from_decisions(cls, values: Mapping[str, Any]) -> "DevicePlan":
        names = None if values["devices"] is None else tuple(values["devices"])
        backend = Backend.parse(values["backend"])
        by_name = tuple(map(TensorPlace.parse, values.get("override_tensor", ())))
        places = TensorPlaces(by_name, values.get("n_cpu_moe", 0))
        return cls(backend, values["n_gpu_layers"], names, values["turn"], names is not None, places)


class RankDevices(NamedTuple):
    """The devices of a rank's layers of the target, and of drafts."""

    target: DevicePlan
    draft: DevicePlan


class RankOptions(NamedTuple):
    """The options of one rank. `names`: of its devices, or NO_DEVICE; empty: not given. `servers`: of RPC."""

    backend: Backend
    n_gpu_layers: int
    names: tuple[str, ...]
    servers: tuple[str, ...]
    places: TensorPlaces


def plan_devices(options: JobPlacement, hosts: Sequence[Host]) -> tuple[RankDevices, ...]:
    """The devices of each rank. `hosts`: with `offloads` and `gpu_names`. Raises UserError as `rank_options` does."""
    if options.planned:
        planned = [(each["target"], each["draft"] or each["target"]) for each in options.planned.decisions["ranks"]]
        return tuple(RankDevices(*map(DevicePlan.from_decisions, both)) for both in planned)
    there = [ranks_there(hosts, rank) for rank in range(len(hosts))]
    by_rank = rank_options(options, len(hosts))
    # torch chooses the GPU, in turns
    takes_turns = [each.backend.is_torch and each.backend.device in (AUTO, CUDA) for each in by_rank]
    targets = []
    for rank, host in enumerate(hosts):
        turn = sum(takes_turns[other] for other in there[rank] if other < rank)
        targets.append(_target(by_rank[rank], host.offloads, turn))

    def shared(plan: DevicePlan, rank: int) -> DevicePlan:
        return _with_share(plan, rank, there[rank], targets, hosts)

    both = ((target, _draft(options, target)) for target in targets)
    return tuple(RankDevices(shared(target, rank), shared(draft, rank)) for rank, (target, draft) in enumerate(both))


def _target(options: RankOptions, offloads: bool, turn: int) -> DevicePlan:
    """The target's devices, before ranks share GPUs."""
    n_gpu_layers, names = options.n_gpu_layers, options.names
    if n_gpu_layers == AUTO_LAYERS:
        n_gpu_layers = ALL_LAYERS if offloads else 0
    devices, places = () if names == NO_DEVICE else names or None, options.places if n_gpu_layers else TensorPlaces()
    return DevicePlan(options.backend, n_gpu_layers, devices, turn, bool(names), places)


def _draft(options: JobPlacement, target: DevicePlan) -> DevicePlan:
    """The devices of a draft: those of the rank's target layers, or by -ngld. Its tensors are where its layers are."""
    target = replace(target, places=TensorPlaces())
    n_gpu_layers = options.n_gpu_layers_draft
    if n_gpu_layers == AUTO_LAYERS or (n_gpu_layers and target.is_torch):
        return target
    if n_gpu_layers == 0:
        return DevicePlan(turn=target.turn)
    return target if target.devices == () else replace(target, n_gpu_layers=n_gpu_layers)


def _with_share(
    plan: DevicePlan, rank: int, there: Sequence[int], targets: Sequence[DevicePlan], hosts: Sequence[Host]
) -> DevicePlan:
    """With this rank's share of its host's GPUs, unless the user named them. `there`: the ranks of that host."""
    names, host = hosts[rank].gpu_names, hosts[rank]
    if targets[rank].is_named or not plan.uses_gpus or not names:
        return plan
    sharers = [
        other
        for other in there
        if other == rank
        or (hosts[other].gpus_given == host.gpus_given and not targets[other].is_named and targets[other].uses_gpus)
    ]
    if len(sharers) == 1:
        return plan
    return replace(plan, devices=tuple(share_of(names, sharers.index(rank), len(sharers))) or None)


def share_of(names: Sequence[str], index: int, n_sharers: int) -> Sequence[str]:
    """The consecutive GPUs of one of `n_sharers`, equally many for each; neighbours share one if they are too few."""
    first, last = index * len(names) // n_sharers, (index + 1) * len(names) // n_sharers
    return names[first : max(last, first + 1)]


# -- options of each rank


def rank_options(options: JobPlacement, n_ranks: int) -> list[RankOptions]:
    """The options of each rank. Raises UserError unless they have one value, or one a rank, and go together."""
    lists: tuple[tuple[str, tuple[Any, ...], Any, str], ...] = (
        ("--gpu-layers", options.n_gpu_layers, gpu_layers_text, ""),
        ("--backend", options.backend, str, ""),
        ("--device", options.device, device_text, " (several of one rank as CUDA0+CUDA1)"),
        ("--n-cpu-moe", options.n_cpu_moe, gpu_layers_text, ""),
        ("--rpc", options.rpc, servers_text, " (several of one rank as HOST:PORT+HOST:PORT)"),
    )
    for flag, values, text, further in lists:
        if len(values) not in (1, n_ranks) and not (flag in ("--device", "--rpc") and n_ranks == 1):
            several = f"has {len(values)} values, and the number of ranks is {n_ranks}"
            shown = ",".join(map(text, values))
            raise UserError(f"{flag} {shown} {several}; give one, or one for each rank{further}")
    by_rank = []
    for rank in range(n_ranks):
        n_gpu_layers, backend, names, n_cpu_moe = (values[rank % len(values)] for _, values, *_ in lists[:4])
        if names == NO_DEVICE:
            n_gpu_layers = 0
        if n_ranks == 1:  # a lone rank has all devices
            names = tuple(name for of_rank in options.device for name in of_rank)
        places = TensorPlaces(options.override_tensor, ALL_LAYERS if options.cpu_moe else n_cpu_moe)
        by_rank.append(RankOptions(backend, n_gpu_layers, names, options.servers_of(rank, n_ranks), places))
        _check_rank(rank, *by_rank[-1][:4])
    return by_rank


def _check_rank(
    rank: int, backend: Backend, n_gpu_layers: int, names: tuple[str, ...], servers: tuple[str, ...]
) -> None:
    """Raises UserError for options that exclude each other."""
    shown = device_text(names)
    if backend.is_torch and n_gpu_layers:
        torch = f"rank {rank} has --backend {backend}; torch puts all of a rank's layers on its GPU"
        raise UserError(
            f"-ngl is for layers that libllama computes, and {torch}: leave -ngl out, or give it as 0 there"
        )
    if len(set(names)) < len(names) or ("none" in names and len(names) > 1):
        raise UserError(f"--device {shown}: rank {rank} has {shown}; name each device once, or none alone")
    if names and backend.is_torch:
        torch = f"rank {rank} has --backend {backend}; say its device there (torch:cuda:1), and auto here"
        raise UserError(f"--device is for layers that libllama computes, and {torch}")
    for flag, values in (("--device", () if names == NO_DEVICE else names), ("--rpc", servers)):
        if values and not n_gpu_layers:
            none = f"rank {rank} has no layers for it, as -ngl is 0 there; give -ngl all, or a number of layers"
            raise UserError(f"{flag} {'+'.join(values)}: {none}")


def check_servers(servers: Sequence[Sequence[str]], hosts: Sequence[str]) -> None:
    """Raises UserError for an RPC server that two ranks have; at a loopback address it is another one on each host."""
    first: dict[tuple[str, str], int] = {}
    for rank, (of_rank, host) in enumerate(zip(servers, hosts, strict=True)):
        for server in of_rank:
            other = first.setdefault((server, host if server.startswith(("localhost:", "127.")) else ""), rank)
            if other != rank:
                one = "a server serves one rank at a time; give each rank one of its own, or none"
                raise UserError(f"--rpc {server}: ranks {other} and {rank} have it, and {one}")


def servers_text(servers: tuple[str, ...]) -> str:
    """As on the command line."""
    return "+".join(servers or NO_DEVICE)


def device_text(names: tuple[str, ...]) -> str:
    """As on the command line."""
    return "+".join(names) or "auto"


def gpu_layers_text(value: int) -> str:
    return {ALL_LAYERS: "all", AUTO_LAYERS: "auto"}.get(value, str(value))
