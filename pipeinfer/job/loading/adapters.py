"""Adapters for ranks: rank 0 reads their files, cuts them as the target is cut, and sends each rank its layers' part.
Other hosts need no file of them."""

from itertools import pairwise

import numpy as np

from pipeinfer.job.launch import Context
from pipeinfer.job.loading.arrivals import receive_chunks, send_chunks
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.models.gguf.adapter import ScaledAdapter, parse_content


def fetch_adapters(context: Context, plan: JobPlan) -> tuple[ScaledAdapter, ...]:
    """The adapters of this rank's layers of the target; none without such layers. Collective. Raises UserError on all
    ranks where a file cannot be read, or has changed since the plan was made."""
    if not plan.adapters:
        return ()
    link, stages, contents = context.link, plan.assignment.stages, dict[int, list[bytes]]()

    def cut() -> dict[int, list[int]]:
        for stage in stages:
            parts = [adapter.cut(stage.first, stage.last, plan.model.n_layer) for adapter, _ in plan.adapters]
            contents[stage.rank] = [part.content for part in parts]
        return {rank: list(map(len, parts)) for rank, parts in contents.items()}

    sizes = link.agree(cut)
    for rank in (stage.rank for stage in stages if stage.rank and link.rank in (0, stage.rank)):
        if link.rank:
            chunks = receive_chunks(link, 0, sum(sizes[rank]))
            data = b"".join(map(bytes, chunks))
            ends = np.cumsum([0, *sizes[rank]]).tolist()
            contents[rank] = [data[start:end] for start, end in pairwise(ends)]
        else:
            send_chunks(link, rank, contents.pop(rank), lambda n_bytes: None)
    mine = contents.get(link.rank, [])
    return tuple(
        ScaledAdapter(parse_content(adapter.path, content), scale)
        for content, (adapter, scale) in zip(mine, plan.adapters, strict=False)
    )
