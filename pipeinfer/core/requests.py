"""A request: one prompt and its growing output, and its events. Owns its tree and its limits; knows no model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from pipeinfer.core.blocks import Span, spans_of
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.tree import Settled, TokenTree
from pipeinfer.core.types import FAILED, AdapterScales


class Finish(Enum):
    LENGTH = "length"  # n_predict tokens are out
    END = "end"  # the target chose an end-of-generation token
    CONTEXT = "context"  # the context is full
    STOPPED = "stopped"  # the user asked
    FAILED = "failed"  # its constraint takes too much


class Prefix(NamedTuple):
    """The first `n_tokens` of another request, which is open, or has finished and retained them. `moves`: its cells
    become this request's, and nobody else can use them."""

    source: "Request"
    n_tokens: int
    moves: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """`tokens`: the prompt and the output so far, by position; the last one is the tree's root."""

    id: int
    prompt: Sequence[int]
    n_predict: int
    sampling: SamplingParams
    n_ctx: int
    end_tokens: frozenset[int] = frozenset()  # they end the generation, part of the output; empty with --ignore-eos
    spans: tuple[Span, ...] | None = None
    """Rows of the prompt that are evaluated in blocks, where the target does that; None: by the prompt's length. The
    output may depend on them, so they must not depend on what is cached."""

    keep: bool = False
    """Whether its cells are retained after its end, while there is room, for requests that start with its tokens."""

    priority: int = 0  # requests of lower numbers are opened first and preempted last
    resumed: Sequence[int] = ()  # its output so far, which another engine has emitted. It has not finished.
    adapters: AdapterScales | None = None  # None: as the job says
    tokens: list[int] = field(init=False)
    tree: TokenTree = field(init=False)
    finish: Finish | None = field(default=None, init=False)
    n_tokens_most: int = field(init=False)  # tokens of prompt and output, and KV cells, at most
    prefix_hit: Prefix | None = field(default=None, init=False)  # what it starts with; set while it is being opened
    scores: dict[int, int] = field(default_factory=dict, init=False)
    """Tokens of the prompt, but the first, with their log-probabilities, by position, if these are wanted; NO_TOKEN at
    later positions."""

    n_retained: int = field(default=0, init=False)  # how many of its first tokens are retained, once it has finished

    def __post_init__(self) -> None:
        assert self.prompt, "an empty prompt has no last token to continue"
        self.tokens = [*self.prompt, *self.resumed]
        self.tree = TokenTree(self.tokens[-1], len(self.tokens) - 1)
        if self.spans is None:
            self.spans = spans_of(len(self.prompt))
        self.n_tokens_most = min(len(self.prompt) + self.n_predict, self.n_ctx)

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are wanted. All of its rows are evaluated then."""
        return self.sampling.n_prompt_logprobs >= 0

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def depth_left(self) -> int:
        """Tokens that can still come; guesses deeper below the root are useless."""
        return min(self.n_predict - self.n_generated, self.n_ctx - len(self.tokens))

    def n_soon(self, ahead: int) -> int:
        """Tokens of the text with `ahead` more, or all that may come."""
        return min(self.n_tokens_most, len(self.tokens) + ahead)

    def take(self, tokens: list[int]) -> list[int]:
        """Append what the target emitted, up to the first reason to finish; returns what was appended."""
        for n_taken, token in enumerate(tokens, 1):
            if token == FAILED:
                self.finish = Finish.FAILED
                return tokens[: n_taken - 1]
            self.tokens.append(int(token))  # without what comes with it, such as log-probabilities
            if token in self.end_tokens:
                self.finish = Finish.END
                return tokens[:n_taken]
            if len(self.tokens) >= self.n_tokens_most:
                self.finish = Finish.LENGTH if self.n_generated >= self.n_predict else Finish.CONTEXT
                return tokens[:n_taken]
        return tokens


@dataclass(slots=True, eq=False)
class Emission:
    """Newly settled tokens of a request."""

    request: Request
    tokens: list[int]


class Observer:
    """The events of one request, all ignored: metrics override them. Times are seconds on the engine's clock."""

    def submitted(self, now_s: float, n_prompt: int) -> None:
        """The engine has the request; it may wait for room."""

    def opened(self, n_kept: int) -> None:
        """The request has room. `n_kept`: tokens of its prompt that are cached."""

    def preempted(self) -> None:
        """Others need its cells: the request waits again, and goes on from what it has emitted."""

    def prompt_evaluated(self, n_rows: int) -> None:
        """Every stage has evaluated the first `n_rows` of its prompt."""

    def run_sent(
        self, now_s: float, n_rows: int, n_nodes: int, has_root: bool, n_branches: int, n_inflight: int
    ) -> None:
        """The first run ends the wait for room, also after a preemption. `n_nodes`: root and guesses among the rows.
        `n_inflight`: runs in flight that are not dead, this one included."""

    def run_cancelled(self) -> None:
        """A run is dead, and the stages were told."""

    def run_answered(self, slowest_s: float) -> None:
        """The verdict of a run has come; its slowest stage took `slowest_s` for it."""

    def run_spared(self) -> None:
        """At least one stage did not evaluate a cancelled run."""

    def draft_stepped(self, start_s: float, end_s: float, n_nodes: int, n_inflight: int, lost: bool) -> None:
        """`n_inflight`: runs in flight when the step began. `lost`: it was interrupted, its nodes are dead."""

    def grown(self, n_guesses: int) -> None:
        """The tree got `n_guesses` new nodes."""

    def refined(self) -> None:
        """A larger draft has refined a node."""

    def settled(self, now_s: float, n_tokens: int, settled: Settled) -> None:
        """`n_tokens` of the settled tokens were emitted."""

    def noticed(self, notice: str) -> None:
        """A notice for the user."""

    def finished(self, now_s: float) -> None:
        """The request has ended."""
