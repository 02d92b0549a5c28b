"""Guesses without a model: what followed the newest tokens where they stood before. Knows texts and trees; no model.

Prompt lookup decoding (Saxena 2023; as references, Yang et al. 2023): text that repeats its prompt or itself is guessed
for nothing.
"""

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

SHORTEST, LONGEST = 2, 32
"""Tokens that must have stood there before, and beyond which it makes no difference how many."""

N_PLACES = 32  # the newest of them are compared

LENGTHS = (2, 3, 4, 6, 10, 18, LONGEST)
PRIOR = (0.4, 0.55, 0.65, 0.75, 0.85, 0.92, 0.95)
"""How often what follows a match of so many tokens is right, before anything was seen; worth `PRIOR_WEIGHT` matches."""

PRIOR_WEIGHT, MEMORY = 4.0, 0.98

SURE = 0.9
"""From here on the draft model is not asked too."""


class Match(NamedTuple):
    """`token` followed where the text's last `length` tokens stood, the last of them at `place`."""

    token: int
    length: int
    place: int


class Trust:
    """How often a match of some length was right: a running share for each class of lengths."""

    def __init__(self) -> None:
        self._right = [PRIOR_WEIGHT * share for share in PRIOR]
        self._all = [PRIOR_WEIGHT] * len(PRIOR)

    def of(self, length: int) -> float:
        index = bisect_right(LENGTHS, length) - 1
        return self._right[index] / self._all[index]

    def judged(self, length: int, right: bool) -> None:
        index = bisect_right(LENGTHS, length) - 1
        self._right[index] = MEMORY * self._right[index] + right
        self._all[index] = MEMORY * self._all[index] + 1.0


@dataclass(slots=True)
class _Text:
    """One request's committed tokens, by their last `SHORTEST` tokens; and what was found for nodes of its tree."""

    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    n_known: int = 0
    found: dict[Node, Match] = field(default_factory=dict)

    def learn(self, tokens: Sequence[int]) -> None:
        """A place without a token after it is of no use yet."""
        for place in range(max(self.n_known, SHORTEST - 1), len(tokens) - 1):
            self.places.setdefault(tuple(tokens[place + 1 - SHORTEST : place + 1]), []).append(place)
        self.n_known = max(self.n_known, len(tokens) - 1)

    def match(self, tokens: Sequence[int], node: Node) -> Match | None:
        """The longest, the newest of equally long ones."""
        before = self.found.get(node.parent) if node.parent else None
        if before and before.token == node.token and before.place + 2 < len(tokens):
            # nothing else can be longer than the parent's longest match with one token more
            return Match(tokens[before.place + 2], min(before.length + 1, LONGEST), before.place + 1)
        suffix = _newest(tokens, node)
        best: Match | None = None
        for place in reversed(self.places.get(tuple(suffix[-SHORTEST:]), [])[-N_PLACES:]):
            length = _common(tokens, place, suffix)
            if best is None or length > best.length:
                best = Match(tokens[place + 1], length, place)
        return best


def _newest(tokens: Sequence[int], node: Node) -> list[int]:
    """The last tokens of the path that ends with the node, `LONGEST` at most."""
    below: list[int] = []
    step = node
    while step.parent is not None:
        below.append(step.token)
        step = step.parent
    return [*tokens[-LONGEST:], *reversed(below)][-LONGEST:]


def _common(tokens: Sequence[int], place: int, suffix: Sequence[int]) -> int:
    """How many tokens up to `place` are those at the end of `suffix`."""
    length = 0
    while length < len(suffix) and place >= length and tokens[place - length] == suffix[-1 - length]:
        length += 1
    return length


class LookupDrafter:
    """A Drafter that looks up, and asks `model`, a draft, where it finds nothing or is not sure. What it learns of how
    often matches are right is shared by all requests. `is_on`: without it only the model guesses."""

    def __init__(self, model: Drafter | None = None) -> None:
        self.model, self.trust, self.is_on = model, Trust(), True
        self._reader = model if isinstance(model, FeatureDrafter) else None
        self._texts: dict[int, _Text] = {}

    @property
    def can_open(self) -> bool:
        return self.model is None or self.model.can_open

    def open(self, request: Request) -> None:
        self._texts[request.id] = _Text()
        if self.model:
            self.model.open(request)

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> Mapping[Node, list[Guess]] | None:
        found = {node: self.look_up(request, node) for node in widths}
        looked_up = {node: guess for node, (guess, _) in found.items() if guess}
        if self.model is None:
            return {node: [looked_up[node]] if node in looked_up else [] for node in widths}
        unsure = {node: n for node, n in widths.items() if not found[node][1]}
        guessed = self.model.expand(request, unsure, interrupted) if unsure else {}
        if guessed is None:
            return None
        # what was looked up before stands in the tree; such a node stays open until the model has room for it
        known = (
            node
            for node in widths
            if node in guessed or node not in unsure or (node in looked_up and not node.looked_up)
        )
        return {node: _merged(guessed.get(node, []), looked_up.get(node), widths[node]) for node in known}

    def unlearn(self) -> None:
        """Forget what requests before have taught."""
        self.trust = Trust()

    def look_up(self, request: Request, node: Node) -> tuple[Guess | None, bool]:
        """What followed the node's text before, and whether a model is not asked too."""
        if not self.is_on:
            return None, self.model is None
        text = self._texts[request.id]
        text.learn(request.tokens)
        match = text.match(request.tokens, node)
        if match is None:
            return None, self.model is None
        text.found[node] = match
        probability = self.trust.of(match.length)
        return Guess(match.token, probability), self.model is None or probability >= SURE

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        text = self._texts[request.id]
        for node, after in pairwise(path):
            if match := text.found.pop(node, None):
                self.trust.judged(match.length, match.token == after.token)
        text.found = {node: match for node, match in text.found.items() if node.state is not State.DEAD}
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
    """A model's guesses and the one looked up, which counts as much as whoever is surer of it says."""
    if looked_up is None:
        return guesses
    known = next((guess.probability for guess in guesses if guess.token == looked_up.token), 0.0)
    share = max(known, looked_up.probability)
    rest = (1.0 - share) / (1.0 - known) if known < 1.0 else 0.0
    others = [Guess(guess.token, rest * guess.probability) for guess in guesses if guess.token != looked_up.token]
    merged = sorted([Guess(looked_up.token, share), *others], key=lambda guess: -guess.probability)
    return merged[:width]
