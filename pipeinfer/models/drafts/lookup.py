"""Guesses without a model: the tokens that followed earlier occurrences of the newest tokens. Knows texts and trees.
Prompt lookup decoding (Saxena 2023; LLMA, Yang et al. 2023): text that repeats its prompt or itself costs no draft."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from pipeinfer.core.interfaces import Drafter, FeatureDrafter
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess
from pipeinfer.core.tree import Node, State
from pipeinfer.core.types import FloatArray
from pipeinfer.models.drafts.model_drafter import newest_tokens

SHORTEST, LONGEST = 2, 32  # the least length of a match in tokens, and the length up to which matches are compared
N_PLACES = 32  # the newest occurrences that are compared

LENGTHS = (2, 3, 4, 6, 10, 18, LONGEST)
PRIOR = (0.4, 0.55, 0.65, 0.75, 0.85, 0.92, 0.95)
"""Prior shares of right guesses for matches of these lengths, with the weight of `PRIOR_WEIGHT` matches."""

PRIOR_WEIGHT, MEMORY = 4.0, 0.98  # MEMORY: the weight of a verdict after the next one

SURE = 0.9  # the least probability at which the draft model does not guess too


class Match(NamedTuple):
    """An earlier occurrence of the newest `length` tokens, the last of them at `place`; `token` followed there."""

    token: int
    length: int
    place: int


class Trust:
    """The running share of right guesses of matches, for each class of lengths."""

    def __init__(self) -> None:
        self._right = [PRIOR_WEIGHT * share for share in PRIOR]
        self._all = [PRIOR_WEIGHT] * len(PRIOR)

    def of(self, length: int) -> float:
        index = bisect_right(LENGTHS, length) - 1
        return self._right[index] / self._all[index]

    def count(self, length: int, right: bool) -> None:
        index = bisect_right(LENGTHS, length) - 1
        self._right[index] = MEMORY * self._right[index] + right
        self._all[index] = MEMORY * self._all[index] + 1.0


@dataclass(slots=True)
class _TextIndex:
    """One request's committed tokens: positions by `SHORTEST` tokens that end there, and the matches of its nodes."""

    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    n_indexed: int = 0
    matches: dict[Node, Match] = field(default_factory=dict)

    def learn(self, tokens: Sequence[int]) -> None:
        """Index new tokens, except the last one, which has no successor yet."""
        for place in range(max(self.n_indexed, SHORTEST - 1), len(tokens) - 1):
            self.places.setdefault(tuple(tokens[place + 1 - SHORTEST : place + 1]), []).append(place)
        self.n_indexed = max(self.n_indexed, len(tokens) - 1)

    def match(self, request: Request, node: Node) -> Match | None:
        """The longest match, the newest of equally long ones."""
        tokens = request.tokens
        before = self.matches.get(node.parent) if node.parent else None
        if before and before.token == node.token and before.place + 2 < len(tokens):
            # nothing else can be longer than the parent's longest match with one token more
            return Match(tokens[before.place + 2], min(before.length + 1, LONGEST), before.place + 1)
        suffix = newest_tokens(request, node, LONGEST)
        best: Match | None = None
        for place in reversed(self.places.get(tuple(suffix[-SHORTEST:]), [])[-N_PLACES:]):
            length = 0  # of the tokens up to the place that equal those at the end of the suffix
            while length < len(suffix) and place >= length and tokens[place - length] == suffix[-1 - length]:
                length += 1
            if best is None or length > best.length:
                best = Match(tokens[place + 1], length, place)
        return best


class LookupDrafter:
    """A Drafter that looks up, and lets `model`, a draft, guess where the lookup has no match or is not sure. All
    requests share the shares of right matches. `is_on`: False lets only the model guess."""

    def __init__(self, model: Drafter | None = None) -> None:
        self.model, self.trust, self.is_on = model, Trust(), True
        self._reader = model if isinstance(model, FeatureDrafter) else None
        self._texts: dict[int, _TextIndex] = {}

    @property
    def can_open(self) -> bool:
        return self.model is None or self.model.can_open

    def open(self, request: Request) -> None:
        self._texts[request.id] = _TextIndex()
        if self.model:
            self.model.open(request)

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> Mapping[Node, list[Guess]] | None:
        lookups = {node: self.look_up(request, node) for node in widths}
        looked_up = {node: guess for node, (guess, _) in lookups.items() if guess}
        if self.model is None:
            return {node: [looked_up[node]] if node in looked_up else [] for node in widths}
        unsure = {node: n for node, n in widths.items() if not lookups[node][1]}
        guessed = self.model.expand(request, unsure, interrupted) if unsure else {}
        if guessed is None:
            return None

        def is_done(node: Node) -> bool:
            """False for nodes whose looked-up guess is in the tree already: they stay open until the model has room."""
            return node in guessed or node not in unsure or (node in looked_up and not node.looked_up)

        done = filter(is_done, widths)
        return {node: _merged(guessed.get(node, []), looked_up.get(node), widths[node]) for node in done}

    def unlearn(self) -> None:
        """Forget the shares of right matches of earlier requests."""
        self.trust = Trust()

    def look_up(self, request: Request, node: Node) -> tuple[Guess | None, bool]:
        """The guess after a node, and whether the model need not guess too."""
        if not self.is_on:
            return None, self.model is None
        text = self._texts[request.id]
        text.learn(request.tokens)
        match = text.match(request, node)
        if match is None:
            return None, self.model is None
        text.matches[node] = match
        probability = self.trust.of(match.length)
        return Guess(match.token, probability), self.model is None or probability >= SURE

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        text = self._texts[request.id]
        for node, after in pairwise(path):
            if match := text.matches.pop(node, None):
                self.trust.count(match.length, match.token == after.token)
        text.matches = {node: match for node, match in text.matches.items() if node.state is not State.DEAD}
        if self.model:
            self.model.settle(request, path)

    def read(self, request: Request, start: int, nodes: Sequence[Node], features: FloatArray) -> None:
        if self._reader:
            self._reader.read(request, start, nodes, features)

    def close(self, request: Request) -> None:
        del self._texts[request.id]
        if self.model:
            self.model.close(request)

    def forget(self, request: Request) -> None:
        if self.model:
            self.model.forget(request)


def _merged(guesses: list[Guess], looked_up: Guess | None, width: int) -> list[Guess]:
    """A model's guesses and the one looked up, with the larger of their probabilities for the same token."""
    if looked_up is None:
        return guesses
    modelled = next((guess.probability for guess in guesses if guess.token == looked_up.token), 0.0)
    share = max(modelled, looked_up.probability)
    rest = (1.0 - share) / (1.0 - modelled) if modelled < 1.0 else 0.0
    others = [Guess(guess.token, rest * guess.probability) for guess in guesses if guess.token != looked_up.token]
    merged = sorted([Guess(looked_up.token, share), *others], key=lambda guess: -guess.probability)
    return merged[:width]
