"""How exact numerics lay out weights, so that a row's bits depend neither on the split nor on other rows. Knows hosts
and models' headers; loads nothing."""

import re
from collections.abc import Sequence

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.llama.params import MANY, LlamaParams, TypeRows, in_groups, worth_repacking

IN_GROUPS = re.compile(r"\.x\d")
"""In the names of numerics whose rows come in groups; see pipeinfer.job.placement.numerics."""


def repacked_alike(hosts: Sequence[Host], info: ModelInfo, n_requests: int, name: str) -> tuple[TypeRows, ...]:
    """Types of the target's weights that are repacked, and how rows of each are computed; none where that is no faster.
    A layer must have the same bits on every rank: all hosts must repack the same types with the same results.

    Rows come in groups where a job is opened for many requests, or for numerics of this `name`, if it is not empty.
    """
    if len({host.repacked for host in hosts}) > 1:
        return ()
    in_parts = worth_repacking(info, LlamaParams(0), tuple(TypeRows(*each[:2]) for each in hosts[0].repacked))
    if len({host.grouped for host in hosts}) > 1:
        return in_parts
    if name:
        n_requests = MANY if IN_GROUPS.search(name) else 1
    return in_groups(info, in_parts, [type for type, _ in hosts[0].grouped], n_requests) or in_parts
