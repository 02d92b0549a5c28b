"""The devices of each rank: its backend, the number of layers on GPUs, and which GPUs of its host. Pure functions of
options and hosts; loads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pipeinfer.cluster.hosts.cores import Host, ranks_there
from pipeinfer.cluster.shares import share_of
from pipeinfer.errors import UserError
from pipeinfer.job.options.backends import Backend
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO_LAYERS, NO_DEVICE
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.sections import Placement
from pipeinfer.models.torch.params import AUTO, CUDA


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The backend and devices that compute layers on a rank.

    n_gpu_layers  layers of a slice that libllama puts on GPUs; negative: all
    devices       names of libllama's devices for them; None: all that it sees; empty: none
    turn          index among the ranks of its host that share the GPUs through torch
    is_named      the user named the devices
    """

    backend: Backend = Backend()  # noqa: RUF009 (it is frozen)
    n_gpu_layers: int = 0
    devices: tuple[str, ...] | None = None
    turn: int = 0
    is_named: bool = False

    @property
    def is_torch(self) -> bool:
        return self.backend.is_torch

    @property
    def uses_gpus(self) -> bool:
        """Whether libllama puts layers on GPUs."""
        return self.n_gpu_layers != 0 and not self.is_torch

    @property
    def kernels(self) -> Backend:
        """The backend and its type, without the device: what decides the bits."""
        return Backend(self.backend.name, dtype=self.backend.dtype)

    @property
    def name(self) -> str:
        """The devices as on the command line; empty: the user named none."""
        return "+".join(self.devices or NO_DEVICE) if self.is_named else ""


class RankDevices(NamedTuple):
    """The devices of a rank's layers of the target, and of drafts."""

    target: DevicePlan
    draft: DevicePlan


def plan_devices(options: RunOptions, hosts: Sequence[Host]) -> tuple[RankDevices, ...]:
    """The devices of each rank. `hosts`: with `offloads` and `gpu_names`. Raises UserError as `check_devices` does."""
    if options.planned:
        return tuple(
            RankDevices(_planned(rank["target"]), _planned(rank["draft"] or rank["target"]))
            for rank in options.planned.decisions["ranks"]
        )
    check_devices(options, len(hosts))
    targets = [_target(options, hosts, rank) for rank in range(len(hosts))]
    drafts = [_draft(options, targets[rank]) for rank in range(len(hosts))]
    return tuple(
        RankDevices(*(_with_share(each, rank, targets, hosts) for each in (targets[rank], drafts[rank])))
        for rank in range(len(hosts))
    )


def _planned(device: Mapping[str, Any]) -> DevicePlan:
    """From the file of a plan."""
    names = None if device["devices"] is None else tuple(device["devices"])
    return DevicePlan(
        Backend.parse(device["backend"]), device["n_gpu_layers"], names, device["turn"], names is not None
    )


def _target(options: Placement, hosts: Sequence[Host], rank: int) -> DevicePlan:
    """The target's devices, before ranks share GPUs."""
    names = _names(options, rank, len(hosts))
    n_gpu_layers = _layers(options, rank)
    if n_gpu_layers == AUTO_LAYERS:
        n_gpu_layers = ALL_LAYERS if hosts[rank].offloads else 0
    turn = sum(_takes_turns(_backend(options, other)) for other in ranks_there(hosts, rank) if other < rank)
    devices = () if names == NO_DEVICE else names or None
    return DevicePlan(_backend(options, rank), n_gpu_layers, devices, turn, bool(names))


def _draft(options: Placement, target: DevicePlan) -> DevicePlan:
    """Those of the target's layers there, or of -ngld."""
    asked = options.n_gpu_layers_draft
    if asked == AUTO_LAYERS or (asked and target.is_torch):
        return target
    if asked == 0:
        return DevicePlan(turn=target.turn)
    return target if target.devices == () else replace(target, n_gpu_layers=asked)


def _with_share(own: DevicePlan, rank: int, targets: Sequence[DevicePlan], hosts: Sequence[Host]) -> DevicePlan:
    """With this rank's share of the GPUs, where several ranks of a host see them and the user named none."""
    if targets[rank].is_named or not own.uses_gpus:
        return own
    sharers = [
        other
        for other in ranks_there(hosts, rank)
        if other == rank or (hosts[other].gpus_given == hosts[rank].gpus_given and not targets[other].is_named
                             and targets[other].uses_gpus)
    ]  # fmt: skip
    names = hosts[rank].gpu_names
    if len(sharers) == 1 or not names:
        return own
    return replace(own, devices=tuple(share_of(names, sharers.index(rank), len(sharers))) or None)


def _takes_turns(backend: Backend) -> bool:
    """Whether torch chooses the GPU, in turns."""
    return backend.is_torch and backend.device in (AUTO, CUDA)


def _layers(options: Placement, rank: int) -> int:
    """Layers on GPUs, as given; 0 with --device none."""
    if options.device[rank % len(options.device)] == NO_DEVICE:
        return 0
    given = options.n_gpu_layers
    return given[rank] if len(given) > 1 else given[0]


def _names(options: Placement, rank: int, n_ranks: int) -> tuple[str, ...]:
    """Names of the devices, as given, or NO_DEVICE; empty: none. A lone rank has all of them."""
    given = options.device
    return tuple(name for names in given for name in names) if n_ranks == 1 else given[rank % len(given)]


def _backend(options: Placement, rank: int) -> Backend:
    return options.backend[rank] if len(options.backend) > 1 else options.backend[0]


# -- checks


def check_devices(options: Placement, n_ranks: int) -> None:
    """Raises UserError unless options of ranks have one value, or one a rank, and go together on each rank."""
    lists: tuple[tuple[str, tuple[Any, ...], Any, str], ...] = (
        ("--gpu-layers", options.n_gpu_layers, gpu_layers_text, ""),
        ("--backend", options.backend, str, ""),
        ("--device", options.device, device_text, " (several of one rank as CUDA0+CUDA1)"),
    )
    for flag, values, text, further in lists:
        if len(values) not in (1, n_ranks) and not (flag == "--device" and n_ranks == 1):
            raise UserError(
                f"{flag} {','.join(map(text, values))} has {len(values)} values, and the number of ranks is {n_ranks}; "
                f"give one, or one for each rank{further}"
            )
    for rank in range(n_ranks):
        _check_rank(rank, _backend(options, rank), _layers(options, rank), _names(options, rank, n_ranks))


def _check_rank(rank: int, backend: Backend, n_gpu_layers: int, names: tuple[str, ...]) -> None:
    """`names`: of its devices. Raises UserError for options that exclude each other."""
    shown = device_text(names)
    if backend.is_torch and n_gpu_layers:
        raise UserError(
            f"-ngl is for layers that libllama computes, and rank {rank} has --backend {backend}; torch puts all of a "
            "rank's layers on its GPU: leave -ngl out, or give it as 0 there"
        )
    if len(set(names)) < len(names) or ("none" in names and len(names) > 1):
        raise UserError(f"--device {shown}: rank {rank} has {shown}; name each device once, or none alone")
    if names and backend.is_torch:
        raise UserError(
            f"--device is for layers that libllama computes, and rank {rank} has --backend {backend}; say its device "
            "there (torch:cuda:1), and auto here"
        )
    if names not in ((), NO_DEVICE) and not n_gpu_layers:
        raise UserError(f"--device {shown}: rank {rank} has no layers for it, as -ngl is 0 there; give -ngl all, or a "
                        "number of layers")  # fmt: skip


def check_draft_gpu_layers(n_gpu_layers: int, devices: Sequence[RankDevices], ranks: Sequence[int]) -> None:
    """`n_gpu_layers`: -ngld; `ranks`: those with drafts. Raises UserError where torch computes such a draft."""
    if n_gpu_layers in (ALL_LAYERS, AUTO_LAYERS, 0):
        return
    for rank in ranks:
        if (backend := devices[rank].target.backend).is_torch:
            raise UserError(
                f"-ngld {n_gpu_layers} is for a draft that libllama computes, and rank {rank} has --backend "
                f"{backend}; give all, 0 (by libllama on the CPU), or a --backend for each rank"
            )


def check_one_backend(devices: Sequence[RankDevices], ranks: Sequence[int]) -> None:
    """Raises UserError if these ranks compute the target's layers with different backends or types: exact numerics
    cannot hold then."""
    ways: dict[str, list[int]] = {}
    for rank in ranks:
        ways.setdefault(str(devices[rank].target.kernels), []).append(rank)
    if len(ways) > 1:
        shown = ", ".join(
            f"rank{'s' * (len(own) > 1)} {' '.join(map(str, own))} {way}" for way, own in sorted(ways.items())
        )
        raise UserError(
            f"--numerics exact needs one --backend for all layers of the target, else the text depends on where it is "
            f"cut; here they have: {shown}; give one, or --numerics fast"
        )


def device_text(names: tuple[str, ...]) -> str:
    """As on the command line."""
    return "+".join(names) or "auto"


def gpu_layers_text(value: int) -> str:
    return {ALL_LAYERS: "all", AUTO_LAYERS: "auto"}.get(value, str(value))
