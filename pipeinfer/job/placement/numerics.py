"""The numerics of a job: everything that decides the bits of its texts beside models and requests, and its name. Free
memory, the number of ranks, threads and the policy are no part of it. Knows no request."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pipeinfer.cluster.hosts.host import Host
from pipeinfer.cluster.wire import WireType
from pipeinfer.job.options.sections import Numerics
from pipeinfer.job.placement.devices import DevicePlan
from pipeinfer.models.gguf.layers import F16_CACHE, CacheTypes
from pipeinfer.models.gguf.model_info import LONG, ModelInfo
from pipeinfer.models.llama.ggml import type_name
from pipeinfer.models.llama.params import (
    GROUP,
    MANY,
    MANY_TILED,
    LlamaParams,
    TypeRows,
    rows_in_groups,
    types_in_groups,
    worth_repacking,
)

Devices = Iterable[DevicePlan]

N_DIGITS = 4  # of a digest of what repacked kernels add up to: they differ between processors
IN_GROUPS = re.compile(r"\.x(\d)")  # in the names of numerics whose rows come in groups; see `named_numerics`


@dataclass(frozen=True, slots=True)
class NumericsPlan:
    """Jobs of the same name give the same texts. `repacked`: types of the target's weights that are repacked with
    `exact`, and how rows of each are computed. `at_once`: with layers on GPUs, how many rows a device computes at once
    such that each has the bits that it has alone, on every device; 0: no number is proven."""

    name: str = ""
    exact: bool = True  # a row has the same bits in every batch and tree
    repack: bool = True  # libllama may copy weights into the layout of faster kernels
    repacked: tuple[TypeRows, ...] = ()
    at_once: int = 0
    blocks: bool = False  # prompts are evaluated in blocks that follow from their length; see pipeinfer.core.blocks
    parked: bool = False  # rejected cells of the target stay taken until all are packed: exact, or layers with a window
    wire_type: WireType = WireType.F32  # of activations between ranks
    cache: CacheTypes = F16_CACHE  # types of the target's keys and values, where `exact` does not choose them
    draft_cache: CacheTypes = F16_CACHE


def may_repack(options: Numerics) -> bool:
    """Whether weights of the target may be repacked with exact numerics."""
    return options.repack and options.numerics == "exact"


def repacked_alike(hosts: Sequence[Host], info: ModelInfo, n_requests: int, name: str) -> tuple[TypeRows, ...]:
    """Types of the target's weights that are repacked, and how rows of each are computed; none where that is no faster.
    A layer must have the same bits on every rank: all hosts must repack the same types with the same results. Rows come
    in groups where a job is opened for many requests, or for numerics of this `name`, if it is not empty."""
    if len({host.repacked for host in hosts}) > 1:
        return ()
    in_parts = worth_repacking(info, LlamaParams(0), tuple(TypeRows(*each[:2]) for each in hosts[0].repacked))
    if len({host.grouped for host in hosts}) > 1:
        return in_parts
    if name:
        group = IN_GROUPS.search(name)
        n_requests = 1 if group is None else MANY if int(group[1]) == GROUP else MANY_TILED
    repacked, alike = [each[0] for each in hosts[0].repacked], [each[:2] for each in hosts[0].grouped]
    return types_in_groups(info, in_parts, repacked, alike, n_requests) or in_parts


def numerics_of(options: Numerics, repacked: tuple[TypeRows, ...], at_once: int, blocks: bool) -> NumericsPlan:
    """The numerics before ranks have their layers, with the options' part of the name alone."""
    exact, types = options.numerics == "exact", (options.wire_type, options.cache, options.draft_cache)
    return NumericsPlan(options.rounding, exact, options.repack, repacked, at_once, blocks, False, *types)


def unnamed_numerics(
    options: Numerics, hosts: Sequence[Host], info: ModelInfo, devices: Devices, n_requests: int = 1, name: str = ""
) -> NumericsPlan:
    """The numerics before layers are assigned. `devices`: of the target's ranks; `n_requests`, `name`: see
    `repacked_alike`. With layers of the target on GPUs no weights are repacked, and rows come in the proven parts."""
    is_exact, is_on_cpus = options.numerics == "exact", all(device.n_gpu_layers == 0 for device in devices)
    repacked = repacked_alike(hosts, info, n_requests, name) if may_repack(options) and is_exact and is_on_cpus else ()
    # a layer must have the same bits on every device
    proofs = [each for host in hosts for each in host.exact_rows]
    are_alike = len({digest for _, digest in proofs}) == 1
    at_once = min(n_rows for n_rows, _ in proofs) if is_exact and not is_on_cpus and are_alike else 0
    return numerics_of(options, repacked, at_once, info.layers.architecture.flash and is_exact and is_on_cpus)


def named_numerics(
    plan: NumericsPlan,
    target: Sequence[DevicePlan],
    host: Host,
    adapters: str = "",
    is_long: bool = False,
    window: int = 0,
) -> NumericsPlan:
    """`target`: what computes each of its stages. `host`: of one of them; all repack alike. `adapters`: a digest, or
    empty. `is_long`: of two sets of rope factors the long one is used. `window`: of the model's layers; 0: none.

    A name is such as `exact`, `exact-lora-51d0c2aa`, `exact-long`, `exact-q4_0.32-1f3a`, `exact-q4_k.x4-q6_k.x4-9c07`
    (in groups), `fast-q8_0-f16`, `exact-torch`; with layers on GPUs `exact-gpu-51d0`, which is exact, or `exact-gpu`,
    which is not, and `exact-gpu-ot-8e01` where some of their tensors are elsewhere."""
    parts = [plan.name, *(["lora", adapters] if adapters else []), *([LONG] if is_long else [])]
    if plan.repacked:
        parts += [f"{type_name(each.type)}.{'x' * each.in_groups}{each.n_rows}" for each in plan.repacked]
        group, used = rows_in_groups(plan.repacked), {each.type for each in plan.repacked}
        tried = host.grouped if group else host.repacked
        results = "".join(digest for type, n_rows, digest in tried if type in used and (n_rows == group or not group))
        parts.append(hashlib.sha256(results.encode()).hexdigest()[:N_DIGITS])
    parts += sorted(str(kernels) for kernels in {device.numeric_backend for device in target if device.is_torch})
    parts += ["gpu"] if any(device.uses_gpus for device in target) else []
    places = "; ".join(sorted({device.places.text for device in target if device.places.text}))
    parts += ["ot", hashlib.sha256(places.encode()).hexdigest()[:N_DIGITS]] if places and not plan.at_once else []
    # none on a rank that has the draft alone, for which `plan` predicts a policy without guesses
    parts += [digest[:N_DIGITS] for _, digest in host.exact_rows[:1]] if plan.at_once else []
    # libllama adds in the order of cells, and reuses cells outside of the newest guess's window, which committed tokens
    # may still see; torch does neither
    parked = (plan.exact or window > 0) and not all(device.is_torch for device in target)
    return replace(plan, name="-".join(parts), parked=parked)
