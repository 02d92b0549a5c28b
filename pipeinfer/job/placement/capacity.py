"""The capacity of a job: rows, cells, sequences and requests that contexts, caches and buffers have room for."""

from dataclasses import asdict, dataclass

from pipeinfer.errors import UserError
from pipeinfer.job.options.options import Speculation
from pipeinfer.job.options.plan_file import PlanFile

MAX_BATCH = 2048  # prompt tokens a run: every rank has buffers for so many rows
N_CELLS_SPARE = 512  # cells above the context, for guesses and, with exact numerics, for parked cells
CELLS_PADDING = 256  # libllama's
MAX_PROMPTS = 4  # in blocks that are read at a time: each has a context of its own meanwhile
MEANINGS = "tokens of context,cells,prompt tokens a run,guesses a run,nodes a run,requests,prompts at a time,branches"
MEANINGS += ",sequences,guesses at a time"
"""Of the fields of `Capacity`, for users."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Counts, of all requests together."""

    n_ctx: int  # tokens of all requests that are open at a time
    n_cells: int  # of every KV cache
    n_batch: int  # tokens of a prompt that a run carries at most
    n_guess_rows: int  # rows of a run with guesses, and of a draft's step, at most
    n_nodes: int  # guesses and roots of requests that a run carries at most
    n_requests: int  # open at a time
    n_prompts: int  # prompts in blocks that are read at a time
    n_seq: int  # sequences that trees may lease
    n_target_seq: int  # the same of the target: few where each has a state
    n_target_guesses: int  # of a target that does not rewind: guesses at a time, each in a sequence of its own

    @property
    def n_rows(self) -> int:
        """Rows of a run outside of blocks, at most: a chunk of the prompt with the root, or guesses."""
        return max(self.n_batch + 1, self.n_nodes)

    @property
    def n_outputs(self) -> int:
        """Rows of a run that may want logits, and one."""
        return max(self.n_guess_rows, self.n_seq) + 1


def capacity_of(speculation: Speculation, n_requests: int, batch_size: int, n_ctx: int, rewinds: bool) -> Capacity:
    """`rewinds`: whether a sequence of the target can lose its newest tokens."""
    n_guess_rows = speculation.n_guess_rows
    rows = min(batch_size, MAX_BATCH, n_ctx), n_guess_rows, max(n_guess_rows, n_requests)
    n_target_seq = speculation.n_target_seq(n_requests, rewinds)
    of_trees = speculation.n_seq(n_requests), n_target_seq, speculation.n_target_guesses(n_requests, rewinds)
    return Capacity(n_ctx, cells_for(n_ctx), *rows, n_requests, min(MAX_PROMPTS, n_requests), *of_trees)


def planned_capacity(plan: PlanFile, needed: Capacity) -> Capacity:
    """The capacity in a plan. Raises UserError where the job needs more."""
    planned = Capacity(**plan.decisions["capacity"])
    for (name, n), meaning in zip(asdict(needed).items(), MEANINGS.split(","), strict=True):
        if n > (room := getattr(planned, name)):
            lack = f"has room for {room} {meaning}, and this job needs {n}"
            raise UserError(f"--plan {plan.path} {lack}; plan with the same --policy, --parallel and -c")
    return planned


def cells_for(n_ctx: int) -> int:
    """KV cells of every cache for contexts of `n_ctx` tokens."""
    return -(-(n_ctx + N_CELLS_SPARE) // CELLS_PADDING) * CELLS_PADDING


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of the engine that an ablation or another policy changes without another load."""

    cancel: bool  # runs whose rows are all dead are cancelled
    looks_up: bool  # guesses are looked up too
    n_seq: int  # of drafts, as in `Capacity`
    n_target_seq: int  # of the target


def engine_settings(speculation: Speculation, n_requests: int, rewinds: bool) -> EngineSettings:
    sequences = speculation.n_seq(n_requests), speculation.n_target_seq(n_requests, rewinds)
    return EngineSettings(speculation.cancel, speculation.looks_up, *sequences)
