"""Messages, JSON lines on a socket, between rank 0 of a service and its front, which speaks HTTP. Knows no engine."""

import contextlib
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from pipeinfer.core.blocks import Span
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.job.options.text_sections import ContextOptions, TextOptions
from pipeinfer.job.requests.answers import Entry
from pipeinfer.job.requests.body import Defaults
from pipeinfer.job.requests.request import GenerationRequest

READ_BYTES = 1 << 20
FINISH_S = 1.0
START_S = 30.0  # how long the HTTP process may take to start

# -- from the front


@dataclass(frozen=True, slots=True)
class Ask:
    """Generate a text. `id`: never used twice. `client`: texts of several start in turns. The policy is not sent."""

    id: int
    client: str
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client of a request has gone."""

    id: int


@dataclass(frozen=True, slots=True)
class Listening:
    """Clients can connect."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The front is alive. Sent often."""


@dataclass(frozen=True, slots=True)
class SendSnapshots:
    """Start or stop sending `Snapshot`s."""

    on: bool


# -- from rank 0


@dataclass(frozen=True, slots=True)
class Started:
    """The first run of a request was sent, or the first after a preemption."""

    id: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request has lost its cells to others, and waits to start again."""

    id: int


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """`n_tokens` of a prompt are evaluated, including `n_cached` from the cache. Sent while more are left."""

    id: int
    n_tokens: int
    n_cached: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The prompt's tokens but the first, with log-probabilities. Sent before the text, if they are wanted."""

    id: int
    entries: Sequence[Entry]


TextUpdate = tuple[int, Sequence[int], str, Sequence[Entry]]  # (request, new tokens, their text, its log-probabilities)


@dataclass(frozen=True, slots=True)
class TextUpdates:
    """New output of some requests. The first text of a request includes that of its resumed tokens. Times are of this
    host's monotonic clock: the target's verdict at `at_s`, this message at `told_s`."""

    at_s: float
    told_s: float
    parts: list[TextUpdate]


@dataclass(frozen=True, slots=True)
class Finished:
    """`finish`: OpenAI's finish reason; empty: given up; "error": the grammar took too much. `timings`: by llama.cpp's
    names. `n_runs`: of the target since the start. `stop`: the stop string that ended the text."""

    id: int
    finish: str
    timings: dict[str, Any] = field(default_factory=dict)
    n_runs: int = 0
    stop: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """The models are loaded. `limit`: tokens of a request at most."""

    limit: int


@dataclass(frozen=True, slots=True)
class Draining:
    """No further request will start."""


@dataclass(frozen=True, slots=True)
class Closing:
    """The last message. Clients have `grace_s` to read their answers."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How each rank spent the last `seconds`. `ranks`: rank, role, and the shares of its time."""

    seconds: float
    ranks: list[dict[str, Any]]


FromFront = Ask | Cancel | Heartbeat | Listening | SendSnapshots
FromHead = (
    Started | Preempted | PromptProgress | PromptScores | TextUpdates | Finished | Ready | Draining | Closing | Snapshot
)
MESSAGES = {kind.__name__: kind for kind in get_args(FromFront | FromHead)}


def encode(message: FromFront | FromHead) -> bytes:
    return json.dumps([type(message).__name__, _plain(message)], default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    return {each.name: getattr(value, each.name) for each in fields(value) if each.name != "policy"}


def decode(line: bytes) -> Any:
    """The message of a line. Raises ValueError or KeyError for anything else."""
    name, values = json.loads(line)
    message = MESSAGES[name](**values)
    return replace(message, request=_request(values["request"])) if isinstance(message, Ask) else message


def _request(values: dict[str, Any]) -> GenerationRequest:
    spans, adapters = values["spans"], values["adapters"]
    typed = {name: tuple(values[name]) for name in ("prompt", "stops", "begun")} | {
        "sampling": SamplingParams(**values["sampling"]),
        "end_tokens": frozenset(values["end_tokens"]),
        "spans": None if spans is None else tuple(Span(*each) for each in spans),
        "adapters": None if adapters is None else tuple((number, scale) for number, scale in adapters),
    }
    return GenerationRequest(**(values | typed))


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of the front. `model`: the target's file; `defaults`: of requests; `parallel`: the most that are open.
    `n_ctx`: tokens of all open requests; `limit`: of one request. `share`: tokens of an answer by default. `version`:
    names all that texts depend on beside their requests. `fitted`: see `JobPlan`. `speculates`: the job may guess."""

    model: Path
    text: TextOptions
    context: ContextOptions
    defaults: Defaults
    parallel: int
    rank_timeout_s: float | None
    n_ctx: int
    limit: int
    share: int
    version: str
    fitted: str = ""
    speculates: bool = False

    @property
    def saves_texts(self) -> bool:
        """Whether texts of slots can be saved."""
        return bool(self.context.kv_disk)


class Front:
    """Rank 0's end of the channel. Never blocks but at its end: unsent bytes are sent at later calls."""

    address: str  # the URL for clients
    tunnel: str  # the command that forwards the port to another machine; empty where none is needed

    def __init__(self, link: socket.socket) -> None:
        self.link, self.closed = link, False
        self._received_s = time.monotonic() + START_S  # when bytes last came
        link.setblocking(False)
        self._partial, self._unsent = bytearray(), bytearray()
        self._lines: list[bytes] = []

    def has_news(self) -> bool:
        """Whether a message has come. Called in every wait."""
        if self._unsent:
            self._flush()
        if not self.closed and (data := self._receive()):
            *lines, rest = data.split(b"\n")
            if lines:
                lines[0] = bytes(self._partial) + lines[0]
                self._partial = bytearray()
                self._lines += lines
            self._partial += rest
        return bool(self._lines)

    def _receive(self) -> bytes:
        try:
            data = self.link.recv(READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        self.closed = not data
        self._received_s = time.monotonic()
        return data

    @property
    def silent_s(self) -> float:
        """Seconds since bytes last came, or since the front should have started."""
        return max(0.0, time.monotonic() - self._received_s)

    def take(self) -> list[FromFront]:
        lines, self._lines = (self._lines, []) if self.has_news() else ([], [])
        return [decode(line) for line in lines]

    def tell(self, message: FromHead) -> None:
        self._unsent += encode(message)
        self._flush()

    def finish(self) -> None:
        """Flush, then close this direction so that the other end reads EOF. Blocks for at most FINISH_S."""
        self.link.settimeout(FINISH_S)
        with contextlib.suppress(OSError):
            self.link.sendall(self._unsent)
            self.link.shutdown(socket.SHUT_WR)

    def lost(self) -> str:
        """Why the front is lost; empty while it works."""
        raise NotImplementedError

    def close(self, grace_s: float = 0.0) -> None:
        """End the service, once clients were told. They have `grace_s` to read. May be called twice."""
        raise NotImplementedError

    def _flush(self) -> None:
        try:
            del self._unsent[: self.link.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # the other end is gone
