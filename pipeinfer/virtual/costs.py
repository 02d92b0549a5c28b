"""Costs of a cluster's stages, links, drafts and head, in seconds and bytes. Opens no file and no model."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeinfer.cluster.timed_runs import CONTEXT_ROWS, ROWS, affordable_context, slowest_stage
from pipeinfer.cluster.wire import WireType
from pipeinfer.core.run_cost import RunCost, interpolate

MANY_ROWS = 32


@dataclass(frozen=True, slots=True)
class Work:
    """A duration by rows: `seconds[i]` for `rows[i]` rows, linear in between, and the last line continued. `context_s`,
    attention, is added for every row and every token before the run. It is one number, or one for each of `rows`,
    because chunks of prompts are computed in another way than single rows."""

    rows: tuple[float, ...]
    seconds: tuple[float, ...]
    context_s: tuple[float, ...] = (0.0,)

    def at(self, n_rows: int, context: int = 0) -> float:
        """`context`: tokens before the run."""
        token_s = self.context_s[0]
        if len(self.context_s) > 1:
            # larger sizes than those timed take as long as the largest
            token_s = interpolate(self.rows, self.context_s, min(n_rows, int(self.rows[-1])))
        return interpolate(self.rows, self.seconds, n_rows) + token_s * n_rows * context


NO_WORK = Work((1.0,), (0.0,))


def roofline(n_bytes: float, flop_per_row: float, bytes_per_s: float, flop_per_s: float, fixed_s: float = 0.0) -> Work:
    """The longer of the times to read the weights once and to compute every row (Williams et al. 2009)."""
    read_s, row_s = n_bytes / bytes_per_s, flop_per_row / flop_per_s
    knee = max(1.0, read_s / row_s)
    first_s = max(read_s, row_s) + fixed_s
    return Work((1.0, knee, knee + 1.0), (first_s, first_s, first_s + row_s))


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A slice of a model, or a whole draft, on one node: `layers` equal layers that take `layer` each, then `output`
    (the vocabulary), and `run_s` for each run.

    Further times: `reshape_s` if a run has another number of rows than the one before (libllama rebuilds its graph),
    `rest_s` if the stage was idle (its threads wake), `prompt_s` for a run that begins a prompt in blocks (it gets a
    context of its own)."""

    name: str
    layers: int
    layer: Work
    output: Work = NO_WORK
    run_s: float = 0.0
    reshape_s: float = 0.0
    rest_s: float = 0.0
    prompt_s: float = 0.0

    @property
    def n_stops(self) -> int:
        """Layers after which a cancelled run can stop: after the last one only if the output follows."""
        return self.layers - (self.output is NO_WORK)

    def layer_s(self, n_rows: int, context: int) -> float:
        return self.layer.at(n_rows, context)

    def before_layers_s(self, reshapes: bool, rested: bool = False, begins: bool = False) -> float:
        return self.run_s + self.reshape_s * reshapes + self.rest_s * rested + self.prompt_s * begins

    def seconds(
        self, n_rows: int, context: int, reshapes: bool = False, rested: bool = False, begins: bool = False
    ) -> float:
        """`begins`: the rows are the first blocks of a prompt."""
        layers_s = self.layers * self.layer_s(n_rows, context)
        return self.before_layers_s(reshapes, rested, begins) + layers_s + self.output.at(n_rows)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """A message takes `latency_s`, and occupies the link for its bytes / `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def transfer_s(self, n_bytes: float) -> float:
        return n_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class HeadCost:
    """The engine's work on the head: to send a run, settle a verdict, grow the tree after a draft step."""

    run_s: float = 0.0
    verdict_s: float = 0.0
    draft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostWork:
    """CPU work of a stage's host (SiPipe, section 3.1).

    A run's input takes `prepare_s` and `prepare_row_s` for each row; `ahead`: while the run before is evaluated
    (section 5.2). Sampling takes `sample_s` for each row after the last stage, or in `samplers` threads beside it
    (section 5.1). Two stages take `meet_s` to agree on a message's layout; `posted`: they know it (section 5.3)."""

    prepare_s: float = 0.0
    prepare_row_s: float = 0.0
    sample_s: float = 0.0
    meet_s: float = 0.0
    ahead: bool = True
    samplers: int = 0
    posted: bool = True

    def before_s(self, n_rows: int) -> float:
        return self.prepare_s + self.prepare_row_s * n_rows


@dataclass(frozen=True, slots=True)
class Profile:
    """A cluster with its models placed. `stages`: in pipeline order; `head_is_first`: the head hosts the first one.
    `drafts`: the smallest first, which is on the head unless the head has a stage; each of the others has a rank."""

    name: str
    n_embd: int
    stages: tuple[ModelCost, ...]
    drafts: tuple[ModelCost, ...]
    link: LinkCost
    head: HeadCost
    head_is_first: bool = False
    sleeps: bool = False  # waiting ranks sleep between polls, as in `Idle`; measured costs include that
    slowdown: tuple[float, ...] = ()  # a row's slowdown when 1, 2, … ranks of a host compute. Empty: none.
    slowdown_of_many: tuple[float, ...] = ()  # the same for MANY_ROWS rows and more, bound by arithmetic. Empty: as one
    acceptance: tuple[float, ...] = ()  # each draft's published acceptance rate with the target
    host: HostWork = HostWork()
    blocks: bool = False  # prompts are cut into blocks; see `pipeinfer.core.blocks`
    parked: bool = False  # rejected cells stay occupied until the cache is packed, as with libllama's exact numerics
    wire_type: WireType = WireType.F32  # the type of activations in messages

    def slowdown_at(self, n_busy: int, n_rows: int) -> float:
        """A run's slowdown when `n_busy` ranks compute, its own included."""
        of_one = self.slowdown
        if not of_one:
            return 1.0
        one, many = (times[min(max(n_busy, 1), len(times)) - 1] for times in (of_one, self.slowdown_of_many or of_one))
        return interpolate((1.0, MANY_ROWS), (one, many), min(n_rows, MANY_ROWS))

    def limit_per_s(self, context: int) -> float:
        """Tokens a second of a pipeline that emits one whenever its slowest stage has evaluated a row."""
        return 1.0 / max(stage.seconds(1, context) for stage in self.stages)

    @property
    def n_stages(self) -> int:
        return len(self.stages)

    @property
    def n_ranks(self) -> int:
        return len(self.stages) + max(len(self.drafts), not self.head_is_first)

    @property
    def cluster(self) -> str:
        """The name without the number of nodes."""
        return self.name.removesuffix(f", {self.n_ranks} nodes")

    @property
    def drafts_elsewhere(self) -> bool:
        """Whether the smallest draft is on another rank than the head."""
        return self.head_is_first and bool(self.drafts)


def run_cost(profile: Profile, n_cells: int, chunk: tuple[int, float] | None = None) -> RunCost:
    """The run cost of the slowest stage, as a session times it at its start."""
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
    """Rows of a run -> seconds in the slowest stage, for the sizes that sessions time."""
    return slowest_stage([stage_rows(stage) for stage in profile.stages])


def stage_rows(stage: ModelCost) -> dict[int, float]:
    return {n_rows: stage.seconds(n_rows, 0, reshapes=n_rows > 1) for n_rows in ROWS}
