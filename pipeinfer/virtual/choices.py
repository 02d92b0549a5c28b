"""What target and draft would say, without computing it: synthetic choices. Knows no time.

A context is named by `start`, the position of the last token that is on the target's own path, and `branch`, the wrong
tokens after it. The target is only asked on its own path: what descends from a wrong guess is dead before its verdict.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Protocol

import numpy as np

from pipeinfer.core.runs import Guess
from pipeinfer.errors import UserError
from pipeinfer.policies.limits import MAX_WIDTH

Branch = tuple[int, ...]


class Choices(Protocol):
    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def n_tokens(self) -> int:
        """How many tokens, the prompt's included, the target's path has."""
        ...

    def target(self, position: int) -> int:
        """The token at `position` on the target's path."""
        ...

    def guesses(self, start: int, branch: Branch, width: int, age: int = 0) -> list[Guess]:
        """What the draft guesses after a context, likeliest first. `age`: tokens after the newest one that the target
        has judged."""
        ...


def n_predicted(choices: Choices, n_predict: int) -> int:
    """Tokens of a text that is to have `n_predict`, where the target's path does not end before."""
    return min(n_predict, choices.n_tokens - len(choices.prompt))


SPREAD = 2.0
"""alpha + beta of the Beta distribution of the draft's confidence; 2.3 for the shipped pair of models, less for drafts
that are surer of themselves."""

FURTHER = 0.5
"""How often a further guess is right if those before it were wrong, as a share of how often the first one is. The
shipped pair (0.66) has 0.35 for the second and 0.18 for the third guess; PipeDec's figure 3 a top 8 of nearly 1."""


def ranks_text(by_rank: Sequence[float]) -> str:
    """`0.7`, where further guesses are as usual; else all of them."""
    usual = ranks_for(by_rank[0], len(by_rank))
    return f"{by_rank[0]:g}" if tuple(by_rank) == usual else ",".join(f"{share:g}" for share in by_rank)


def ranks_for(acceptance: float, n_ranks: int = MAX_WIDTH) -> tuple[float, ...]:
    """Shares of tokens that are the draft's first, second, … guess. Raises UserError if `acceptance` is no
    probability."""
    if not 0 <= acceptance <= 1:
        raise UserError(f"an acceptance of {acceptance:g} is no probability; give a number from 0 to 1")
    again = FURTHER * acceptance
    return (acceptance, *((1 - acceptance) * again * (1 - again) ** rank for rank in range(n_ranks - 1)))


class SyntheticChoices:
    """A target and a draft that has the right token at rank r with probability `by_rank[r]`.

    The draft is calibrated: the confidence of its best guess is drawn from a Beta distribution with mean `by_rank[0]`,
    and the guess is right that often. Everything is a pure function of the seed and the context.

    `beside`: another draft of the same target. The two find the same tokens easy: where one is surer the other is too,
    and the better one is right wherever the other is.

    `ageing`: of a draft that reads the target's features, as EAGLE's does. For each token of the context that the
    target has not judged, since the draft goes on from features of its own there, all of `by_rank` is multiplied by one
    of these: by the first for the first such token, and so on, by the last one for all further ones.
    """

    N_WRONG = 1 << 12

    def __init__(
        self,
        by_rank: Sequence[float],
        seed: int = 0,
        n_prompt: int = 128,
        n_tokens: int = 1 << 20,
        n_vocab: int = 32000,
        beside: "SyntheticChoices | None" = None,
        ageing: Sequence[float] = (),
    ) -> None:
        """Raises UserError when `by_rank` are no probabilities that add up to 1 at most."""
        if not by_rank or min(by_rank) < 0 or sum(by_rank) > 1 + 1e-9:
            raise UserError(
                f"--ranks {','.join(f'{p:g}' for p in by_rank)}: give numbers from 0 to 1 whose sum is 1 at most"
            )
        self.by_rank, self.seed, self.n_vocab, self.n_tokens = tuple(by_rank), seed, n_vocab, n_tokens
        self.beside, self._further = beside, ageing[-1] if ageing else 1.0
        self._kept = list(accumulate(ageing, mul, initial=1.0))  # of `by_rank`, by age
        missed = max(1 - by_rank[0], 1e-12)
        self._tail = list(accumulate(share / missed for share in by_rank[1:]))  # given that the first is wrong
        self._decay = [share / missed for share in (*by_rank[1:], *[1e-6] * MAX_WIDTH)][: MAX_WIDTH - 1]
        self._tokens: list[int] = []
        self._confidence: list[float] = []
        self._rank: list[int] = []  # of the right token; MAX_WIDTH: not among the guesses
        self._endures: list[float] = []  # it stays there while more than this is kept
        self._n_blocks = 0
        # confidences after wrong tokens: nothing ever comes of them, only their distribution counts
        self._wrong_confidence = self._confidences(np.random.default_rng([seed, 1]), self.N_WRONG).tolist()
        self.prompt = [self.target(position) for position in range(n_prompt)]

    def _confidences(self, rng: np.random.Generator, n: int) -> np.ndarray:
        mean = min(max(self.by_rank[0], 1e-3), 1 - 1e-3)
        return np.clip(rng.beta(SPREAD * mean, SPREAD * (1 - mean), n), 1e-4, 1 - 1e-4)

    def _extend(self) -> None:
        """The next block of positions."""
        confidence, tokens, first, later, endures = (self.beside or self)._block(self._n_blocks)
        if self.beside:
            own = self._confidences(np.random.default_rng([self.seed, 2, self._n_blocks]), len(confidence))
            confidence[np.argsort(confidence)] = np.sort(own)
        self._n_blocks += 1
        self._tokens += tokens.tolist()
        self._confidence += confidence.tolist()
        self._endures += endures.tolist()
        # 0 and 1 are meant exactly
        hits = first < (confidence if 0 < self.by_rank[0] < 1 else self.by_rank[0])
        self._rank += [
            0 if hit else self._later_rank(draw) for hit, draw in zip(hits.tolist(), later.tolist(), strict=True)
        ]

    def _block(self, index: int, n: int = 1024) -> tuple[np.ndarray, ...]:
        """Of a block of positions: confidences, tokens, the draws for the first guess, for further ones, for their
        ageing."""
        rng = np.random.default_rng([self.seed, 0, index])
        draws = (rng.random(n) for _ in range(3))
        return self._confidences(rng, n), rng.integers(0, self.n_vocab, n), *draws

    def _later_rank(self, draw: float) -> int:
        rank = 1 + bisect_left(self._tail, draw)
        return rank if rank <= len(self._tail) else MAX_WIDTH

    def target(self, position: int) -> int:
        while position >= len(self._tokens):
            self._extend()
        return self._tokens[position]

    def _kept_at(self, age: int) -> float:
        while len(self._kept) <= age:
            self._kept.append(self._kept[-1] * self._further)
        return self._kept[age]

    def guesses(self, start: int, branch: Branch, width: int, age: int = 0) -> list[Guess]:
        kept = self._kept_at(age)
        if branch:
            h = hash((self.seed, start, *branch))  # integers hash alike in every process
            return self._list(self._wrong_confidence[h % self.N_WRONG], h % self.n_vocab, MAX_WIDTH, width, kept)
        right = self.target(start + 1)
        rank = self._rank[start] if self._endures[start] < kept else MAX_WIDTH
        return self._list(self._confidence[start], right, rank, width, kept)

    def _list(self, confidence: float, right: int, rank: int, width: int, kept: float) -> list[Guess]:
        """`width` guesses, `right` at its rank; the others are its neighbours. `kept`: of their probabilities."""
        missed = 1 - confidence
        found = []
        for index in range(min(width, MAX_WIDTH)):
            token = right if index == rank else (right + 1 + index) % self.n_vocab
            found.append(Guess(token, kept * (missed * self._decay[index - 1] if index else confidence)))
        return found


def synthetic_team(
    by_rank: Sequence[Sequence[float]], seed: int = 0, n_prompt: int = 128, ageing: Sequence[float] = ()
) -> list[SyntheticChoices]:
    """One target and several drafts, one for each of `by_rank`. Raises UserError as SyntheticChoices does."""
    first = SyntheticChoices(by_rank[0], seed, n_prompt, ageing=ageing)
    return [first, *(SyntheticChoices(ranks, seed, n_prompt, beside=first, ageing=ageing) for ranks in by_rank[1:])]
