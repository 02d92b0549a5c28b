"""Open requests that begin alike: what is common is evaluated once, its cells count once, and nobody waits in vain."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from pipeinfer.core.blocks import Span
from pipeinfer.core.cells import Cells, fork, give_up, n_held
from pipeinfer.core.engine import Engine
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.levels import Level, RequestSlice
from pipeinfer.core.requests import Prefix, Request
from pipeinfer.core.run_cost import RunCost
from pipeinfer.core.runs import OpKind
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.policies import Iterative, PipeInfer
from tests.core.test_engine import QuickStage, toy_engine, toy_pipeline
from tests.core.test_kept_prefixes import Counted
from tests.support.audit import audit_engine, emitted
from tests.support.toy import N_LAYERS, OracleDrafter, Reference, ToyPipeline, ToyStage

SYSTEM = [at % 11 for at in range(100)]


def some_request(id: int, prompt: Sequence[int], n: int = 10, keep: bool = False) -> Request:
    return Request(id, prompt, n, SamplingParams(id, 0.8), 200, keep=keep)


def engine_of(n_seq: int, n_cells: int, n_stages: int = 2, drafts: bool = True) -> Engine:
    pipeline = toy_pipeline(random.Random(n_stages), n_stages, n_cells, True)
    drafter = OracleDrafter(Reference(N_LAYERS), 0.5) if drafts else None
    return toy_engine(pipeline, SequencePool(n_seq, n_cells, parked=True), drafter, n_chunk=16)


def add_all(engine: Engine, requests: Sequence[Request]) -> list[Counted]:
    counted = [Counted() for _ in requests]
    for request, observer in zip(requests, counted, strict=True):
        engine.add(request, PipeInfer(microbatch=3) if engine.speculator.drafter else Iterative(), observer)
    return counted


def check(requests: Sequence[Request]) -> None:
    for each in requests:
        assert each.tokens[len(each.prompt) :] == Reference(N_LAYERS).generate(each.prompt, 10, each.sampling), each.id


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("n_stages", [1, 2, 4])
def test_texts_of_one_prompt_evaluate_it_once(n_stages: int, drafts: bool) -> None:
    engine, requests = engine_of(31, 2000, n_stages, drafts), [some_request(number, SYSTEM) for number in range(8)]
    counted = add_all(engine, requests)
    assert len(engine._active) == 1, "the others wait for the first"
    while len(engine._active) == 1:
        assert not any(each.is_running for each in counted[1:])
        engine.step()
    assert counted[0].is_running
    most = 0
    for _ in emitted(engine):
        most = max(most, len(engine._active))
        audit_engine(engine)
    assert most == 8, "they wait for its prompt alone"
    assert all(each.is_running for each in counted)
    check(requests)
    assert [each.n_context for each in counted] == [99, *[0] * 7]
    assert [each.n_kept for each in counted] == [0, *[99] * 7]


def test_a_system_prompt_is_evaluated_once_and_kept_for_others() -> None:
    """Also for those that come when all others have ended; they leave it to further ones."""
    engine = engine_of(31, 2000)
    for group in range(3):
        requests = [
            some_request(at, [*SYSTEM, at % 7, *range(at % 5)], keep=True) for at in range(8 * group, 8 * group + 8)
        ]
        counted = add_all(engine, requests)
        for _ in emitted(engine):
            audit_engine(engine)
        check(requests)
        n_own = sum(len(request.prompt) - 1 - len(SYSTEM) for request in requests)
        assert sum(each.n_context for each in counted) <= n_own + (0 if group else len(SYSTEM)), f"group {group}"


def test_shared_cells_are_reserved_once() -> None:
    """A cache with room for one prompt and twelve answers holds twelve requests; all together fill it several times."""
    n_cells = 100 + 12 * 11
    engine, requests = engine_of(31, n_cells), [some_request(at, [*SYSTEM, at % 3], 10) for at in range(40)]
    add_all(engine, requests)
    most = 0
    for _ in emitted(engine):
        most = max(most, len(engine._active))
        audit_engine(engine)
    check(requests)
    assert most == 12
    assert engine.target.pool.n_free_cells + engine.target.pool.n_parked == n_cells


@pytest.mark.parametrize("seed", range(8))
def test_however_texts_begin_alike_each_says_once_what_it_shares(seed: int) -> None:
    """Of 60 that each continue the one before, or any other, at any length."""
    rng, requests = random.Random(seed), list[Request]()
    pool, stage = SequencePool(61, 9000, parked=True), ToyStage(0, 1, True, 9000, True)
    for number in range(60):
        source = (rng.choice(requests) if seed else requests[-1]) if requests else None
        n_shared = (rng.randint(1, len(source.prompt)) if seed else len(source.prompt)) if source else 0
        prompt = [*(source.prompt[:n_shared] if source else ()), *(rng.randrange(24) for _ in range(rng.randint(1, 9)))]
        requests.append(some_request(number, prompt))
        pool.open(number, Prefix(source, n_shared) if source else None)
        read_prompt(pool, stage, requests[-1])
    gone = some_request(60, [1, 2, 3])
    pool.open(gone.id)
    read_prompt(pool, stage, gone)
    pool.close(gone.id)
    pool.compact()
    ops = pool.take_pending()
    assert sum(op.kind is OpKind.SHARED for op in ops) == 59 and len(ops) < 70
    stage.apply(ops)
    assert stage.n_parked == 0 and len(stage.cells()) == pool.n_committed


def read_prompt(pool: SequencePool, stage: ToyStage, request: Request) -> None:
    """The part that it does not share."""
    start = pool.placed_end(request.id)
    tokens = np.array(request.prompt[start:], np.int32)
    placement = pool.place(request.id, len(tokens), [])
    stage.apply(pool.take_pending())
    positions = np.arange(start, len(request.prompt), dtype=np.int32)
    stage.evaluate(Batch(tokens, positions, placement.seqs, None, np.ones(len(tokens), bool)), lambda: False)


@pytest.mark.parametrize("n_steps", [0, 1, 3, 6, 12])
def test_who_waits_goes_on_when_the_first_is_given_up(n_steps: int) -> None:
    engine, requests = engine_of(31, 2000, 4), [some_request(number, SYSTEM) for number in range(5)]
    counted = add_all(engine, requests)
    for _ in range(n_steps):
        engine.step()
    engine.stop(requests[0])
    for _ in emitted(engine):
        audit_engine(engine)
    check(requests[1:])
    assert sum(each.n_context for each in counted[1:]) <= 99, "more than one has begun again"


def test_others_pass_those_that_wait() -> None:
    engine = engine_of(31, 2000)
    add_all(engine, [some_request(0, SYSTEM), some_request(1, SYSTEM), some_request(2, [5, 6, 7])])
    assert set(engine._active) == {0, 2}


def test_nobody_waits_where_evaluating_costs_less() -> None:
    """On eight stages a request waits for rows that take the slowest longer than eight of one row."""
    for n_common, waits in ((9, False), (60, True)):
        pipeline = toy_pipeline(random.Random(1), N_LAYERS, 900, True)
        level = Level(pipeline, SequencePool(9, 900, True))
        engine = Engine(level, None, None, lambda: 0.0, run_cost=RunCost({1: 0.01, 64: 0.2}))  # type: ignore[arg-type]
        first, second = some_request(0, SYSTEM[:n_common]), some_request(1, [*SYSTEM[:n_common], 23])
        engine.add(first, Iterative())
        engine.add(second, Iterative())
        assert (1 not in engine._active) is waits


def test_a_prefix_that_is_not_all_wanted_stays_where_there_is_room() -> None:
    for n_cells, n_kept in ((400, 2), (120, 1)):
        engine = engine_of(8, n_cells)
        first, second = some_request(0, [*SYSTEM, 1, 2, 3], keep=True), some_request(1, [*SYSTEM, 4], keep=True)
        for request, n_there in ((first, 0), (second, 100)):
            (counted,) = add_all(engine, [request])
            for _ in emitted(engine):
                audit_engine(engine)
            assert counted.n_kept == n_there
        check([first, second])
        assert len(engine.admission.prefixes.retained()) == n_kept, "where there is no room it has moved"


def test_what_a_larger_draft_has_not_evaluated_is_not_shared_there() -> None:
    rng = random.Random(3)
    stage = QuickStage(0, N_LAYERS, 500, False)
    level = Level(ToyPipeline([stage], rng), SequencePool(8, 500), n_chunk=16)
    first, second, third = (some_request(number, SYSTEM) for number in range(3))
    level.open(first)
    level.submit([RequestSlice(first, 16, [], False)])
    second.prefix_hit = third.prefix_hit = Prefix(first, 99)
    level.open(second)
    assert level.pool.placed_end(second.id) == 0, "the run is in flight, and may yet be given up"
    while not level.poll():
        pass
    level.open(third)
    assert level.pool.placed_end(third.id) == 16 and level.pool.n_committed == 16
    level.close(first)
    assert level.pool.n_committed == 16
    level.close(third)
    assert level.pool.n_committed == 0


def states_of(n_cells: int, n_stages: int = 2) -> Engine:
    """Of a target whose sequences cannot go back."""
    pipeline = toy_pipeline(random.Random(n_stages), n_stages, n_cells, True)
    return toy_engine(pipeline, SequencePool(9, n_cells, parked=True, rewinds=False), None, n_chunk=16)


@pytest.mark.parametrize(("n_cells", "n_stages"), [(2000, 1), (2000, 4), (250, 2), (345, 3)])
def test_layers_with_states_share_a_prompt_where_it_ends(n_cells: int, n_stages: int) -> None:
    """Whoever goes on from there begins there, none in the middle; packed, each has cells of its own."""
    engine, requests = states_of(n_cells, n_stages), [some_request(number, SYSTEM) for number in range(6)]
    requests += [some_request(6, [*SYSTEM, 1, 2]), some_request(7, SYSTEM[:50])]
    counted = add_all(engine, requests)
    for _ in emitted(engine):
        audit_engine(engine)
    check(requests)
    if n_cells == 2000:
        assert [each.n_context for each in counted] == [99, *[0] * 5, 2, 49]
    assert [each.n_kept for each in counted].count(99) >= (5 if n_cells == 2000 else 1)
    assert engine.target.pool.n_free_cells + engine.target.pool.n_parked == n_cells


@pytest.mark.parametrize("n_steps", [1, 3, 6, 9, 12, 15])
def test_a_prompt_with_states_that_is_given_up_is_read_by_one_of_the_others(n_steps: int) -> None:
    engine, requests = states_of(2000, 4), [some_request(number, SYSTEM) for number in range(5)]
    counted = add_all(engine, requests)
    for _ in range(n_steps):
        engine.step()
    engine.stop(requests[0])
    for _ in emitted(engine):
        audit_engine(engine)
    check(requests[1:])
    assert sum(each.n_context for each in counted[1:]) <= 99


def test_random_forks_count_what_somebody_holds() -> None:
    """Against sets of (whose, position): a fork has the same first members."""
    rng = random.Random(5)
    for _ in range(200):
        tips, members = [Cells()], [frozenset[tuple[int, int]]()]
        n_made = n_free = 0
        for step in range(60):
            at = rng.randrange(len(tips))
            if rng.random() < 0.4:
                n = rng.randint(1, 5)
                members[at] |= {(step, tips[at].end + each) for each in range(n)}
                tips[at].end, n_made = tips[at].end + n, n_made + n
            elif rng.random() < 0.6:
                end = rng.randint(0, tips[at].end)
                tips.append(fork(tips[at], end))
                members.append(frozenset(each for each in members[at] if each[1] < end))
            elif len(tips) > 1:
                gone = members.pop(at)
                assert give_up(tips.pop(at)) == len(gone - frozenset().union(*members))
                n_free = n_made - len(frozenset().union(*members))
            assert n_held((tip, tip.end) for tip in tips) == len(frozenset().union(*members)) == n_made - n_free
            cut = rng.randint(0, 30)
            below = frozenset(each for each in frozenset().union(*members) if each[1] < cut)
            assert n_held((tip, cut) for tip in tips) == len(below)


def test_where_the_block_begins_that_a_row_is_in() -> None:
    span = Span(3, 202)
    assert span.edges == [3, 67, 131, 202]
    found = {at: span.floor(at) for at in (2, 3, 66, 67, 130, 131, 201, 202, 300)}
    assert found == {2: 2, 3: 3, 66: 3, 67: 67, 130: 67, 131: 131, 201: 131, 202: 202, 300: 300}


@pytest.mark.parametrize("parked", [False, True])
def test_what_a_window_leaves_out_is_shared_only_where_cells_stay(parked: bool) -> None:
    pool = SequencePool(4, 100, parked, window=9)
    pool.open(0)
    pool.place(0, 8, [])
    assert all(pool.can_retain(0, n) for n in range(9)), "a window sees all of it"
    pool.place(0, 12, [])
    assert [n for n in range(1, 21) if pool.can_retain(0, n)] == (list(range(1, 21)) if parked else [20])
