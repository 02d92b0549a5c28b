"""Costs of a cluster's stages, links, drafts and head, in seconds and bytes. Knows no file and no model."""

from dataclasses import dataclass

from pipeinfer.cluster.messages.activations import WireType
from pipeinfer.core.interpolation import interpolate

MANY_ROWS = 32


@dataclass(frozen=True, slots=True)
class Work:
    """A duration by rows: `seconds[i]` for `rows[i]` rows, linear in between, and the last line continued.

    `context_s`, attention, is added for every row and every token before the run. It is one number, or one for each of
    `rows`, because chunks of prompts are computed in another way than single rows.
    """

    rows: tuple[float, ...]
    seconds: tuple[float, ...]
    context_s: tuple[float, ...] = (0.0,)

    def at(self, n_rows: int, context: int = 0) -> float:
        """`context`: tokens before the run."""
        token_s = self.context_s[0]
        if len(self.context_s) > 1:
            # beyond the timed sizes it is that of the largest
            token_s = interpolate(self.rows, self.context_s, min(n_rows, int(self.rows[-1])))
        return interpolate(self.rows, self.seconds, n_rows) + token_s * n_rows * context


NOTHING = Work((1.0,), (0.0,))


def roofline(n_bytes: float, flop_per_row: float, bytes_per_s: float, flop_per_s: float, fixed_s: float = 0.0) -> Work:
    """The longer of reading the weights once and computing every row (Williams et al. 2009)."""
    read_s, row_s = n_bytes / bytes_per_s, flop_per_row / flop_per_s
    knee = max(1.0, read_s / row_s)
    first_s = max(read_s, row_s) + fixed_s
    return Work((1.0, knee, knee + 1.0), (first_s, first_s, first_s + row_s))


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A slice of a model on one node: `layers` equal layers, each `layer`, then `output` (the vocabulary), and `run_s`
    a run. A whole draft model is such a slice too.

    Added to that: `reshape_s` when a run has another number of rows than the one before, because libllama rebuilds its
    graph; `rest_s` when the stage was idle, because its threads are woken; `prompt_s` when a run begins a prompt in
    blocks, which gets a context of its own.
    """

    name: str
    layers: int
    layer: Work
    output: Work = NOTHING
    run_s: float = 0.0
    reshape_s: float = 0.0
    rest_s: float = 0.0
    prompt_s: float = 0.0

    def before_layers_s(self, reshapes: bool, rested: bool = False, begins: bool = False) -> float:
        return self.run_s + self.reshape_s * reshapes + self.rest_s * rested + self.prompt_s * begins

    def seconds(
        self, n_rows: int, context: int, reshapes: bool = False, rested: bool = False, begins: bool = False
    ) -> float:
        """`begins`: the rows are the first blocks of a prompt."""
        layers_s = self.layers * self.layer.at(n_rows, context)
        return self.before_layers_s(reshapes, rested, begins) + layers_s + self.output.at(n_rows)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """A message has `latency_s`, and occupies the link for its bytes / `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def transfer_s(self, n_bytes: float) -> float:
        return n_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class HeadCost:
    """The engine's own work on the head: sending a run, settling a verdict, growing the tree after a draft step."""

    run_s: float = 0.0
    verdict_s: float = 0.0
    draft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostWork:
    """CPU work beside every stage's evaluation (SiPipe, section 3.1), and which of it overlaps.

    `prepare_s` a run and `prepare_row_s` a row come before it; `ahead`: while the run before is evaluated (section
    5.2). `sample_s` a row comes after the last stage, or in so many `samplers` beside it (section 5.1). `meet_s`: two
    stages agree on a message's layout, when both have time; `posted`: it is known before (section 5.3).
    """

    prepare_s: float = 0.0
    prepare_row_s: float = 0.0
    sample_s: float = 0.0
    meet_s: float = 0.0
    ahead: bool = True
    samplers: int = 0
    posted: bool = True

    def before_s(self, n_rows: int) -> float:
        """Seconds to prepare a run's input."""
        return self.prepare_s + self.prepare_row_s * n_rows


@dataclass(frozen=True, slots=True)
class Profile:
    """A cluster with its models placed. `stages`: in pipeline order; `head_is_first`: the head hosts the first.

    `drafts`: the smallest first, which is on the head unless that has a stage; each other one has its own rank.
    """

    name: str
    n_embd: int
    stages: tuple[ModelCost, ...]
    drafts: tuple[ModelCost, ...]
    link: LinkCost
    head: HeadCost
    head_is_first: bool = False
    sleeps: bool = False
    """Waiting ranks sleep between polls, as in `Idle`; measured costs include that already."""
    slowdown: tuple[float, ...] = ()
    """A row's slowdown when 1, 2, … ranks of a host compute. Empty: none."""
    slowdown_of_many: tuple[float, ...] = ()
    """The same for MANY_ROWS rows and more, which are bound by arithmetic, not by memory. Empty: as one row."""
    acceptance: tuple[float, ...] = ()
    """Each draft's published acceptance rate with the target."""
    host: HostWork = HostWork()
    blocks: bool = False
    """Prompts are cut into blocks; see `pipeinfer.core.kv.blocks`."""
    parked: bool = False
    """Rejected cells stay occupied until the cache is packed, as with libllama's exact numerics."""
    wire_type: WireType = WireType.F32
    """The type of activations in messages."""

    def crowding(self, n_busy: int, n_rows: int) -> float:
        """A run's slowdown when `n_busy` ranks compute, its own included."""
        of_one = self.slowdown
        if not of_one:
            return 1.0
        one, many = (times[min(max(n_busy, 1), len(times)) - 1] for times in (of_one, self.slowdown_of_many or of_one))
        return interpolate((1.0, MANY_ROWS), (one, many), min(n_rows, MANY_ROWS))

    @property
    def n_stages(self) -> int:
        return len(self.stages)

    @property
    def n_ranks(self) -> int:
        return len(self.stages) + max(len(self.drafts), not self.head_is_first)

    @property
    def drafts_elsewhere(self) -> bool:
        """Whether another rank than the head's has the smallest draft."""
        return self.head_is_first and bool(self.drafts)
