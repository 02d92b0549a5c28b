"""Load a slice of layers by its backend, and time its runs, or recall that. The only file that knows both backends."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeinfer import __version__
from pipeinfer.cluster.hosts.host import Host, sharers, threads_there
from pipeinfer.cluster.timed_runs import recall_context, recall_rows, slowest_stage, time_chunk
from pipeinfer.core.blocks import BLOCK
from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.core.run_cost import RunCost
from pipeinfer.disk_cache import user_cache
from pipeinfer.job.placement.devices import DevicePlan
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.models.gguf.adapter import ScaledAdapter
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.llama.ggml import describe_build
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.rpc import expect
from pipeinfer.models.llama.stage import LlamaHead, LlamaStage
from pipeinfer.models.torch.params import CPU, TorchParams, load_torch, torch_version
from pipeinfer.virtual import costs

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.job.launch import Context


def load_layers(
    open_layers: Callable[[], SliceFile],
    params: LlamaParams,
    device: DevicePlan,
    adapters: Sequence[ScaledAdapter] = (),
) -> LoadedModel:
    """`params`, `adapters`: of libllama; torch takes the former as far as it has them. Raises UserError when the
    backend is not installed, or cannot compute this model."""
    if not device.is_torch:
        layers = open_layers()
        return LlamaHead(layers, params) if layers.info.head else LlamaStage(layers, params, adapters)
    load_torch()
    from pipeinfer.models.torch.stage import TorchStage  # takes seconds and memory, which others are spared

    sizes = params.n_cells, params.n_seq_max, params.n_batch, params.n_outputs_max, params.n_threads
    place = device.backend.device, device.backend.dtype, device.turn
    return TorchStage(open_layers(), TorchParams(*sizes, *place, params.exact))


def timing_key(what: str, device: DevicePlan, hosts: Sequence[Host], threads: Sequence[int], rank: int) -> str:
    """The name under which times of runs are kept, with everything that they depend on. `threads`: of each rank."""
    host, there = hosts[rank], " ".join(map(str, threads_there(hosts, threads, rank)))
    where = " ".join(filter(None, [f"-ngl {device.n_gpu_layers}", device.name, device.places.text]))
    by = f"{device.backend} {torch_version()}" if device.is_torch else where
    place = f"{host.processor}, {host.name}, {host.n_cores} cores, {threads[rank]} threads, {by}, threads there {there}"
    return f"{what}, {place}, pipeinfer {__version__}, {describe_build()}"


def gpu_of(device: DevicePlan) -> str:
    """The GPU that this rank's layers are on, by its name if torch computes them; empty: a CPU."""
    if not device.is_torch:
        return "a GPU" if device.uses_gpus else ""
    torch = load_torch()
    from pipeinfer.models.torch.stage import find_device

    torch_device = find_device(device.backend.device, device.turn)
    return "" if torch_device.type == CPU else str(torch.cuda.get_device_name(torch_device))


@dataclass(frozen=True, slots=True)
class RunCosts:
    """Of one rank, in seconds. `rows`: of a run of so many rows; empty: not timed. `context_s`: for each token before a
    row; 0: not timed. `chunk`: rows of a prompt's chunk, and its seconds; None: no delay is limited."""

    rows: dict[int, float] = field(default_factory=dict)
    context_s: float = 0.0
    chunk: tuple[int, float] | None = None


def time_stage(context: "Context", plan: JobPlan, model: LoadedModel) -> RunCosts:
    """Costs of this rank's stage of the target, or those of its profile. The cache must be empty, and stays so."""
    index = plan.assignment.stage_of(context.rank)
    assert index is not None, f"rank {context.rank} has a model and no stage"
    if plan.pace:
        return RunCosts(costs.stage_rows(plan.pace.stages[index]))
    part = f"{plan.model.fingerprint} {plan.assignment.stages[index].layers} {plan.numerics.name}"
    key = timing_key(part, plan.ranks[context.rank].target, plan.hosts, plan.threads, context.rank)
    rows, chunk = recall_rows(model, time.monotonic, user_cache(), f"row times: {key}"), None
    context_s: float | None = None  # states could not be rewound to time a run again, and cost the same in any context
    if plan.model.rewinds:
        context_s = recall_context(model, rows, plan.capacity.n_cells, time.monotonic, user_cache(), f"context: {key}")
    if plan.limits_delay:
        blocks = plan.numerics.blocks
        n_rows = BLOCK if blocks else min(BLOCK, plan.capacity.n_batch)
        n_blocks = 3 * BLOCK if blocks else 0
        chunk = n_rows, min(time_chunk(model, n_rows, n_blocks, time.monotonic)[1] for _ in range(2))
    expect(RunCost(rows).seconds(plan.n_rows_max, 0))
    return RunCosts(rows, context_s or 0.0, chunk)


def time_draft(context: "Context", plan: JobPlan, model: LoadedModel, number: int) -> RunCosts:
    """Costs of this rank's layers of a draft: rows alone."""
    if plan.pace:
        return RunCosts(costs.stage_rows(plan.pace.drafts[number]))
    layers, types = plan.parts(context.rank)[number].layers, " ".join(plan.numerics.draft_cache)
    part = f"{plan.drafts[number].fingerprint} {layers} of a draft, {types}"
    key = timing_key(part, plan.ranks[context.rank].draft, plan.hosts, plan.threads, context.rank)
    rows = recall_rows(model, time.monotonic, user_cache(), f"row times: {key}")
    expect(RunCost(rows).seconds(plan.capacity.n_guess_rows, 0))
    return RunCosts(rows)


def run_cost(stages: Collection[RunCosts], plan: JobPlan) -> RunCost | None:
    """The run cost of a pipeline of these stages, that of the slowest; None where they were not timed. In a paced job
    it is that of `simulate`. Where delays are limited it includes chunks."""
    if pace := plan.pace:
        chunk_s = max(stage.seconds(BLOCK, 0) for stage in pace.stages)
        return costs.run_cost(pace, plan.capacity.n_cells, (BLOCK, chunk_s) if plan.limits_delay else None)
    rows = slowest_stage([stage.rows for stage in stages])
    chunk = max(filter(None, (stage.chunk for stage in stages)), default=None)  # all have as many rows
    context_s = max((stage.context_s for stage in stages), default=0.0)
    n_sharing = max(sharers(plan.hosts, plan.assignment.computing, rank) for rank in plan.assignment.computing)
    return RunCost(rows, plan.crowding, chunk, context_s, n_sharing) if rows else None
