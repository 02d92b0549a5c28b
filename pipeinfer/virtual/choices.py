"""Tokens of a target and guesses of drafts without models: synthetic choices, and recorded ones of real models, in a
JSON-lines file with a text in each line. Knows no time. A context is (`start`, `branch`): the position of the last
token on the target's path, and the wrong tokens after it. The target needs no branch: nodes that descend from a wrong
guess are dead before their verdict."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Protocol

import numpy as np

from pipeinfer.core.runs import Guess
from pipeinfer.core.settings import MAX_WIDTH
from pipeinfer.errors import UserError
from pipeinfer.outputs import write_file

Branch = tuple[int, ...]


class Choices(Protocol):
    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def n_tokens(self) -> int:
        """Tokens of the target's path, with those of the prompt."""
        ...

    def target(self, position: int) -> int:
        """The token at `position` on the target's path."""
        ...

    def guesses(self, start: int, branch: Branch, width: int, age: int = 0) -> list[Guess]:
        """The draft's guesses after a context, likeliest first. `age`: tokens since the newest verdict."""
        ...


def n_predicted(choices: Choices, n_predict: int) -> int:
    """Tokens of a text: `n_predict`, or fewer if the target's path ends before."""
    return min(n_predict, choices.n_tokens - len(choices.prompt))


SPREAD = 2.0
"""alpha + beta of the Beta distribution of the draft's confidence; 2.3 for the shipped pair, less for surer drafts."""

FURTHER = 0.5
"""How often a further guess is right if those before it are wrong, as a share of the first guess's rate. The shipped
pair (0.66) has 0.35 for the second and 0.18 for the third guess; in PipeDec's figure 3 the top 8 have nearly 1."""


def ranks_text(by_rank: Sequence[float]) -> str:
    """`0.7` if further guesses have their usual rates; else all rates."""
    usual = ranks_for(by_rank[0], len(by_rank))
    return f"{by_rank[0]:g}" if tuple(by_rank) == usual else ",".join(f"{share:g}" for share in by_rank)


def ranks_for(acceptance: float, n_ranks: int = MAX_WIDTH) -> tuple[float, ...]:
    """Shares of tokens that are the first, second, … guess. Raises UserError if `acceptance` is no probability."""
    if not 0 <= acceptance <= 1:
        raise UserError(f"an acceptance of {acceptance:g} is no probability; give a number from 0 to 1")
    further = FURTHER * acceptance
    return (acceptance, *((1 - acceptance) * further * (1 - further) ** rank for rank in range(n_ranks - 1)))


class SyntheticChoices:
    """A target and a draft that has the right token at rank r with probability `by_rank[r]`.

    The draft is calibrated: the confidence of its best guess has a Beta distribution with mean `by_rank[0]`, and the
    guess is right that often. All choices are a pure function of the seed and the context.

    `beside`: another draft of the same target. Both find the same tokens easy: they are surer at the same places, and
    the better one is right wherever the other is.

    `ageing`: for drafts that read the target's features, as EAGLE's. For each token of the context without a verdict,
    where the draft uses its own features, `by_rank` is multiplied by the next of these factors, the last one repeated.
    """

    N_WRONG = 1 << 12
    n_tokens, n_vocab = 1 << 20, 32000

    def __init__(
        self,
        by_rank: Sequence[float],
        seed: int = 0,
        n_prompt: int = 128,
        beside: SyntheticChoices | None = None,
        ageing: Sequence[float] = (),
    ) -> None:
        """Raises UserError if `by_rank` are no probabilities with a sum of 1 at most."""
        if not by_rank or min(by_rank) < 0 or sum(by_rank) > 1 + 1e-9:
            shown = ",".join(f"{p:g}" for p in by_rank)
            raise UserError(f"--ranks {shown}: give numbers from 0 to 1 whose sum is 1 at most")
        self.by_rank, self.seed = tuple(by_rank), seed
        self.beside, self._further = beside, ageing[-1] if ageing else 1.0
        self._factors = list(accumulate(ageing, mul, initial=1.0))  # of `by_rank`, by age
        missed = max(1 - by_rank[0], 1e-12)
        self._tail = list(accumulate(share / missed for share in by_rank[1:]))  # given that the first is wrong
        self._decay = [share / missed for share in (*by_rank[1:], *[1e-6] * MAX_WIDTH)][: MAX_WIDTH - 1]
        self._tokens: list[int] = []
        self._confidence: list[float] = []
        self._rank: list[int] = []  # of the right token; MAX_WIDTH: not among the guesses
        self._endures: list[float] = []  # it stays there while the factor is above this
        self._n_blocks = 0
        # confidences after wrong tokens: no such guess is accepted, only their distribution counts
        self._wrong_confidence = self._confidences(np.random.default_rng([seed, 1]), self.N_WRONG).tolist()
        self.prompt = [self.target(position) for position in range(n_prompt)]

    def _confidences(self, rng: np.random.Generator, n: int) -> np.ndarray:
        mean = min(max(self.by_rank[0], 1e-3), 1 - 1e-3)
        return np.clip(rng.beta(SPREAD * mean, SPREAD * (1 - mean), n), 1e-4, 1 - 1e-4)

    def _extend(self) -> None:
        """Append a block of positions."""
        confidence, tokens, first, later, endures = (self.beside or self)._block(self._n_blocks)
        if self.beside:
            values = self._confidences(np.random.default_rng([self.seed, 2, self._n_blocks]), len(confidence))
            confidence[np.argsort(confidence)] = np.sort(values)
        self._n_blocks += 1
        self._tokens += tokens.tolist()
        self._confidence += confidence.tolist()
        self._endures += endures.tolist()
        # rates of 0 and 1 are exact
        hits = first < (confidence if 0 < self.by_rank[0] < 1 else self.by_rank[0])
        for hit, draw in zip(hits.tolist(), later.tolist(), strict=True):
            rank = 0 if hit else 1 + bisect_left(self._tail, draw)
            self._rank.append(rank if rank <= len(self._tail) else MAX_WIDTH)

    def _block(self, index: int, n: int = 1024) -> tuple[np.ndarray, ...]:
        """Confidences, tokens, and random draws for the first guess, for further ones and for ageing."""
        rng = np.random.default_rng([self.seed, 0, index])
        draws = (rng.random(n) for _ in range(3))
        return self._confidences(rng, n), rng.integers(0, self.n_vocab, n), *draws

    def target(self, position: int) -> int:
        while position >= len(self._tokens):
            self._extend()
        return self._tokens[position]

    def guesses(self, start: int, branch: Branch, width: int, age: int = 0) -> list[Guess]:
        while len(self._factors) <= age:
            self._factors.append(self._factors[-1] * self._further)
        factor = self._factors[age]
        if branch:
            h = hash((self.seed, start, *branch))  # integers hash alike in every process
            return self._list(self._wrong_confidence[h % self.N_WRONG], h % self.n_vocab, MAX_WIDTH, width, factor)
        right = self.target(start + 1)
        rank = self._rank[start] if self._endures[start] < factor else MAX_WIDTH
        return self._list(self._confidence[start], right, rank, width, factor)

    def _list(self, confidence: float, right: int, rank: int, width: int, factor: float) -> list[Guess]:
        """`width` guesses, `right` at its rank; the others are its neighbours. `factor`: of their probabilities."""
        missed = 1 - confidence
        shares = [confidence, *(missed * decay for decay in self._decay[: max(0, width - 1)])]
        tokens = (right if index == rank else (right + 1 + index) % self.n_vocab for index in range(MAX_WIDTH))
        return [Guess(token, factor * share) for token, share in zip(tokens, shares[:width], strict=False)]


def synthetic_team(
    by_rank: Sequence[Sequence[float]], seed: int = 0, n_prompt: int = 128, ageing: Sequence[float] = ()
) -> list[SyntheticChoices]:
    """A target with a draft for each of `by_rank`. Raises UserError as SyntheticChoices does."""
    first = SyntheticChoices(by_rank[0], seed, n_prompt, ageing=ageing)
    return [first, *(SyntheticChoices(ranks, seed, n_prompt, beside=first, ageing=ageing) for ranks in by_rank[1:])]


@dataclass(frozen=True, slots=True)
class KnownText:
    """A target's text after its prompt, without a draft: guesses can be looked up in it."""

    prompt: Sequence[int]
    tokens: Sequence[int]

    @property
    def n_tokens(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def target(self, position: int) -> int:
        index = position - len(self.prompt)
        if index >= len(self.tokens):
            return 0  # beyond the end of the text
        return self.tokens[index] if index >= 0 else self.prompt[position]

    def guesses(self, start: int, branch: Branch, width: int, age: int = 0) -> list[Guess]:
        return []


UNRECORDED, UNRECORDED_P = 1 << 24, 1e-4
"""The first token id and the probability of guesses that were too unlikely to be recorded. Real drafts have as many
guesses as are wanted, so that trees of a given width have rows for them. None is right."""

Guesses = Sequence[tuple[int, float]]  # a draft's guesses for a token: pairs of token and probability, likeliest first


@dataclass(frozen=True)
class RecordedChoices:
    """A target's text after a prompt of `n_prompt` tokens, and the guesses of a draft. `off_path`: for each token, if
    the best guess is wrong: after this guess, and after each best guess that follows. No guess on a wrong branch is
    accepted; how sure the draft is there decides what it sends. A branch that was not recorded has the guesses of one
    that was, or of a right context in a record without any."""

    name: str
    n_prompt: int
    tokens: Sequence[int]
    known: Sequence[Guesses]  # for each token, and for the one after the text
    off_path: Sequence[Sequence[Guesses]] = ()

    @cached_property
    def prompt(self) -> Sequence[int]:
        """Random tokens, as those of the prompt are not recorded."""
        return np.random.default_rng([self.n_prompt, *self.tokens]).integers(0, 1 << 15, self.n_prompt).tolist()

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + len(self.tokens)

    @property
    def acceptance(self) -> float:
        """The share of tokens that are the draft's best guess."""
        return sum(self.hits) / len(self.tokens)

    @cached_property
    def hits(self) -> list[bool]:
        """For each token whether it is the draft's best guess."""
        return [guesses[0][0] == token for guesses, token in zip(self.known, self.tokens, strict=False)]

    def target(self, position: int) -> int:
        index = position - self.n_prompt
        if index >= len(self.tokens):
            return 0  # beyond the end of the text
        return self.tokens[index] if index >= 0 else self.prompt[position]

    def guesses(self, start: int, branch: Branch, width: int, age: int = 0) -> list[Guess]:
        index = start - self.n_prompt + 1
        right = self.known[index if 0 <= index < len(self.known) else 0]
        guesses = self._after_wrong(index, branch) if branch else right
        unrecorded = ((UNRECORDED + rank, UNRECORDED_P) for rank in range(len(guesses), width))
        return [Guess(token, probability) for token, probability in (*guesses[:width], *unrecorded)]

    def _after_wrong(self, index: int, branch: Branch) -> Guesses:
        number = hash((index, branch))
        if not self._branches:
            return self.known[number % max(1, len(self.tokens))]
        is_recorded = 0 <= index < len(self.off_path) and self.off_path[index] and self.known[index][0][0] == branch[0]
        chain = self.off_path[index] if is_recorded else self._branches[number % len(self._branches)]
        return chain[min(len(branch), len(chain)) - 1]

    @cached_property
    def _branches(self) -> Sequence[Sequence[Guesses]]:
        return [chain for chain in self.off_path if chain]


def write_choices(path: Path, texts: Iterable[RecordedChoices]) -> None:
    """Raises UserError if the file cannot be written."""
    lines = (json.dumps(asdict(text), separators=(",", ":")) + "\n" for text in texts)
    write_file(path, "choices", "".join(lines).encode())


def read_choices(path: Path) -> list[RecordedChoices]:
    """Raises UserError for a file that cannot be read or holds no recorded texts."""
    try:
        texts = [RecordedChoices(**json.loads(line)) for line in path.read_text().splitlines()]
        if texts and all(text.tokens and len(text.known) == len(text.tokens) + 1 and all(text.known) for text in texts):
            return texts
    except OSError as error:
        raise UserError(f"--choices {path}: {error.strerror}; name a file that can be read") from None
    except (ValueError, TypeError):
        pass
    raise UserError(f"--choices {path} holds no recorded texts, a JSON object a line; experiments/record.py makes them")
