"""How exact numerics lay out prompts and weights, so that a row's bits depend neither on the split nor on other rows.
Knows hosts and models' headers; loads nothing."""

from collections.abc import Sequence

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.llama.params import LlamaParams, worth_repacking


def repacked_alike(hosts: Sequence[Host], info: ModelInfo) -> tuple[tuple[int, int], ...]:
    """Types of the target's weights that are repacked, and how many rows of each may be computed at once; none where
    that is no faster. A layer must have the same bits on every rank: all hosts must repack the same types with the same
    results."""
    if len({host.repacked for host in hosts}) > 1:
        return ()
    known = tuple((type, n_rows) for type, n_rows, _ in hosts[0].repacked)
    return worth_repacking(info, LlamaParams(0), known)
