"""Several drafts: whatever larger ones say, and whenever, the text is the target's; what they say is used."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from pipeinfer.cluster.verdicts import decode_guess_verdict, encode_verdict
from pipeinfer.core.interfaces import Drafter
from pipeinfer.core.levels import Level, RequestSlice
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Finish, Request
from pipeinfer.core.runs import Guess, GuessVerdict
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.tree import Node, TokenTree
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.policies import PipeInfer, PipeSpec, Speculative
from tests.core.test_engine import N_LAYERS, random_drafter, random_policy, toy_engine, toy_pipeline
from tests.support.audit import audit_engine, audit_tree, emitted
from tests.support.cases import cases
from tests.support.toy import N_VOCAB, NoisyStage, OracleDrafter, Reference, ToyDraftPipeline


def draft_levels(
    rng: random.Random, n_ctx: int, rights: Sequence[float], n_seqs: Sequence[int] = (1, 4, 16)
) -> list[Level]:
    """A larger draft for each of `rights`, the share of contexts in which it says what the target does."""
    levels = []
    for right in rights:
        cuts = [0, *sorted(rng.sample(range(1, N_LAYERS), rng.randint(0, 2))), N_LAYERS]
        models = [NoisyStage(first, last, right, n_cells=n_ctx + 64) for first, last in pairwise(cuts)]
        larger = ToyDraftPipeline(models, rng, late=rng.choice([0.0, 0.5, 0.95]))
        pool = SequencePool(rng.choice(n_seqs), n_ctx + 64)
        levels.append(Level(larger, pool, n_rows=rng.choice([1, 4, 16]), n_chunk=rng.choice([4, 64])))
    return levels


def run_case(
    seed: int, n_larger: Sequence[int] = (1, 2), make_policy: Callable[[random.Random], Policy] = random_policy
) -> int:
    """One random configuration with some of so many larger drafts; returns how many nodes were refined."""
    rng, reference = random.Random(seed), Reference(N_LAYERS)
    n_ctx, parked = rng.choice([48, 64, 200]), rng.random() < 0.5
    n_cells = n_ctx + rng.randint(8, 80)
    pipeline = toy_pipeline(rng, rng.randint(1, N_LAYERS), n_cells, parked)
    drafts = draft_levels(rng, n_ctx, [rng.random() for _ in range(rng.choice(n_larger))])
    pool = SequencePool(rng.choice([1, 3, 64]), n_cells, parked)
    drafter: Drafter | Level = random_drafter(rng, reference, n_ctx, seed)
    if seed % 3 == 0:  # another rank has it
        own = random.Random(-seed)
        drafter = draft_levels(own, n_ctx, [own.random()])[0]
    n_chunk, cancel = rng.choice([3, 64]), rng.random() < 0.9
    engine = toy_engine(pipeline, pool, drafter, drafts, n_chunk=n_chunk, cancel=cancel)
    params = SamplingParams(seed, temp=rng.choice([0.0, 0.8]), repeat_last_n=9, repeat_penalty=rng.choice([1.0, 1.3]))
    n_refined = 0
    for request_id in range(rng.choice([1, 2])):
        prompt = [rng.randrange(N_VOCAB) for _ in range(rng.choice([1, 2, 30]))]
        policy, metrics = make_policy(rng), RequestMetrics()
        # its drafts go on until the end of the text, and every node is audited at every step
        n_predict = 16 if isinstance(policy, PipeSpec) else 40
        request = Request(request_id, prompt, n_predict, params, n_ctx)
        engine.add(request, policy, metrics)
        while engine.busy:
            engine.step()
            audit_engine(engine)
        n_expected = min(n_predict, n_ctx - len(prompt))
        assert request.tokens[len(prompt) :] == reference.generate(prompt, n_expected, params), f"seed {seed}"
        n_refined += metrics.n_refined
    assert not any(level.busy for level in engine.levels), "a run was forgotten"
    assert all(level.pool.n_free == level.pool.n_seq for level in engine.levels), "a sequence leaks"
    return n_refined


@pytest.mark.parametrize("block", cases(1, 4))
def test_whatever_larger_drafts_say_the_text_is_the_targets(block: int) -> None:
    n_refined = sum(run_case(seed) for seed in range(block * 50, block * 50 + 50))
    assert n_refined > 500


@pytest.mark.parametrize("n_drafts", [1, 2, 3])
def test_a_hierarchy_of_models_gives_the_largest_ones_text(n_drafts: int) -> None:
    def hierarchy(rng: random.Random) -> Policy:
        return PipeSpec(rng.choice([0, 0, 1, 3, 40]), asynchronous=rng.random() < 0.5)

    n_refined = sum(run_case(seed, [n_drafts - 1], hierarchy) for seed in range(15))
    assert n_refined >= 100 * (n_drafts - 1)


def generate(policy: Policy, small: float, large: Sequence[float], seed: int = 1) -> tuple[Request, float]:
    """A generation with drafts that are right so often; (the request, tokens per target run with the root)."""
    rng, reference = random.Random(seed), Reference(N_LAYERS)
    pipeline = toy_pipeline(rng, 4, 500, False)
    drafts = draft_levels(rng, 400, large, n_seqs=(16,))
    engine = toy_engine(pipeline, SequencePool(16, 500), OracleDrafter(reference, small), drafts)
    request = Request(0, [1, 2, 3], 300, SamplingParams(temp=0.0), 400)
    metrics = RequestMetrics()
    engine.add(request, policy, metrics)
    engine.complete()
    assert request.tokens[3:] == reference.generate([1, 2, 3], 300, request.sampling)
    return request, 300 / metrics.n_root_runs


@pytest.mark.parametrize("policy", [PipeInfer, Speculative])
def test_a_better_larger_draft_raises_what_is_accepted(policy: type[PipeInfer] | type[Speculative]) -> None:
    alone = generate(policy(), 0.2, [])[1]
    helped = generate(policy(), 0.2, [1.0])[1]
    assert helped > 1.5 * alone


def test_the_largest_of_three_drafts_has_the_last_word() -> None:
    poor = generate(Speculative(n_draft=4), 0.1, [0.1])[1]
    good = generate(Speculative(n_draft=4), 0.1, [0.1, 1.0])[1]
    assert good > 1.5 * poor


def test_a_draft_without_room_does_not_stop_the_others() -> None:
    """One sequence, so no branches: what cannot be placed is not waited for."""
    rng, reference = random.Random(5), Reference(N_LAYERS)
    pipeline = toy_pipeline(rng, 2, 500, False)
    drafts = draft_levels(rng, 400, [0.5], n_seqs=(1,))
    engine = toy_engine(pipeline, SequencePool(16, 500), OracleDrafter(reference, 0.5), drafts)
    request = Request(0, [4], 100, SamplingParams(temp=0.0), 400)
    engine.add(request, Speculative(n_draft=8, width=4))
    for _ in emitted(engine):
        audit_engine(engine)
    assert request.finish is Finish.LENGTH


def test_a_stopped_request_leaves_no_question_open() -> None:
    rng, reference = random.Random(6), Reference(N_LAYERS)
    pipeline = toy_pipeline(rng, 2, 500, False)
    (level,) = draft_levels(rng, 400, [0.5])
    engine = toy_engine(pipeline, SequencePool(16, 500), OracleDrafter(reference, 0.5), [level])
    request = Request(0, list(range(90)), 100, SamplingParams(temp=0.0), 400)
    engine.add(request, PipeInfer())
    while not level.busy:
        engine.step()
    engine.stop(request)
    engine.complete()
    assert not level.busy and level.pool.n_free == level.pool.n_seq


def tree_of_two() -> tuple[TokenTree, list[Node]]:
    """The root with two guesses, the better of which has a guess itself."""
    tree = TokenTree(7, 10)
    first, second = tree.grow(tree.root, [Guess(1, 0.6), Guess(2, 0.3)], [-0.5, -1.2])
    (below,) = tree.grow(first, [Guess(3, 0.5)], [-0.7])
    return tree, [first, second, below]


def test_of_two_guesses_alike_that_of_the_larger_draft_comes_first() -> None:
    tree = TokenTree(7, 10)
    tree.grow(tree.root, [Guess(1, 0.9)], [-0.1])
    (better,) = tree.refine(tree.root, [Guess(2, 0.5)], [-0.7], draft=1)
    assert tree.root.children[0] is better and tree.root.children[1].log_prob == -0.7


def test_refining_moves_scores_and_adds_what_was_missing() -> None:
    tree, (first, second, below) = tree_of_two()
    (third,) = tree.refine(tree.root, [Guess(2, 0.8), Guess(5, 0.1)], [-0.2, -2.3], draft=1)
    assert (third.token, third.guessed_by, tree.root.refined) == (5, 1, 1)
    assert tree.root.children == [second, third, first] or tree.root.children == [second, first, third]
    assert second.score == -0.2 and first.score == -2.3 and below.score == pytest.approx(-3.0)
    audit_tree(tree)


def test_a_larger_draft_that_knows_nothing_changes_nothing() -> None:
    tree, (first, second, below) = tree_of_two()
    assert tree.refine(tree.root, [], [], draft=1) == []
    assert (first.score, second.score, below.score) == (-0.5, -1.2, pytest.approx(-1.2))


def test_guesses_survive_the_wire() -> None:
    rows: tuple[list[Guess], ...] = ([Guess(3, 0.5), Guess(70000, 0.25)], [], [Guess(0, 1.0)])
    for sent in (GuessVerdict(1 << 40, rows, False, 0.25), GuessVerdict(7, ([], [])), GuessVerdict(7, (), True)):
        found = decode_guess_verdict(encode_verdict(sent))
        assert (found.run_id, found.cancelled, found.slowest_s) == (sent.run_id, sent.cancelled, sent.slowest_s)
        assert list(found.guesses) == [list(row) for row in sent.guesses]


def test_without_sequences_a_tree_gets_narrower_before_it_gets_shorter() -> None:
    """One sequence: the second child and what is below it are left out, the chain of the first one is not."""
    tree, pool = TokenTree(7, 0), SequencePool(1, 10)
    pool.open(0)
    first, second = tree.grow(tree.root, [Guess(1, 0.6), Guess(2, 0.3)], [-0.5, -1.2])
    (below_second,) = tree.grow(second, [Guess(4, 0.5)], [-0.1])
    (below_first,) = tree.grow(first, [Guess(3, 0.5)], [-0.9])
    nodes = [tree.root, first, second, below_second, below_first]
    assert pool.fitting(nodes) == [tree.root, first, below_first]
    assert SequencePool(2, 10).fitting(nodes) == nodes
    assert SequencePool(4, 2).fitting(nodes) == nodes[:2], "and never more than there are cells"


def test_no_room_is_not_taken_for_a_draft_that_knows_nothing() -> None:
    """One sequence: of two branches the second cannot be asked about. Its guesses stay what they were, until the root
    has moved and there is room."""
    rng, request = random.Random(5), Request(0, [4], 100, SamplingParams(temp=0.0), 400)
    (level,) = draft_levels(rng, 400, [0.5], n_seqs=(1,))
    level.n_rows = 2
    engine = toy_engine(toy_pipeline(rng, 2, 500, False), SequencePool(16, 500), None, [level])
    metrics = RequestMetrics()
    engine.add(request, PipeInfer(), metrics)
    tree = request.tree
    one, other = tree.grow(tree.root, [Guess(1, 0.5), Guess(2, 0.25)], [-0.7, -1.4])
    (below,) = tree.grow(other, [Guess(3, 0.5)], [-0.7])
    for _ in range(40):
        engine.speculator.ask()
        engine.speculator.hear()
    assert one.refined == tree.root.refined == 1 and metrics.n_refined >= 2
    assert (other.refined, below.guessed_by, below.log_prob) == (0, 0, -0.7)
    assert not other.is_open(1), "nobody waits for it"
    tree.answer([tree.root], [2])
    tree.settle()
    assert tree.root is other and other.is_open(1), "asked again"


def test_what_was_in_flight_when_a_request_was_preempted_is_not_told_of_it_when_it_is_open_again() -> None:
    rng, request = random.Random(6), Request(0, [1, 2, 3, 4], 9, SamplingParams(temp=0.0), 40)
    level = Level(toy_pipeline(rng, 2, 40, False), SequencePool(4, 40))
    level.open(request)
    assert level.submit([RequestSlice(request, 3, [], False)])
    level.close(request)
    level.open(request)
    assert level.submit([RequestSlice(request, 2, [], False)])
    landed = []
    while level.busy:
        landed += [flight.parts for flight, _ in filter(None, [level.poll()])]
    assert [len(parts) for parts in landed] == [0, 1] and landed[1][0].n_context == 2


@pytest.mark.parametrize("policy", [PipeInfer, Speculative])
def test_what_a_draft_on_another_rank_guesses_is_used(policy: type[PipeInfer] | type[Speculative]) -> None:
    def tokens_a_root(right: float) -> float:
        rng, reference = random.Random(7), Reference(N_LAYERS)
        pipeline = toy_pipeline(rng, 4, 500, False)
        model = NoisyStage(0, N_LAYERS, right, n_cells=464)
        draft = Level(ToyDraftPipeline([model], rng, late=0.0), SequencePool(16, 464), n_rows=16)
        engine = toy_engine(pipeline, SequencePool(16, 500), draft)
        request, metrics = Request(0, [1, 2, 3], 300, SamplingParams(temp=0.0), 400), RequestMetrics()
        engine.add(request, policy(), metrics)
        for _ in emitted(engine):
            audit_engine(engine)
        assert request.tokens[3:] == reference.generate([1, 2, 3], 300, request.sampling)
        return 300 / metrics.n_root_runs

    assert tokens_a_root(1.0) > 1.7 * tokens_a_root(0.0)


def test_operations_that_exceed_a_run_go_ahead_of_it_at_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at a draft elsewhere, which is asked for one step at a time."""
    monkeypatch.setattr("pipeinfer.core.levels.MAX_OPS", 1)
    assert sum(run_case(seed) for seed in range(0, 60, 3)) > 20
