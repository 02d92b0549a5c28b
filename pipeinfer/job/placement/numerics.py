"""The name of a job's numerics: everything that decides the bits of its texts beside the model and the request.

Free memory, the number of ranks, threads and the policy are no part of it. Knows no request.
"""

import hashlib
from collections.abc import Sequence

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.plan import Plan
from pipeinfer.job.options.backends import Backend
from pipeinfer.job.options.options import RunOptions, backend_of
from pipeinfer.job.placement.memory import gpu_layers
from pipeinfer.models.llama.ggml import type_name
from pipeinfer.models.llama.params import TypeRows, rows_in_groups

N_DIGITS = 4
"""Of a digest of what repacked kernels add up to: they differ between processors."""


def numerics_name(options: RunOptions, hosts: Sequence[Host], plan: Plan, repacked: Sequence[TypeRows]) -> str:
    """`repacked`: types of weights that are laid out anew with exact numerics, and rows of each at once or, with an x,
    in groups. Such as `exact`, `exact-q4_0.32-1f3a`, `exact-q4_k.x4-q6_k.x4-9c07`, `fast-q8_0-f16`, `exact-torch`."""
    parts = [options.rounding]
    if repacked:
        parts += [f"{type_name(each.type)}.{'x' * each.in_groups}{each.n_rows}" for each in repacked]
        used, known = {each.type for each in repacked}, hosts[0].repacked
        digests = hosts[0].grouped if rows_in_groups(repacked) else [(type, digest) for type, _, digest in known]
        results = "".join(digest for type, digest in digests if type in used)
        parts.append(hashlib.sha256(results.encode()).hexdigest()[:N_DIGITS])
    ranks = [stage.rank for stage in plan.stages]
    backends = {Backend(own.name, dtype=own.dtype) for rank in ranks if (own := backend_of(options, rank)).is_torch}
    parts += sorted(map(str, backends))
    parts += ["gpu"] if any(gpu_layers(options, rank) for rank in ranks) else []
    return "-".join(parts)


def other_numerics_text(kept: str, name: str) -> str:
    """Of a job that goes on. `kept`: the numerics with which it began; `name`: those that it would have."""
    return (f"what is to go on was begun with numerics {kept}, and here they are {name}: the text may be another one "
            "from here on; start anew, or go on all the same with --allow-other-numerics")  # fmt: skip
