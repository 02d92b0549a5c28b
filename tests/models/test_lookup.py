"""Guesses without a model: the longest match, what is learned of matches, and beside a draft's guesses."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from pipeinfer.core.requests import Emission, Request
from pipeinfer.core.runs import Guess
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.tree import LOOKED_UP, Node, TokenTree
from pipeinfer.models.demo import TARGET
from pipeinfer.models.drafts.lookup import LENGTHS, LONGEST, PRIOR, LookupDrafter, Trust
from pipeinfer.policies import Auto, PipeInfer
from pipeinfer.policies.learning import Calibration
from pipeinfer.virtual import simulation
from pipeinfer.virtual.choices import Branch, SyntheticChoices, ranks_for
from pipeinfer.virtual.drafts import SimDrafter
from pipeinfer.virtual.profile import load_profile
from tests.core.test_engine import toy_engine, toy_pipeline
from tests.support.audit import audit_engine, emitted
from tests.support.jobs import finish, run_json
from tests.support.toy import N_LAYERS


def request_of(tokens: Sequence[int]) -> Request:
    return Request(0, tokens, 50, SamplingParams(temp=0.0), 200)


def never() -> bool:
    raise AssertionError("asked, and nothing takes time")


class Model:
    """A draft that guesses the same after every node, and notes what it was asked."""

    can_open = True

    def __init__(self, guesses: list[Guess]) -> None:
        self.guesses, self.asked = guesses, list[Node]()

    def open(self, request: Request) -> None: ...

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> dict[Node, list[Guess]] | None:
        self.asked += widths
        return None if interrupted() else {node: self.guesses[:n] for node, n in widths.items()}

    def settle(self, request: Request, path: Sequence[Node]) -> None: ...

    def close(self, request: Request) -> None: ...

    def forget(self, request: Request) -> None: ...


def looked_up(request: Request, node: Node, drafter: LookupDrafter | None = None) -> list[Guess]:
    drafter = drafter or LookupDrafter()
    drafter.open(request)
    found = drafter.expand(request, {node: 4}, never)
    assert found
    return found[node]


@pytest.mark.parametrize(
    ("tokens", "follower"),
    [
        ([1, 2, 3, 9, 1, 2], 3),
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 3),  # the longer match, not the newer one
        ([1, 2, 3, 1, 2, 4, 1, 2], 4),  # the newer of two that are equally long
        ([5, 5, 5], 5),  # a match may overlap the text's end
        ([1, 2, 3, 4], None),
        ([2, 3, 9, 1, 3], None),  # one token is too short
        ([1], None),
    ],
)
def test_what_followed_the_longest_match(tokens: list[int], follower: int | None) -> None:
    request = request_of(tokens)
    found = looked_up(request, request.tree.root)
    assert [guess.token for guess in found] == ([] if follower is None else [follower])


def test_a_chain_goes_on_where_its_match_stands() -> None:
    """Below the root the text is the path's, and a match grows with the chain, up to the end of what is known."""
    text = [1, 2, 3, 4, 5, 6, 9, 1, 2]
    request, drafter = request_of(text), LookupDrafter()
    drafter.open(request)
    node, found, confidences = request.tree.root, [], []
    while True:
        asked = drafter.expand(request, {node: 1}, never)
        assert asked
        if not asked[node]:
            break
        (guess,) = asked[node]
        found.append(guess.token)
        confidences.append(guess.probability)
        (node,) = request.tree.grow(node, [guess], [0.0])
        if len(found) == 12:
            break
    assert found == [3, 4, 5, 6, 9, 1, 2, 3, 4, 5, 6, 9], "then the match begins anew, before what is itself a guess"
    assert confidences[:7] == sorted(confidences[:7]) and confidences[7] == PRIOR[0]


def test_trust_follows_what_was_right() -> None:
    trust = Trust()
    assert [trust.of(length) for length in LENGTHS] == list(PRIOR)
    assert trust.of(5) == trust.of(4) and trust.of(LONGEST) == PRIOR[-1]
    for _ in range(100):
        trust.count(2, False)
        trust.count(7, True)
    assert trust.of(2) < 0.1 and trust.of(6) > 0.95 and trust.of(3) == PRIOR[1]
    drafter = LookupDrafter()
    drafter.trust = trust
    drafter.unlearn()
    assert drafter.trust.of(2) == PRIOR[0]


def test_settling_judges_the_matches_on_the_path() -> None:
    request, drafter = request_of([1, 2, 3, 9, 1, 2]), LookupDrafter()
    drafter.open(request)
    for token, more in ((3, True), (4, False)):
        root = request.tree.root
        before = drafter.trust.of(2 if token == 3 else 3)
        drafter.expand(request, {root: 1}, never)
        root.verdict = token
        settled = request.tree.settle()
        request.take(settled.tokens)
        drafter.settle(request, settled.path)
        assert (drafter.trust.of(2 if token == 3 else 3) > before) is more
    drafter.close(request)
    assert not drafter._texts, "nothing is kept of a request that has ended"


def test_a_match_is_judged_once_its_node_is_passed_however_late_that_is_heard() -> None:
    request, drafter = request_of([1, 2, 3, 9, 1, 2]), LookupDrafter()
    drafter.open(request)
    drafter.expand(request, {request.tree.root: 1}, never)
    (child,) = request.tree.grow(request.tree.root, [Guess(3, 0.9)], [0.0])
    drafter.expand(request, {child: 1}, never)
    before, paths = drafter.trust.of(3), []
    for token in (3, 9):
        request.tree.root.verdict = token
        settled = request.tree.settle()
        request.take(settled.tokens)
        paths.append(settled.path)
    for path in paths:
        drafter.settle(request, path)
    assert drafter.trust.of(3) > before


def test_a_draft_is_asked_where_nothing_is_sure() -> None:
    model = Model([Guess(8, 0.6), Guess(3, 0.2), Guess(7, 0.1)])
    request = request_of([1, 2, 3, 9, 1, 2])
    drafter = LookupDrafter(model)
    drafter.open(request)
    root = request.tree.root
    found = drafter.expand(request, {root: 3}, lambda: False)
    assert found
    merged = found[root]
    assert [guess.token for guess in merged] == [8, 3, 7]
    assert [guess.probability for guess in merged] == pytest.approx([0.45, 0.4, 0.075]), "others share the rest"
    assert drafter.expand(request, {root: 3}, lambda: True) is None
    for _ in range(50):
        drafter.trust.count(2, True)
    model.asked.clear()
    assert drafter.expand(request, {root: 3}, never) == {root: [Guess(3, drafter.trust.of(2))]} and not model.asked


def test_auto_has_looked_up_before_a_draft_is_asked() -> None:
    """A sure guess needs no draft; an unsure one keeps its probability unless the draft is surer of it."""
    model = Model([Guess(8, 0.6), Guess(3, 0.2)])
    for judged, asked, children in ((True, False, [3]), (False, True, [8, 3])):
        drafter = LookupDrafter(model)
        for _ in range(50 * judged):
            drafter.trust.count(2, True)
            drafter.trust.count(3, True)
        engine = toy_engine(toy_pipeline(random.Random(1), 2, 700, False), SequencePool(8, 700), drafter)
        request = Request(0, [1, 2, 3, 9, 1, 2], 20, SamplingParams(temp=0.0), 200)
        engine.add(request, Auto())
        model.asked.clear()
        root = request.tree.root
        (active,) = engine._active.values()
        engine.speculator.look_up(active)
        assert [node.token for node in root.children] == [3] and not root.run_id
        assert root.looked_up and root.expanded is not asked
        if asked:
            found = drafter.expand(request, {root: 3}, lambda: False)
            assert found and engine.speculator._take(active, [root], found)
        assert [node.token for node in root.children] == children and (root in model.asked) is asked
        assert next(node for node in root.children if node.token == 3).guessed_by == LOOKED_UP


def test_a_draft_learns_nothing_of_what_was_looked_up() -> None:
    calibration, tree = Calibration(), TokenTree(1, 0)
    (child,) = tree.grow(tree.root, [Guess(2, 0.9)], [math.log(0.9)], LOOKED_UP)
    tree.root.verdict, child.verdict = 2, 4
    tree.grow(child, [Guess(3, 0.9)], [math.log(0.9)])
    settled = tree.settle()
    calibration.settled(settled)
    assert settled.n_contested == 2 and calibration._n_firsts == 1 and calibration.first_rate == 0.0


def test_a_known_guess_is_as_probable_as_whoever_is_surest_says() -> None:
    tree = TokenTree(1, 0)
    low, high = tree.grow(tree.root, [Guess(2, 0.2), Guess(3, 0.6)], [math.log(0.2), math.log(0.6)], LOOKED_UP)
    (below,) = tree.grow(low, [Guess(4, 0.5)], [math.log(0.5)])
    assert not tree.grow(tree.root, [Guess(2, 0.9), Guess(3, 0.1)], [math.log(0.9), math.log(0.1)])
    assert (low.guessed_by, high.guessed_by) == (0, LOOKED_UP) and tree.root.children == [low, high]
    assert math.exp(below.score) == pytest.approx(0.45) and math.exp(high.score) == pytest.approx(0.6)


def test_a_toy_that_repeats_itself_is_guessed_without_a_model() -> None:
    rng = random.Random(5)
    engine = toy_engine(toy_pipeline(rng, 3, 700, False), SequencePool(8, 700), LookupDrafter())
    request = Request(0, [5, 6, 7, 8] * 10, 60, SamplingParams(temp=0.0), 200)
    engine.add(request, PipeInfer())
    emissions: list[Emission] = []
    for emission in emitted(engine):
        audit_engine(engine)
        emissions.append(emission)
    plain = toy_engine(toy_pipeline(rng, N_LAYERS, 700, False), SequencePool(8, 700), None)
    alone = Request(0, [5, 6, 7, 8] * 10, 60, SamplingParams(temp=0.0), 200)
    plain.add(alone, PipeInfer())
    plain.complete()
    assert request.tokens == alone.tokens


class Repeating(SyntheticChoices):
    """A text that begins anew every `period` tokens."""

    def __init__(self, period: int) -> None:
        self.period = period
        super().__init__(ranks_for(0.66), 1, 200)

    def target(self, position: int) -> int:
        return super().target(position % self.period)

    def guesses(self, start: int, branch: Branch, width: int, age: int = 0) -> list[Guess]:
        return super().guesses(start if branch else start % self.period, branch, width)


@pytest.mark.parametrize(("period", "least", "most"), [(150, 1.5, math.inf), (1 << 20, 0.98, 1.02)])
def test_what_it_is_worth_beside_a_draft(
    period: int, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, speeds = load_profile("pipeinfer-c").lay_out(8, "dolphin-tinyllama"), []
    for kind in (SimDrafter, lambda *given: LookupDrafter(SimDrafter(*given))):
        monkeypatch.setattr(simulation, "SimDrafter", kind)
        found = simulation.simulate(profile, Repeating(period), PipeInfer(), 150).metrics
        speeds.append(149 / (found.token_s[-1] - found.token_s[0]))
    assert least <= speeds[1] / speeds[0] <= most, speeds


class OnceEach(LookupDrafter):
    """Nodes come when they were looked up, and never again once there was an answer."""

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> Mapping[Node, list[Guess]] | None:
        assert all(node.looked_up for node in widths) and not answered & widths.keys()
        found = super().expand(request, widths, interrupted)
        answered.update(found or ())
        return found


answered: set[Node] = set()


class OfSixWords(SyntheticChoices):
    """What stood before is often found, and mostly wrong."""

    def target(self, position: int) -> int:
        return super().target(position) % 6


@pytest.mark.parametrize("has_draft", [False, True])
def test_nodes_are_looked_up_before_a_draft_expands_them_once(has_draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = load_profile("pipeinfer-c").lay_out(8, "dolphin-tinyllama")
    monkeypatch.setattr(simulation, "SimDrafter", lambda *given: OnceEach(SimDrafter(*given) if has_draft else None))
    choices = Repeating(1 << 20) if has_draft else OfSixWords(ranks_for(0.66), 1, 200)
    assert simulation.simulate(profile, choices, Auto(), 300).metrics.n_drafted


TEXT = ["-p", "def read_lines(path):\n", "-n", "200", "--temp", "0", "--ignore-eos", "-t", "1"]


def test_the_text_is_the_targets_and_the_repeating_part_is_guessed() -> None:
    plain = run_json(1, [*TEXT, "--policy", "iterative"])
    for n_ranks, flags in ((2, ["-md", "none"]), (3, [])):
        assert run_json(n_ranks, [*TEXT, "--lookup", *flags])["tokens"] == plain["tokens"]
        # unlike `auto` it guesses whether that saves time here or not
        found = run_json(n_ranks, [*TEXT, "--lookup", "--policy", "pipeinfer", *flags])
        assert found["tokens"] == plain["tokens"]
        assert "lookup" in found["settings"] and found["speculation"]["draft_n_accepted"] > 50


def test_auto_looks_up_unless_it_is_told_not_to() -> None:
    asked = [*TEXT, "-md", "none", "--policy", "auto"]
    plain, auto, without = (run_json(1, [*asked, *words]) for words in (["--policy", "iterative"], [], ["--no-lookup"]))
    assert plain["tokens"] == auto["tokens"] == without["tokens"]
    assert auto["speculation"]["draft_n"] > 0 == without["speculation"]["draft_n"]
    assert "no-lookup" in without["settings"] and "lookup" not in auto["settings"]


def test_auto_is_the_default_on_several_ranks_without_a_draft() -> None:
    asked = [*TEXT, "-md", "none"]
    alone, auto, without = (run_json(*each) for each in ((1, asked), (2, asked), (2, [*asked, "--no-lookup"])))
    assert [each["policy"] for each in (alone, auto, without)] == ["iterative", "auto", "iterative"]
    assert alone["tokens"] == auto["tokens"] == without["tokens"]
    assert auto["speculation"]["draft_n"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-md", "none", "--policy", "pipeinfer"], "--lookup"),
        (["-md", "none", "-md", str(TARGET)], "-md none is no draft"),
    ],
)
def test_without_guesses_there_is_no_speculation(arguments: list[str], words: str) -> None:
    done = finish(1, ["run", "-p", "x", *arguments])
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
