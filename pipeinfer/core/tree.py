"""The token tree of one request: guesses are added, verdicts settled. Knows no model, no MPI, no sequence ids."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pipeinfer.core.runs import Guess
from pipeinfer.core.types import NO_TOKEN

LOOKED_UP = -1  # in place of a draft's number: the guess was known at once (`InstantDrafter`)


class State(Enum):
    LIVE = "live"
    RETIRED = "retired"  # accepted, above the root
    DEAD = "dead"  # not on the path the target took


@dataclass(slots=True, eq=False)
class Node:
    """A guessed token, or, at the root, a committed one. `log_prob`: the draft's; `score`: their sum along the path."""

    token: int
    position: int
    parent: "Node | None" = None
    log_prob: float = 0.0
    score: float = 0.0
    children: "list[Node]" = field(default_factory=list)
    run_id: int | None = None  # the run that carries it to the target
    verdict: int | None = None
    expanded: bool = False  # the smallest draft has guessed what follows, or does not need to
    looked_up: bool = False  # what follows was looked up
    refined: int = 0  # the largest draft that has guessed what follows
    passed_over: int = 0  # the largest draft that has had no room for it since the root moved
    guessed_by: int = 0  # the draft whose `log_prob` it is
    depth: int = 0  # below the root when it was guessed
    state: State = State.LIVE

    @property
    def live(self) -> bool:
        return self.state is State.LIVE

    def is_open(self, draft: int) -> bool:
        """Whether the larger draft may still refine it."""
        return max(self.refined, self.passed_over) < draft

    def child(self, token: int) -> "Node | None":
        return next((child for child in self.children if child.token == token), None)

    def rescore(self) -> None:
        """The scores of the subtree, after a change of its `log_prob`."""
        for node in self.subtree():
            assert node.parent
            node.score = node.parent.score + node.log_prob

    def subtree(self) -> "Iterator[Node]":
        """This node and all below it, parents before children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)


@dataclass(slots=True, eq=False)
class Settled:
    """What verdicts did to the tree: the root moved along `path`, from the old root to the new one."""

    path: list[Node]
    tokens: list[int]  # of the path without the old root
    n_judged: int = 0  # guesses whose parent got its verdict
    n_matched: int = 0  # the right ones
    contests: Sequence[tuple[list[Node], Node | None]] = ()
    """For each token that was guessed at: its guesses, likeliest first, and the right one, if any."""

    @property
    def n_matched_of_sent(self) -> int:
        """The right guesses that had been sent."""
        return sum(right is not None and right.run_id is not None for _, right in self.contests)

    @property
    def n_contested(self) -> int:
        return len(self.contests)

    @property
    def firsts(self) -> Iterator[tuple[Node, bool]]:
        """For each of them the likeliest guess, and whether it was right."""
        return ((guesses[0], guesses[0] is right) for guesses, right in self.contests)

    @property
    def drafted(self) -> "list[tuple[list[Node], Node | None]]":
        """The contests whose likeliest guess is a draft's."""
        return [contest for contest in self.contests if contest[0][0].guessed_by != LOOKED_UP]


class TokenTree:
    """The root is the newest committed token; every path below it is a guess at what follows. `nodes`: the live nodes
    in insertion order, so parents before children."""

    def __init__(self, token: int, position: int) -> None:
        self.root = Node(token, position)
        self.nodes = [self.root]

    def grow(self, parent: Node, guesses: Sequence[Guess], log_probs: Sequence[float], draft: int = 0) -> list[Node]:
        """Add children of `parent` for the guesses that it lacks; returns them. `log_probs`: of the edges; where it is
        higher than a known child's, it replaces that."""
        assert parent.live, f"growing a {parent.state.value} node at position {parent.position}"
        parent.expanded = True
        grown, children = [], {child.token: child for child in parent.children}
        for guess, log_prob in zip(guesses, log_probs, strict=True):
            child = children.get(guess.token)
            if child is None:
                node = Node(guess.token, parent.position + 1, parent, log_prob, parent.score + log_prob)
                node.depth, node.guessed_by = node.position - self.root.position, draft
                parent.children.append(node)
                children[node.token] = node
                grown.append(node)
            elif log_prob > child.log_prob:
                child.log_prob, child.guessed_by = log_prob, draft
                child.rescore()
        if len(children) > len(grown):
            parent.children.sort(key=lambda child: -child.log_prob)
        self.nodes += grown
        return grown

    def refine(self, parent: Node, guesses: Sequence[Guess], log_probs: Sequence[float], draft: int) -> list[Node]:
        """Replace a smaller draft's guesses by a larger one's: missing children are added, known ones get its
        `log_probs`, and those that it does not guess at most its least. Returns the new children."""
        assert parent.refined < draft, f"draft {draft} refines what draft {parent.refined} has refined"
        parent.refined = draft
        edges = {guess.token: log_prob for guess, log_prob in zip(guesses, log_probs, strict=True)}
        least = min(log_probs, default=0.0)
        grown = self.grow(parent, guesses, log_probs)
        for child in parent.children:
            child.log_prob, child.guessed_by = edges.get(child.token, min(child.log_prob, least)), draft
            child.rescore()
        parent.children.sort(key=lambda child: (-child.log_prob, child.token not in edges))
        return grown

    def answer(self, nodes: Sequence[Node], tokens: Sequence[int], first: int = 0) -> None:
        """Set the nodes' verdicts, from `tokens[first]` on; dead nodes may lack one."""
        for index, node in enumerate(nodes, first):
            if node.state is State.LIVE:
                token = tokens[index]
                assert token != NO_TOKEN, f"a live node at position {node.position} came back without a verdict"
                node.verdict = token

    def settle(self) -> Settled:
        """Advance the root while it has a verdict: the matching child becomes the root, or else a new, unsent node."""
        if not self.root.children and (token := self.root.verdict) is not None:
            return self._advance(token)  # nothing was guessed, as often with many requests
        path, tokens, dead, contests, n_judged, n_matched = [self.root], [], [], [], 0, 0
        while (token := self.root.verdict) is not None:
            old = self.root
            follower = old.child(token)
            n_judged += len(old.children)
            if old.children:
                contests.append((old.children, follower))
            n_matched += follower is not None
            dead += [node for child in old.children if child is not follower for node in child.subtree()]
            self.root = follower or Node(token, old.position + 1)
            # without links to old nodes their memory is freed
            old.state, old.children, self.root.parent = State.RETIRED, [], None
            path.append(self.root)
            tokens.append(token)
        for node in dead:
            node.state = State.DEAD
        if len(path) > 1:
            self.nodes = [node for node in self.nodes if node.live] or [self.root]
            for node in self.nodes:
                node.passed_over = 0
        return Settled(path, tokens, n_judged, n_matched, contests)

    def _advance(self, token: int) -> Settled:
        """As `settle` where there are no guesses."""
        old = self.root
        old.state, old.parent = State.RETIRED, None
        self.root = Node(token, old.position + 1)
        self.nodes = [self.root]
        return Settled([old, self.root], [token])

    def unsent(self) -> Iterator[Node]:
        """Live nodes that were not sent, parents before children."""
        return (node for node in self.nodes if node.run_id is None)


def with_ancestors(nodes: Sequence[Node], placed: Container[Node]) -> list[Node]:
    """The nodes and their ancestors that are not in `placed`, parents first, the order of `nodes` kept."""
    chosen: dict[Node, None] = {}
    for node in nodes:
        path: list[Node] = []
        step: Node | None = node
        while step is not None and step not in chosen and step not in placed:
            path.append(step)
            step = step.parent
        chosen |= dict.fromkeys(reversed(path))
    return list(chosen)
