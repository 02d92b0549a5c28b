"""What computes a draft on its rank: the target's backend there, or what -ngld says. Times nothing."""

from collections.abc import Sequence
from dataclasses import replace

from pipeinfer.errors import UserError
from pipeinfer.job.options.backends import Backend
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO_LAYERS
from pipeinfer.job.options.options import RunOptions, backend_of, device_of, gpu_layers_asked


def options_of_draft(options: RunOptions, n_ranks: int, rank: int) -> RunOptions:
    """The options by which a rank computes what it has of drafts."""
    asked = options.n_gpu_layers_draft
    if asked == AUTO_LAYERS or (asked and backend_of(options, rank).is_torch):
        return options
    layers = [gpu_layers_asked(options, each) for each in range(n_ranks)]
    devices = [device_of(options, each, n_ranks) for each in range(n_ranks)]
    backends = [backend_of(options, each) for each in range(n_ranks)]
    layers[rank] = asked
    if asked == 0:
        devices[rank], backends[rank] = (), Backend()
    return replace(options, n_gpu_layers=tuple(layers), device=tuple(devices), backend=tuple(backends))


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
