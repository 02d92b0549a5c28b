"""Which backend computes a draft on its rank: the target's, or libllama on the CPU where it is faster. Times
nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.errors import UserError
from pipeinfer.job.options.backends import Backend
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO_LAYERS
from pipeinfer.job.options.options import RunOptions, backend_of, device_of, gpu_layers_asked
from pipeinfer.job.placement.memory import gpu_layers
from pipeinfer.models.torch.params import AUTO


def options_of_draft(options: RunOptions, hosts: Sequence[Host], rank: int) -> RunOptions:
    """The options by which a rank computes what it has of drafts."""
    asked = options.n_gpu_layers_draft
    if asked == AUTO_LAYERS:
        return on_cpu(options, len(hosts), rank) if is_sooneron_cpu(hosts[rank]) else options
    if asked == 0:
        return on_cpu(options, len(hosts), rank)
    if backend_of(options, rank).is_torch:
        return options
    return _changed(options, len(hosts), rank, layers=asked)


def is_sooneron_cpu(host: Host) -> bool:
    """As it was timed on a rank there; False where it was not."""
    return host.draft_s is not None and host.draft_s[1] < host.draft_s[0]


def has_choice(options: RunOptions) -> bool:
    """Whether the plan chooses: a lone draft, one GPU or torch setting for all ranks."""
    by_rank = any(len(values) > 1 for values in (options.n_gpu_layers, options.device, options.backend))
    if options.n_gpu_layers_draft != AUTO_LAYERS or len(options.drafts_in_use) != 1 or by_rank or options.pace:
        return False
    (backend,) = options.backend
    return backend.device == AUTO if backend.is_torch else gpu_layers(options, 0) != 0


def on_cpu(options: RunOptions, n_ranks: int, rank: int) -> RunOptions:
    """With all that this rank computes done by libllama on the CPU."""
    return _changed(options, n_ranks, rank, layers=0, device=(), backend=Backend())


def check_draft_gpu_layers(options: RunOptions, ranks: Sequence[int]) -> None:
    """Raises UserError where libllama's layers of a draft are asked for on `ranks`, which have drafts, of torch."""
    asked = options.n_gpu_layers_draft
    if asked in (ALL_LAYERS, AUTO_LAYERS, 0) or not options.drafts_in_use:
        return
    for rank in ranks:
        if backend_of(options, rank).is_torch:
            raise UserError(
                f"-ngld {asked} is for a draft that libllama computes, and rank {rank} has --backend "
                f"{backend_of(options, rank)}; give all, 0 (by libllama on the CPU), or a --backend for each rank"
            )


def place_note(options: RunOptions, host: Host, rank: int) -> str:
    """What is said of a draft that is not computed as its rank's layers are; empty if it is."""
    if options.n_gpu_layers_draft != AUTO_LAYERS or host.draft_s is None or not is_sooneron_cpu(host):
        return ""
    other_s, cpu_s = host.draft_s
    by = str(backend_of(options, rank)) if backend_of(options, rank).is_torch else "-ngl"
    return (
        f"the draft is computed by libllama on the CPU of rank {rank}: {cpu_s * 1e3:.3g} ms a token, by {by} "
        f"{other_s * 1e3:.3g} ms; -ngld all has it there"
    )


def _changed(
    options: RunOptions, n_ranks: int, rank: int, layers: int, device: tuple[str, ...] | None = None,
    backend: Backend | None = None,
) -> RunOptions:  # fmt: skip
    """With other values for one rank; devices and backend stay where None is given."""
    ranks = range(n_ranks)
    return replace(
        options,
        n_gpu_layers=tuple(layers if each == rank else gpu_layers_asked(options, each) for each in ranks),
        device=tuple(
            device if each == rank and device is not None else device_of(options, each, n_ranks) for each in ranks
        ),
        backend=tuple(backend if each == rank and backend else backend_of(options, each) for each in ranks),
    )
