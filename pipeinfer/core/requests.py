"""A request: one prompt and its growing output. Owns its tree and its limits; knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from pipeinfer.core.blocks import Span, spans_of
from pipeinfer.core.runs import FAILED
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.tree import TokenTree


class Finish(Enum):
    LENGTH = "length"  # n_predict tokens are out
    END = "end"  # the target chose an end-of-generation token
    CONTEXT = "context"  # the context is full
    STOPPED = "stopped"  # the user asked
    FAILED = "failed"  # its constraint takes too much


class Prefix(NamedTuple):
    """The first `n_tokens` of another request, which is open, or has finished and left its cells. `moves`: it has
    finished, and leaves them to nobody else."""

    source: Request
    n_tokens: int
    moves: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """`tokens` is the prompt and the output so far; the tree's root is always its last token.

    The position of a token is its index in `tokens`.
    """

    id: int
    prompt: Sequence[int]
    n_predict: int
    sampling: SamplingParams
    n_ctx: int
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end the generation (empty with --ignore-eos); the one met is part of the output ids."""

    spans: tuple[Span, ...] | None = None
    """Rows of the prompt that are evaluated in blocks, where the target does that, all others as guesses are; None: as
    its length says. The text may depend on it, so it must not depend on what is kept."""

    keep: bool = False
    """When it has finished its cells stay while there is room, for a request that begins with the same tokens."""

    priority: int = 0
    """Lower ones begin first, and are the last to give their cells to others."""

    tokens: list[int] = field(init=False)
    tree: TokenTree = field(init=False)
    finish: Finish | None = field(default=None, init=False)
    n_tokens_most: int = field(init=False)
    """Prompt and output at most, so many KV cells too."""

    prefix_hit: Prefix | None = field(default=None, init=False)
    """What it began with, once it is open."""

    n_retained: int = field(default=0, init=False)
    """So many of its first tokens keep their cells for other requests, once it has finished."""

    def __post_init__(self) -> None:
        assert self.prompt, "an empty prompt has no last token to continue"
        self.tokens = list(self.prompt)
        self.tree = TokenTree(self.prompt[-1], len(self.prompt) - 1)
        if self.spans is None:
            self.spans = spans_of(len(self.prompt))
        self.n_tokens_most = min(len(self.prompt) + self.n_predict, self.n_ctx)

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def depth_left(self) -> int:
        """How many more tokens can still come; a guess deeper than this below the root is of no use."""
        return min(self.n_predict - self.n_generated, self.n_ctx - len(self.tokens))

    def n_soon(self, ahead: int) -> int:
        """Tokens of the text once there are `ahead` more, or all that may come."""
        return min(self.n_tokens_most, len(self.tokens) + ahead)

    def take(self, tokens: list[int]) -> list[int]:
        """Append what the target emitted, up to the first reason to finish; return what was taken."""
        for n_taken, token in enumerate(tokens, 1):
            if token == FAILED:
                self.finish = Finish.FAILED
                return tokens[: n_taken - 1]
            self.tokens.append(int(token))  # what else it brings is for who takes the emission
            if token in self.end_tokens or len(self.tokens) >= self.n_tokens_most:
                self.finish = self._reason(token)
                return tokens[:n_taken]
        return tokens

    def _reason(self, token: int) -> Finish:
        if token in self.end_tokens:
            return Finish.END
        return Finish.LENGTH if self.n_generated >= self.n_predict else Finish.CONTEXT


@dataclass(slots=True, eq=False)
class Emission:
    """Tokens of a request that the target has just settled."""

    request: Request
    tokens: list[int]
