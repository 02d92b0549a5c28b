"""What the head of a service and its front, who speaks with clients, tell each other. Knows no HTTP and no engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeinfer.core.kv.blocks import Span
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.requests.logprobs import Entry


@dataclass(frozen=True, slots=True)
class Ask:
    """The front: generate this. `id`: the front's, of which it has each once. `ends`: tokens that end it.
    `client`: texts of different clients begin in turns. Other fields as in `GenerationRequest`."""

    id: int
    prompt: tuple[int, ...]
    n_predict: int
    sampling: SamplingParams
    ends: tuple[int, ...]
    stops: tuple[str, ...]
    markers: bool
    spans: tuple[Span, ...] | None
    keep: bool
    priority: int = 0
    client: str = ""
    begun: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drop:
    """The front: nobody wants it any more."""

    id: int


@dataclass(frozen=True, slots=True)
class Listening:
    """The front: clients are heard."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The front: it is there. It says so often."""


@dataclass(frozen=True, slots=True)
class Watch:
    """The front: pictures of the pipeline are wanted, or no longer."""

    on: bool


@dataclass(frozen=True, slots=True)
class Begun:
    """The head: its first run is on its way, or the first since it had to wait again. Before, it waited for room, or
    for the prompt of another one."""

    id: int


@dataclass(frozen=True, slots=True)
class Waits:
    """The head: others needed its cells. It waits, and will begin again."""

    id: int


@dataclass(frozen=True, slots=True)
class Read:
    """The head: `n_tokens` of its prompt are evaluated, with `n_kept` that were in the cache. Said while more are
    left."""

    id: int
    n_tokens: int
    n_kept: int


Part = tuple[int, Sequence[int], str, Sequence[Entry]]


@dataclass(frozen=True, slots=True)
class Came:
    """The head: of some requests the tokens, the text that is certain with them, and if they asked for these its
    log-probabilities: (id, tokens, text, entries). The first text has that of `begun` too. On this host's monotonic
    clock, `at_s`: when the target had decided on them, `told_s`: when the front was told."""

    at_s: float
    told_s: float
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class Ended:
    """The head: all has come. `finish`: why, in OpenAI's words; empty: it was given up; "error": its grammar took too
    much. `timings`: llama.cpp's names. `n_runs`: of the target since the start, of all requests. `stop`: the stop
    string that ended it."""

    id: int
    finish: str
    timings: dict[str, Any] = field(default_factory=dict)
    n_runs: int = 0
    stop: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """The head: the models are loaded. `limit`: tokens of a request at most."""

    limit: int


@dataclass(frozen=True, slots=True)
class Draining:
    """The head: no further request will begin."""


@dataclass(frozen=True, slots=True)
class Closing:
    """The head: this is the last message. Clients that are being answered have `grace_s` to take what there is."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Picture:
    """The head: how each rank spent some seconds that end now. `ranks`: rank, role, and the shares of its time."""

    seconds: float
    ranks: list[dict[str, Any]]


FromFront = Alive | Ask | Drop | Listening | Watch
FromHead = Begun | Waits | Read | Came | Ended | Ready | Draining | Closing | Picture


@dataclass(frozen=True, slots=True)
class Setup:
    """What the front has to know. `n_ctx`: tokens of all open requests. `limit`: of one at most. `share`: of the answer
    to one that does not say how many. `version`: what the texts depend on but the request."""

    run: RunOptions
    n_ctx: int
    limit: int
    share: int
    version: str


class Front(Protocol):
    """Made on rank 0 while the job is prepared, when it raises UserError for whatever is wrong with its settings. None
    of its methods waits, but for `close`."""

    def start(self, setup: Setup) -> None:
        """While the models are loaded."""
        ...

    @property
    def address(self) -> str:
        """Where clients find it."""
        ...

    @property
    def tunnel(self) -> str:
        """The command by which a client on another machine gets there; empty where none is needed."""
        ...

    def has_news(self) -> bool:
        """Whether `take` would return something. Asked in every wait."""
        ...

    def take(self) -> Sequence[FromFront]: ...

    def tell(self, message: FromHead) -> None: ...

    def lost(self) -> str:
        """Why it can speak with clients no longer; empty while it can."""
        ...

    def close(self, grace_s: float = 0.0) -> None:
        """The service ends; clients that are being answered have `grace_s` to take what there is. Returns when all is
        told. May be called twice."""
        ...
