"""One generation in virtual time: the real engine on a `SimPipeline`. Knows no file and no model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeinfer.cluster.timing.calibrate import CONTEXT_ROWS, ROWS, affordable_context, largest_question, slowest_stage
from pipeinfer.cluster.timing.costs import ModelCost, Profile
from pipeinfer.core.engine import Engine
from pipeinfer.core.kv.sequences import SequencePool
from pipeinfer.core.levels import Level
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Request
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.scheduling.run_cost import RunCost
from pipeinfer.errors import UserError
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.observe.trace import Tracer
from pipeinfer.virtual.choices import Choices
from pipeinfer.virtual.drafts import SimDrafter, SimDraftLevel
from pipeinfer.virtual.pipeline import SimPipeline, SimWaiter, VirtualClock

N_CHUNK = 128  # as `pipeinfer run` has it
N_CELLS_SPARE = 512


@dataclass(frozen=True, slots=True)
class Simulated:
    """What one generation gave, in virtual seconds."""

    profile: Profile
    request: Request
    metrics: RequestMetrics
    pipeline: SimPipeline
    tracer: Tracer


def simulate(
    profile: Profile,
    choices: Choices,
    policy: Policy,
    n_predict: int,
    *,
    cancel: bool = True,
    partitions: bool = True,
    n_chunk: int = N_CHUNK,
    larger: Sequence[Choices] = (),
) -> Simulated:
    """Generate `n_predict` tokens after the choices' prompt. `cancel`, `partitions`: off for ablation studies.

    `larger`: what each larger draft of the profile guesses. Raises UserError when the choices end before.
    """
    n_prompt = len(choices.prompt)
    if n_prompt + n_predict > choices.n_tokens:
        raise UserError(
            f"-n {n_predict} is more than the {choices.n_tokens - n_prompt} tokens that were recorded; "
            "lower it or record more"
        )
    clock = VirtualClock()
    tracer = Tracer(clock)
    n_ctx = n_prompt + n_predict
    n_seq, n_cells = policy.n_sequences if partitions else 1, n_ctx + N_CELLS_SPARE
    target = SimPipeline(profile, [choices], clock)
    n_rows = policy.n_rows
    drafts = [
        _draft_level(profile, number, found, clock, n_seq, n_cells, n_rows) for number, found in enumerate(larger, 1)
    ]
    # a head that has layers has no draft: that is asked by messages
    asked = [_draft_level(profile, 0, choices, clock, n_seq, n_cells, n_rows)] if profile.drafts_elsewhere else []
    pipelines = (target, *(level.alone for level in (*asked, *drafts)))
    for pipeline in pipelines:
        pipeline.neighbours = pipelines
    own = SimDrafter(profile, [choices], pipelines, n_rows) if profile.drafts and not asked else None
    drafter = asked[0] if asked else own
    pool = SequencePool(n_seq, n_cells, parked=profile.parked)
    engine = Engine(
        Level(target, pool, n_chunk=n_chunk, n_rows=n_rows, cancel=cancel, blocks=profile.blocks), drafter,
        SimWaiter(clock), clock, drafts=drafts, run_cost=run_cost(profile, n_cells),
    )  # fmt: skip
    if own:
        own.timeout_s = engine.timeout_s
    request = Request(0, choices.prompt, n_predict, SamplingParams(temp=0.0), n_ctx)
    metrics = RequestMetrics(tracer)
    engine.add(request, policy, metrics)
    for _ in engine.generate():
        pass
    return Simulated(profile, request, metrics, target, tracer)


def _draft_level(
    profile: Profile, number: int, choices: Choices, clock: VirtualClock, n_seq: int, n_cells: int, n_rows: int
) -> SimDraftLevel:
    """A draft on its own rank, beyond one link."""
    cost = profile.drafts[number]
    pipeline = SimPipeline(replace(profile, stages=(cost,), drafts=(), head_is_first=False), [choices], clock)
    return SimDraftLevel(
        pipeline, [choices], SequencePool(n_seq, n_cells), largest_question(stage_rows(cost)) if number else n_rows
    )


def run_cost(profile: Profile, n_cells: int, chunk: tuple[int, float] | None = None) -> RunCost:
    """What a session would know of the slowest stage when it begins."""
    rows = row_costs(profile)
    context_s = max(_context_s(stage, rows, n_cells) for stage in profile.stages)
    n_sharing = profile.n_ranks if profile.slowdown else 1
    return RunCost(rows, chunk=chunk, context_s=context_s, n_sharing=n_sharing)


def _context_s(stage: ModelCost, rows: Mapping[int, float], n_cells: int) -> float:
    n_context = affordable_context(rows, n_cells - CONTEXT_ROWS)
    if not n_context:
        return 0.0
    longer_s = stage.seconds(CONTEXT_ROWS, n_context) - stage.seconds(CONTEXT_ROWS, 0)
    return longer_s / (CONTEXT_ROWS * n_context)


def row_costs(profile: Profile) -> dict[int, float]:
    """Rows of a run -> seconds in the slowest stage, for the sizes that a session times."""
    return slowest_stage([stage_rows(stage) for stage in profile.stages])


def stage_rows(stage: ModelCost) -> dict[int, float]:
    return {n_rows: stage.seconds(n_rows, 0, reshapes=n_rows > 1) for n_rows in ROWS}
