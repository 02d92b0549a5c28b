"""More is open than the cells can hold to the end: the youngest wait again, and each text is what it is alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from pipeinfer.core import levels
from pipeinfer.core.admission import ahead_of
from pipeinfer.core.blocks import spans_to_continue
from pipeinfer.core.engine import Engine
from pipeinfer.core.policy import ActiveRequest
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Run
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.models.drafts.lookup import LookupDrafter
from pipeinfer.models.drafts.model_drafter import ModelDrafter
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.policies import Iterative
from tests.core.test_engine import random_policy, toy_engine, toy_pipeline
from tests.core.test_kept_prefixes import BlockStage, check_answers, expected, some_drafter, state_pool
from tests.core.test_levels import draft_levels
from tests.support.audit import audit_engine, emitted
from tests.support.cases import in_long
from tests.support.toy import N_LAYERS, N_VOCAB, Reference, ToyPipeline


@dataclass
class Counts:
    """Of cases: how often something was so."""

    n_preempted: int = 0
    after_tokens: int = 0  # when some were emitted
    in_blocks: int = 0  # of prompts in blocks
    shared: int = 0  # of those that began with what another one had evaluated
    n_begun: int = 0  # requests with an output of another engine
    by_request: Counter[int] = field(default_factory=Counter)

    def watch(self, engine: Engine) -> None:
        preempt = engine._preempt

        def counted(active: ActiveRequest) -> None:
            request = active.request
            self.n_preempted += 1
            self.after_tokens += request.n_generated > 0
            self.in_blocks += bool(request.spans) and engine.target.blocks
            self.shared += bool(active.observer.n_kept)  # type: ignore[attr-defined]
            self.by_request[request.id] += 1
            preempt(active)

        engine._preempt = counted  # type: ignore[method-assign]


def some_requests(rng: random.Random, n_ctx: int, blocks: bool, with_priorities: bool) -> list[Request]:
    """Texts much longer than what is set aside for them, of prompts of which some begin alike."""
    found = list[Request]()
    system = [rng.randrange(N_VOCAB) for _ in range(rng.choice([0, 5, 70]))]
    for number in range(rng.randint(2, 10)):
        prompt = [*system, *(rng.randrange(N_VOCAB) for _ in range(rng.choice([1, 3, 20, 70])))]
        penalty = 1.0 if blocks else rng.choice([1.0, 1.0, 1.3])
        params = SamplingParams(rng.randrange(9), rng.choice([0.0, 0.8]), repeat_last_n=9, repeat_penalty=penalty)
        spans = None
        if found and rng.random() < 0.4:
            other = rng.choice(found)
            prompt = [*other.prompt[: rng.choice([5, 80, 300])], *prompt[: rng.choice([0, 1, 66])]]
            spans = spans_to_continue(other.spans or (), len(prompt), len(prompt) - 1, len(prompt))
        n_predict = rng.choice([5, 40, 80])
        found.append(Request(number, prompt, n_predict, params, n_ctx, frozenset(), spans, rng.random() < 0.3))
        found[-1].priority = rng.choice([-1, 0, 0, 5]) if with_priorities else 0
    return [each for each in found if len(each.prompt) < n_ctx - 2]


def begun(rng: random.Random, request: Request, text: list[int]) -> Request:
    """The request with the first tokens of its text, or none."""
    found = Request(
        request.id,
        request.prompt,
        request.n_predict,
        request.sampling,
        request.n_ctx,
        frozenset(),
        request.spans,
        request.keep,
        request.priority,
        text[: rng.choice([0, 1, rng.randrange(len(text))])],
    )
    return found if len(found.resumed) < len(text) else request


class Progress(RequestMetrics):
    """No row of the prompt is reported twice, whatever was in flight when the request was preempted."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.n_most = len(request.prompt) - 1  # all but the root

    def prompt_evaluated(self, n_rows: int) -> None:
        assert n_rows <= self.n_most, f"{n_rows} rows of {self.n_most} are evaluated"
        super().prompt_evaluated(n_rows)


def run_case(seed: int, counts: Counts, rewinds: bool = True) -> None:
    rng, reference = random.Random(seed), Reference(N_LAYERS)
    blocks, parked, n_ctx = rng.random() < 0.6, rng.random() < 0.6, 160
    n_cells, n_seq = n_ctx + rng.choice([1, 10, 60]), rng.choice([4, 9, 31])
    cuts = [0, *sorted(rng.sample(range(1, N_LAYERS), rng.randrange(N_LAYERS))), N_LAYERS]
    stages = [BlockStage(first, last, last == N_LAYERS, n_cells, parked) for first, last in pairwise(cuts)]
    pipeline = ToyPipeline(stages, rng, late=rng.choice([0.0, 0.5, 0.95]))
    drafter = some_drafter(rng, reference, n_seq, n_cells + 64)
    drafts = draft_levels(rng, n_cells, [rng.random() for _ in range(rng.choice([0, 0, 1, 2]))])
    for level in drafts:
        check_answers(level)
    pool = SequencePool(n_seq, n_cells, parked) if rewinds else state_pool(stages, n_seq, n_cells, parked)
    options = {"n_chunk": rng.choice([3, 64, 128]), "n_rows": rng.choice([3, 32]), "cancel": rng.random() < 0.9}
    engine = toy_engine(pipeline, pool, drafter, drafts, blocks=blocks, **options)
    engine.admission.ahead, engine.admission.n_prompts = rng.choice([0, 1, 4, 15]), rng.choice([1, 2, 99])
    counts.watch(engine)
    requests = some_requests(rng, n_ctx, blocks, with_priorities=seed % 2 == 1)
    if seed % 3 == 2:
        requests = [begun(rng, each, expected(reference, each, blocks)) for each in requests]
        counts.n_begun += sum(bool(each.resumed) for each in requests)
    metrics, to_come, stopped = {each.id: Progress(each) for each in requests}, list(requests), set[int]()
    while engine.busy or to_come:
        while to_come and (not engine.busy or rng.random() < 0.1):
            request = to_come.pop(0)
            policy = random_policy(rng) if drafter else Iterative()
            engine.add(request, policy, metrics[request.id])
        if rng.random() < 0.001 and len(to_come) < len(requests):
            victim = rng.choice(requests[: len(requests) - len(to_come)])
            stopped.add(victim.id)
            engine.stop(victim)
        if engine.busy:
            engine.step()
        if rng.random() < 0.2:
            audit_engine(engine)
            read = [job.request for job in engine._active.values() if engine.target.reads_blocks(job.request)]
            assert len(read) <= engine.admission.n_prompts
            n_rows = sum(each.spans[-1].end for each in read if each.spans)
            assert len(read) < 2 or n_rows <= n_cells, "their caches have more cells than are planned"
            assert not any(metrics[job.request.id].is_running for job in engine.admission.waiting)
    for request in requests:
        text, said = expected(reference, request, blocks), request.tokens[len(request.prompt) :]
        assert said == (text[: len(said)] if request.id in stopped else text), f"request {request.id}"
        assert len(metrics[request.id].token_s) + len(request.resumed) == len(said), "what was emitted is emitted again"
    engine.forget()
    audit_engine(engine)
    model = drafter.model if isinstance(drafter, LookupDrafter) else drafter
    pools = [level.pool for level in engine.levels] + ([model.pool] if isinstance(model, ModelDrafter) else [])
    assert all(pool.n_free == pool.n_seq and not pool.n_committed for pool in pools), "a sequence or a cell leaks"
    assert all(not level._at_stages and not level._opens for level in engine.levels), "what is known of requests stays"


def test_the_caches_of_prompts_have_no_more_cells_than_the_cache() -> None:
    """Prompts that begin alike share cells there, and none in the caches in which their blocks are evaluated."""
    pipeline = ToyPipeline([BlockStage(0, N_LAYERS, True, 220, False)], random.Random(0), late=0.0)
    options = {"blocks": True, "n_chunk": 64, "n_rows": 32, "cancel": True}
    engine = toy_engine(pipeline, SequencePool(9, 220, False), None, [], **options)
    first, second, longer, short = (Request(n, [3] * n, 4, SamplingParams(), 200) for n in (150, 151, 73, 70))
    engine.add(first, Iterative(), RequestMetrics())
    engine.step()
    assert engine.target.reads_blocks(first)
    full = engine.admission._reads_enough
    assert full(second) and full(longer) and not full(short), "220 rows together"
    assert not full(Request(0, [3] * 60, 4, SamplingParams(), 200)), "it has no blocks"


def test_prompts_are_scored_one_after_another_and_others_pass_them() -> None:
    """Each would have the logits of its blocks in the last stage's memory."""
    pipeline = ToyPipeline([BlockStage(0, N_LAYERS, True, 999, False)], random.Random(0), late=0.0)
    options = {"blocks": True, "n_chunk": 64, "n_rows": 64, "cancel": True}
    engine = toy_engine(pipeline, SequencePool(9, 999, False), None, [], **options)
    scored = SamplingParams(temp=0.0, n_prompt_logprobs=0)
    requests = [Request(n, [3 + n] * n_tokens, 1, scored, 300) for n, n_tokens in enumerate((200, 201, 200, 20))]
    requests.append(Request(4, [9] * 202, 1, SamplingParams(temp=0.0), 300))
    for request in requests:
        engine.add(request, Iterative(), RequestMetrics())
    begun = list[int]()
    while engine.busy:
        engine.step()
        opened = [active.request for active in engine.admission.active.values()]
        begun += [each.id for each in opened if each.id not in begun]
        assert sum(each.is_scored and engine.target.reads_blocks(each) for each in opened) <= 1
    assert begun == [0, 3, 4, 1, 2], "a short prompt has no blocks"
    assert all(len(each.scores) >= len(each.prompt) - 1 for each in requests[:4])


@pytest.mark.parametrize("n", [12, in_long(200)])
def test_who_is_preempted_goes_on_with_the_same_text(n: int) -> None:
    counts = Counts()
    for seed in range(n):
        run_case(seed, counts)
    assert counts.after_tokens > 5 and counts.in_blocks and counts.shared and counts.n_begun > 5, counts


@pytest.mark.parametrize("n", [20, in_long(200)])
def test_so_do_those_of_models_with_states(n: int) -> None:
    counts = Counts()
    for seed in range(n):
        run_case(seed, counts, rewinds=False)
    assert counts.after_tokens > 5 and counts.in_blocks, counts


def test_more_operations_than_a_run_carries_travel_ahead_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, submit = list[Run](), ToyPipeline.submit

    def noted(pipeline: ToyPipeline, run: Run) -> None:
        runs.append(run)
        submit(pipeline, run)

    monkeypatch.setattr(levels, "MAX_OPS", 2)
    monkeypatch.setattr(ToyPipeline, "submit", noted)
    for seed in range(12):
        run_case(seed, Counts())
    assert max(len(run.ops) for run in runs) == 2 and any(not run.rows for run in runs)


def engine_of(n_cells: int) -> Engine:
    return toy_engine(toy_pipeline(random.Random(1), 2, n_cells, True), SequencePool(9, n_cells, parked=True), None)


def test_who_waits_begins_by_priority_then_as_it_came() -> None:
    engine, first = engine_of(200), list[int]()
    for number, priority in enumerate((0, 3, 0, -1, 3, -1)):
        request = Request(number, [number + 1] * 60, 130, SamplingParams(temp=0.0), 190, priority=priority)
        engine.add(request, Iterative())
        engine.admission.ahead = 140  # one at a time
    for emission in emitted(engine):
        if emission.request.id not in first:
            first.append(emission.request.id)
    assert first == [0, 3, 5, 2, 1, 4]


def test_a_lower_priority_begins_before_the_preempted() -> None:
    engine, begun = engine_of(160), list[int]()
    requests = [Request(number, [number + 1] * 9, 60, SamplingParams(temp=0.0), 160) for number in range(4)]
    for request in requests[:3]:
        engine.add(request, Iterative(), RequestMetrics())
    while not engine.admission.waiting:
        engine.step()
    assert [job.request.id for job in engine.admission.waiting] == [2]
    requests[3].priority = -1
    assert engine.admission.would_pass(-1) and not engine.admission.would_pass(0)
    engine.add(requests[3], Iterative(), RequestMetrics())
    while engine.busy:
        engine.step()
        begun += [id for id in engine._active if id not in begun and id > 1]
    assert begun == [3, 2]


def test_what_texts_must_have_room_for_ahead_is_a_share_of_their_context() -> None:
    assert [ahead_of(n_ctx) for n_ctx in (300, 1024, 100_000)] == [18, 64, 64]


def test_no_more_are_open_than_may_be() -> None:
    engine, n_open = engine_of(400), set[int]()
    engine.admission.n_open = 2
    for number in range(4):
        engine.add(Request(number, [number + 1] * 9, 9, SamplingParams(temp=0.0), 160), Iterative())
    while engine.busy:
        engine.step()
        n_open.add(len(engine._active))
    assert max(n_open) == 2


@pytest.mark.parametrize(("priorities", "preempted"), [((0, 0, 0), {2}), ((0, 1, 0), {1}), ((2, 1, 0), {0})])
def test_the_lowest_priority_is_preempted_then_the_youngest(priorities: tuple[int, ...], preempted: set[int]) -> None:
    engine, counts = engine_of(160), Counts()
    counts.watch(engine)
    for number, priority in enumerate(priorities):
        request = Request(number, [number + 1] * 9, 60, SamplingParams(temp=0.0), 160, priority=priority)
        engine.add(request, Iterative(), RequestMetrics())
    for _ in emitted(engine):
        audit_engine(engine)
    assert set(counts.by_request) == preempted
