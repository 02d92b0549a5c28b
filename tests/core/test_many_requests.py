"""Many requests at once on the toy: whatever comes and goes, each text is the toy target's own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import pytest

from pipeinfer.core.batch_planner import BatchBudget, choose
from pipeinfer.core.engine import Engine
from pipeinfer.core.interfaces import Drafter
from pipeinfer.core.levels import Level, RequestSlice
from pipeinfer.core.policy import NOTHING, Answer, PolicyView
from pipeinfer.core.requests import Emission, Finish, Request
from pipeinfer.core.run_cost import RunCost
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.models.drafts.model_drafter import ModelDrafter
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.observe.trace import stage_time
from pipeinfer.policies import Iterative, PipeInfer
from pipeinfer.virtual.choices import SyntheticChoices
from pipeinfer.virtual.costs import HeadCost, LinkCost, ModelCost, Profile, Work, row_costs
from pipeinfer.virtual.pipeline import SimPipeline, SimWaiter, VirtualClock
from pipeinfer.virtual.simulation import simulate
from tests.core.test_engine import QuickStage, plain_toy, random_policy, toy_engine, toy_pipeline
from tests.core.test_levels import draft_levels
from tests.support.audit import audit_engine, emitted
from tests.support.cases import cases
from tests.support.toy import N_LAYERS, N_VOCAB, OracleDrafter, Reference, ToyPipeline, ToyWaiter


def random_drafter(rng: random.Random, reference: Reference, n_seq: int, n_cells: int) -> Drafter | None:
    if rng.random() < 0.2:
        return None
    if rng.random() < 0.5:
        return OracleDrafter(reference, rng.random(), rng.randrange(99))
    model = QuickStage(0, N_LAYERS, n_cells, False, right=rng.random())
    return ModelDrafter(model, SequencePool(n_seq, n_cells), rng.choice([4, 16]))


def random_requests(rng: random.Random, n_ctx: int) -> list[Request]:
    requests = []
    for request_id in range(rng.randint(1, 40)):
        penalty = rng.choice([1.0, 1.0, 1.3])
        params = SamplingParams(rng.randrange(9), rng.choice([0.0, 0.8]), repeat_last_n=9, repeat_penalty=penalty)
        prompt = [rng.randrange(N_VOCAB) for _ in range(rng.choice([1, 2, 12]))]
        requests.append(Request(request_id, prompt, rng.randint(1, 16), params, n_ctx))
    return requests


def with_common_prefixes(rng: random.Random, requests: Sequence[Request], n_ctx: int) -> list[Request]:
    """The same, but that they begin with a system prompt or two, with some of what another one says, or are several
    texts of one prompt; some leave what was evaluated for them."""
    found: list[Request] = []
    systems = [[rng.randrange(N_VOCAB) for _ in range(rng.choice([5, 10, 16]))] for _ in range(rng.randint(1, 2))]
    for request in requests:
        prompt = [*rng.choice(systems), *request.prompt][: n_ctx - 2]
        if found and rng.random() < 0.4:
            prompt = list(rng.choice(found).prompt)[: rng.choice([3, 9, n_ctx])]
        found.append(replace(request, prompt=prompt, keep=rng.random() < 0.3, spans=None))
    return found


class Counts(NamedTuple):
    """Of a case: settled trees; tokens of prompts of requests that were opened, and how many of them were others'; how
    often one was preempted."""

    n_trees: int
    n_prompt: int
    n_shared: int
    n_preempted: int


class PacedWaiter(ToyWaiter):
    """In half of its waits the engine listens meanwhile, as between the layers of a stage of the head's own."""

    listen: Callable[[], None] = staticmethod(lambda: None)

    def wait(self, pipelines: Sequence[ToyPipeline], timeout_s: float | None = None) -> None:
        if timeout_s is None or any(any(pipeline.queues) for pipeline in pipelines):
            super().wait(pipelines)
        if self.rng.random() < 0.5:
            self.listen()


def run_case(seed: int) -> Counts:
    """Random arrivals, policies, stops, splits, cells, windows; in every second pair of cases prompts begin alike."""
    rng, reference = random.Random(seed), Reference(N_LAYERS)
    n_ctx, parked = 30, rng.random() < 0.5
    n_cells, n_seq = rng.choice([40, 90, 400]), rng.choice([1, 2, 5, 31])
    window = random.Random(31 * seed + 7).choice([0, 0, 0, 1, 4, 9])
    pipeline = toy_pipeline(rng, rng.randint(1, N_LAYERS), n_cells, parked)
    drafts = draft_levels(rng, n_cells, [rng.random() for _ in range(rng.choice([0, 0, 1]))])
    drafter: Drafter | Level | None = random_drafter(rng, reference, n_seq, n_cells + 64)
    if drafter and seed % 5 == 0:  # another rank has it
        own = random.Random(-seed)
        drafter = draft_levels(own, n_cells, [own.random()])[0]
    pool = SequencePool(n_seq, n_cells, parked, window=window)
    options = {"n_chunk": rng.choice([3, 64]), "n_rows": rng.choice([3, 32]), "cancel": rng.random() < 0.9}
    engine = toy_engine(pipeline, pool, drafter, drafts, **options)
    if seed % 2:  # runs are held back, as where it is known what rows cost
        cost, ticks, waiter = RunCost({1: 0.02, 4: 0.03, 16: 0.2}), count(), PacedWaiter(pipeline.rng)
        engine = Engine(
            engine.target,
            drafter,
            waiter,
            lambda: 1e-3 * next(ticks),
            drafts=drafts,
            run_cost=cost,
            max_delay_s=random.Random(~seed).choice([math.inf, 0.2, 0.01]),
        )
        waiter.listen = engine.listen
    to_come, stopped, n_trees = random_requests(rng, n_ctx), set[int](), 0
    if seed % 4 > 1:
        to_come = with_common_prefixes(random.Random(-seed), to_come, n_ctx)
    requests, metrics = list(to_come), [RequestMetrics() for _ in to_come]
    heard, stops_rng = [list(request.prompt) for request in requests], random.Random(17 * seed)

    def take(emissions: Sequence[Emission]) -> None:
        for emission in emissions:
            heard[emission.request.id] += emission.tokens
            if stops_rng.random() < 0.01:
                stopped.add(emission.request.id)
                engine.stop(emission.request)

    engine.on_tokens = take
    while engine.busy or to_come:
        while to_come and (not engine.busy or rng.random() < 0.05):
            request = to_come.pop(0)
            engine.add(request, random_policy(rng) if drafter else Iterative(), metrics[request.id])
        if rng.random() < 0.003 and len(to_come) < len(requests):
            stopped.add(victim := rng.randrange(len(requests) - len(to_come)))
            engine.stop(requests[victim])
        n_before = sum(map(len, heard))
        if engine.busy:
            engine.step()
        n_trees += sum(map(len, heard)) > n_before
        if rng.random() < 0.2:
            audit_engine(engine)
    assert heard == [request.tokens for request in requests], "tokens that nobody was given"
    check(requests, stopped, reference)
    engine.forget()
    audit_engine(engine)
    assert not any(level.busy for level in engine.levels), "a run was forgotten"
    pools = [level.pool for level in engine.levels] + ([drafter.pool] if isinstance(drafter, ModelDrafter) else [])
    assert all(pool.n_free == pool.n_seq for pool in pools), "a sequence leaks"
    assert all(pool.n_free_cells + pool.n_parked == pool.n_cells for pool in pools), "a cell leaks"
    opened = [(len(request.prompt), each.n_kept) for request, each in zip(requests, metrics, strict=True)]
    n_preempted = sum(each.n_preempted for each in metrics)
    return Counts(n_trees, sum(n_prompt for n_prompt, _ in opened), sum(n_kept for _, n_kept in opened), n_preempted)


def check(requests: Sequence[Request], stopped: set[int], reference: Reference) -> None:
    for request in requests:
        expected = reference.generate(request.prompt, request.n_generated, request.sampling)
        assert request.tokens[len(request.prompt) :] == expected, f"request {request.id}"
        assert request.id in stopped or request.n_generated == min(
            request.n_predict, request.n_ctx - len(request.prompt)
        )


@pytest.mark.parametrize("block", cases(2, 6))
def test_each_of_many_requests_gets_its_own_text(block: int) -> None:
    found = [run_case(seed) for seed in range(block * 18, block * 18 + 18)]
    assert sum(each.n_trees for each in found) > 1600
    assert sum(each.n_shared for each in found) > 0.05 * sum(each.n_prompt for each in found)
    assert any(each.n_preempted for each in found)


def test_who_shared_a_run_that_was_given_up_is_asked_again() -> None:
    """Another request's verdict makes the rest of the run dead: who waited for it need not wait for its verdict."""
    assert run_case(1465).n_trees


def test_the_end_of_a_prompt_for_whose_root_there_is_no_cell_is_made_room_for() -> None:
    """Of the last chunk the context would fit, without the root that comes with it; nothing is in flight."""
    n_cells, greedy, metrics = 10, SamplingParams(temp=0.0), RequestMetrics()
    engine = toy_engine(toy_pipeline(random.Random(1), 2, n_cells, False), SequencePool(4, n_cells), None)
    first, second = Request(0, [1], 6, greedy, n_cells), Request(1, [*range(2, 10)], 1, greedy, n_cells)

    class Resting(Iterative):
        """Has three cells, and sends no more before the other one has given its own up."""

        def send(self, context: PolicyView) -> Answer:
            return NOTHING if first.n_generated == 3 and not metrics.n_preempted else super().send(context)

    engine.add(first, Resting())
    while first.n_generated < 3:
        engine.step()
    engine.admission.ahead = -2  # it is let in all the same
    engine.add(second, Iterative(), metrics)
    engine.admission.ahead = 0
    for _ in emitted(engine):
        audit_engine(engine)
    assert metrics.n_preempted == 1
    check([first, second], set(), Reference(N_LAYERS))


def test_parked_cells_are_won_back_while_other_requests_are_open() -> None:
    """Two requests of 400 tokens in a cache that their wrong guesses fill several times over."""
    rng, n_cells = random.Random(1), 840
    stages = [QuickStage(first, last, n_cells, True) for first, last in ((0, 2), (2, N_LAYERS))]
    pool = SequencePool(8, n_cells, parked=True)
    drafter = OracleDrafter(Reference(N_LAYERS), 0.4)
    engine = toy_engine(ToyPipeline(stages, rng), pool, drafter)
    requests = [Request(number, [number + 3], 400, SamplingParams(temp=0.0), 500) for number in range(2)]
    for request in requests:
        engine.add(request, PipeInfer(microbatch=4))
    engine.complete()
    assert all(request.tokens == [request.prompt[0], *plain_toy(request.prompt[0], 400)] for request in requests)
    assert stages[0].n_packed > 1


def test_requests_after_one_another_begin_in_a_packed_cache() -> None:
    """Also where sequences are leased otherwise from then on."""
    rng, n_cells = random.Random(4), 300
    stages = [QuickStage(first, last, n_cells, True) for first, last in ((0, 2), (2, N_LAYERS))]
    pool = SequencePool(8, n_cells, parked=True)
    drafter = OracleDrafter(Reference(N_LAYERS), 0.4)
    engine = toy_engine(ToyPipeline(stages, rng), pool, drafter)
    for number, n_seq in enumerate((8, 8, 1, 3, 8)):
        pool.resize(n_seq)
        request = Request(number, [number + 3], 60, SamplingParams(temp=0.0), 100)
        engine.add(request, PipeInfer(microbatch=4))
        assert pool.n_free_cells == n_cells
        for _ in emitted(engine):
            audit_engine(engine)
        assert request.tokens == [request.prompt[0], *plain_toy(request.prompt[0], 60)]
    assert stages[0].n_packed == stages[1].n_packed == 4
    with pytest.raises(AssertionError, match="1 requests hold sequences"):
        engine.add(Request(9, [1], 4, SamplingParams(), 9), PipeInfer())
        pool.resize(2)


def test_what_is_kept_of_a_request_ends_with_it() -> None:
    rng = random.Random(2)
    pipeline = toy_pipeline(rng, 2, 500, False)
    engine = toy_engine(pipeline, SequencePool(8, 500), OracleDrafter(Reference(N_LAYERS), 0.5))
    for request_id in range(50):
        engine.add(Request(request_id, [1], 3, SamplingParams(temp=0.0), 20), PipeInfer())
        engine.complete()
    assert all(len(worker._opened) <= 1 for worker in pipeline.workers), "sampling of requests that have ended"
    assert len(engine._active) == len(engine._senders) == len(engine.target._of_request) == 0


def test_run_ids_go_beyond_32_bits() -> None:
    rng = random.Random(3)
    engine = toy_engine(toy_pipeline(rng, 3, 500, False), SequencePool(8, 500), OracleDrafter(Reference(N_LAYERS), 0.5))
    engine.target._next_run_id = (1 << 31) - 5
    request = Request(0, [5], 40, SamplingParams(temp=0.0), 100)
    engine.add(request, PipeInfer())
    engine.complete()
    assert request.tokens == [5, *plain_toy(5, 40)]


def test_dead_rows_leave_runs_in_flight() -> None:
    """A run of guesses from one node: the verdict on it leaves the right one alone in a run that no stage has begun."""
    rng = random.Random(4)
    pipeline = toy_pipeline(rng, 3, 500, False)
    for pruning in pipeline.prunings:
        pruning.late = 0.0
    engine = toy_engine(pipeline, SequencePool(31, 500), OracleDrafter(Reference(N_LAYERS), 0.9))
    request = Request(0, [5], 150, SamplingParams(temp=0.0), 200)
    engine.add(request, PipeInfer(microbatch=4))
    engine.complete()
    assert request.tokens == [5, *plain_toy(5, 150)]
    n_pruned = [worker.stats.n_rows_pruned for worker in pipeline.workers]
    assert n_pruned[-1] > 20 and n_pruned == sorted(n_pruned), "what is pruned at one stage is pruned at all later ones"


def test_a_request_that_has_to_wait_can_be_stopped() -> None:
    engine = toy_engine(toy_pipeline(random.Random(5), 2, 100, False), SequencePool(1, 100), None)
    first, second = (Request(number, [1], 20, SamplingParams(temp=0.0), 50) for number in range(2))
    engine.add(first, Iterative())
    engine.add(second, Iterative())
    engine.stop(second)
    assert second.finish is Finish.STOPPED
    for emission in emitted(engine):
        assert emission.request is first
    assert first.finish is Finish.LENGTH and not second.n_generated


def test_a_prompt_that_was_thought_to_take_long_does_not_hold_guesses_back() -> None:
    """Costs are timed on few rows: a prompt's are a guess, which its verdict corrects."""
    stage = ModelCost("stage", 10, Work((1.0, 32.0, 33.0, 200.0), (0.001, 0.1, 0.0011, 0.0012)))
    draft = ModelCost("draft", 2, Work((1.0,), (0.0001,)))
    profile = Profile("odd", 64, (stage,), (draft,), LinkCost(1e-6, 1e12), HeadCost())
    choices = SyntheticChoices((0.9,), 1, 200)
    simulated = simulate(profile, choices, PipeInfer(), 60)
    assert row_costs(profile)[24] > 0.5, "a chunk of 128 rows is thought to take seconds, and takes 12 ms"
    assert simulated.metrics.n_sent > 20 and simulated.metrics.n_matched > 20


def test_many_requests_keep_every_stage_busy() -> None:
    """64 requests on 8 equal stages, in virtual time; each text is its own."""
    stage = ModelCost("stage", 10, Work((1.0, 8.0, 64.0), (0.001, 0.0012, 0.006)))
    profile = Profile("even", 4096, (stage,) * 8, (), LinkCost(50e-6, 1.25e9), HeadCost())
    choices, clock = [SyntheticChoices((0.7,), seed, 20) for seed in range(64)], VirtualClock()
    pipeline = SimPipeline(profile, choices, clock)
    level = Level(pipeline, SequencePool(255, 64 * 64, parked=True))
    engine = Engine(level, None, SimWaiter(clock), clock, run_cost=RunCost(row_costs(profile)))
    requests = [Request(at, found.prompt, 40, SamplingParams(temp=0.0), 60) for at, found in enumerate(choices)]
    metrics = [RequestMetrics() for _ in requests]
    for request, observer in zip(requests, metrics, strict=True):
        engine.add(request, Iterative(), observer)
    engine.complete()
    assert all(
        request.tokens == [choice.target(position) for position in range(60)]
        for request, choice in zip(requests, choices, strict=True)
    )
    window = max(each.token_s[0] for each in metrics), min(each.token_s[-1] for each in metrics)
    busy_s = [stage_time(stage.ledger.moved(0.0), {}, window).busy_s for stage in pipeline.stages]
    assert max(busy_s) > 0.95 * (window[1] - window[0])


# -- the scheduler


def wanted(request_id: int, n_context: int, n_nodes: int, has_root: bool) -> RequestSlice:
    request = Request(request_id, [1], 9, SamplingParams(), 99)
    return RequestSlice(request, n_context, [request.tree.root] * n_nodes, has_root)


def shares(wants: Sequence[RequestSlice], alone: bool = False) -> list[tuple[int, int, int]]:
    """(request, committed tokens, nodes) of each request in the next run."""
    return [(part.request.id, part.n_context, len(part.nodes)) for part in choose(wants, ROOM, alone)]


ROOM = BatchBudget(n_roots=2, n_cheap=6, n_rows=32, n_context=10)


def test_roots_come_before_guesses_and_only_as_many_as_share_a_run() -> None:
    wants = [wanted(0, 0, 3, False), wanted(1, 0, 1, True), wanted(2, 0, 1, True), wanted(3, 0, 1, True)]
    assert shares(wants) == [(1, 0, 1), (2, 0, 1), (0, 0, 3)]


def test_guesses_fill_what_costs_little() -> None:
    wants = [wanted(1, 0, 1, True), wanted(2, 0, 4, False), wanted(3, 0, 4, False)]
    assert shares(wants) == [(1, 0, 1), (2, 0, 4), (3, 0, 1)]


def test_whose_turn_it_is_decides_between_prompts_and_nodes() -> None:
    prompt, other, root = wanted(0, 7, 1, False), wanted(1, 20, 1, False), wanted(2, 0, 1, True)
    assert shares([prompt, root, other]) == [(0, 7, 1), (1, 3, 0)]
    assert shares([root, prompt, other]) == [(2, 0, 1)]


def test_one_requests_policy_decides_alone() -> None:
    assert shares([wanted(0, 0, 20, True)], alone=True) == [(0, 0, 20)]


def test_short_prompts_share_a_run_as_far_as_its_rows_reach() -> None:
    """With their roots: as many rows as a prompt that fills a run has with its own."""
    assert shares([wanted(0, 10, 1, False), wanted(1, 1, 1, False)]) == [(0, 10, 1)]
    assert shares([wanted(number, 3, 1, False) for number in range(4)]) == [(0, 3, 1), (1, 3, 1), (2, 3, 0)]
    assert shares([wanted(number, 4, 1, False) for number in range(4)]) == [(0, 4, 1), (1, 4, 1), (2, 1, 0)]
    many = choose(
        [wanted(number, 1, 1, False) for number in range(9)], BatchBudget(2, 6, n_rows=3, n_context=10), False
    )
    assert [len(part.nodes) for part in many] == [1, 1, 1, 0, 0, 0, 0, 0]


def test_as_many_runs_as_stages() -> None:
    assert [BatchBudget.for_load(n, 8, 4, 32, 128).n_roots for n in (1, 8, 9, 64, 255)] == [1, 1, 2, 8, 32]
    assert BatchBudget.for_load(255, 1, 4, 32, 128).n_roots == 32, "more rows than a run may carry"
