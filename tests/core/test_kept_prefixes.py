"""Prefixes that finished requests leave: the text is what it would be without, and only new tokens are evaluated."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pipeinfer.core.admission import Prefixes
from pipeinfer.core.blocks import Span, common, spans_of, spans_to_continue
from pipeinfer.core.engine import Engine
from pipeinfer.core.interfaces import Batch, Drafter
from pipeinfer.core.levels import InFlightRun, Level
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.types import FloatArray
from pipeinfer.job.options.options import Speculation
from pipeinfer.models.drafts.lookup import LookupDrafter
from pipeinfer.models.drafts.model_drafter import ModelDrafter
from pipeinfer.policies import Iterative, PipeInfer, Speculative
from tests.core.test_engine import QuickStage, random_policy, toy_engine
from tests.core.test_levels import draft_levels
from tests.support.audit import audit_engine, emitted
from tests.support.cases import cases
from tests.support.counted import Counted
from tests.support.toy import N_LAYERS, N_VOCAB, OracleDrafter, Reference, ToyPipeline, ToyStage

Spans = tuple[Span, ...]
MARK = 1000
"""Added to tokens whose rows come in blocks, with where each begins and ends: the toy then says something else, as a
model in other bits may."""


class BlockStage(ToyStage):
    """A toy stage for which a row in a block is another one than the same row by itself. Without `rewinds` it
    has one state for each of `n_states` sequences: one cannot lose its newest row, nor be copied without it."""

    rewinds, n_states = True, 1 << 30

    def apply(self, ops: Sequence[KvOp]) -> None:
        for op in ops:
            goes_back = op.kind is OpKind.REMOVE and 0 < op.first < self.next_position(op.src)
            goes_back |= op.kind is OpKind.COPY and op.last < self.next_position(op.src)
            assert self.rewinds or not goes_back, f"sequence {op.src} cannot go back: {op}"
            assert max(op.src, op.dst) < self.n_states or op.kind is OpKind.CLOSE, f"there is no state for {op}"
            if op.kind is OpKind.COMPACT and not self.rewinds:
                self._part()
            super().apply([op])

    def _part(self) -> None:
        """Packed as a whole with its state, each sequence has cells of its own."""
        for path in self.seqs.values():
            for position, (_, values) in path.items():
                self.next_cell += 1
                path[position] = self.next_cell, values
        self.holders = Counter(cell for path in self.seqs.values() for cell, _ in path.values())
        assert len(self.cells()) <= self.n_cells

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        if batch.span and batch.hidden is None:
            marks = marks_of(batch.span)
            added = np.array([marks[at] for at in batch.positions.tolist()], np.int32)
            batch = replace(batch, tokens=batch.tokens + added)
        return super().evaluate(batch, stop)


def marks_of(span: Span) -> dict[int, int]:
    """By row."""
    return {at: MARK * (start + 1) + end for start, end in pairwise(span.edges) for at in range(start, end)}


@dataclass
class Chat:
    """One conversation: its newest request, and what was counted of it."""

    newest: Request | None = None
    counted: Counted = field(default_factory=Counted)
    stopped: bool = False

    @property
    def request(self) -> Request:
        assert self.newest
        return self.newest


def expected(reference: Reference, request: Request, blocks: bool) -> list[int]:
    """What the target says, its first rows as they come in blocks."""
    marks = {at: mark for span in request.spans or () if blocks for at, mark in marks_of(span).items()}
    path = [token + marks.get(at, 0) for at, token in enumerate(request.prompt)]
    said: list[int] = []
    while len(said) < request.n_predict and len(path) < request.n_ctx:
        said.append(reference.next_token(path, request.sampling))
        path.append(said[-1])
        if said[-1] in request.end_tokens:
            break
    return said


def next_request(rng: random.Random, request_id: int, chat: Chat, blocks: bool, n_ctx: int, penalty: float) -> Request:
    """Mostly a further turn; sometimes with some of what was said taken back, or something else altogether."""
    said = chat.newest.tokens if chat.newest else []
    share = rng.random()
    n_common = len(said) if share < 0.6 else rng.randrange(len(said) + 1) if share < 0.9 else 0
    new = [rng.randrange(N_VOCAB) for _ in range(rng.choice([1, 2, 5, 5, 80]))]
    system = [7 + at % 5 for at in range(rng.choice([0, 6, 100, 130]))]
    prompt = [*(said[:n_common] or system), *new][: n_ctx - 4]
    spans = None
    if chat.newest and rng.random() < 0.8:
        spans = spans_to_continue(chat.newest.spans or (), len(said), common(said, prompt), len(prompt))
    params = SamplingParams(rng.randrange(9), rng.choice([0.0, 0.8]), repeat_last_n=9, repeat_penalty=penalty)
    return Request(
        request_id, prompt, rng.randint(1, 12), params, n_ctx, frozenset([3]), spans, keep=rng.random() < 0.9
    )


def some_drafter(rng: random.Random, reference: Reference, n_seq: int, n_cells: int) -> Drafter | None:
    share = rng.random()
    if share < 0.2:
        return LookupDrafter() if share < 0.1 else None
    if share < 0.4:
        return OracleDrafter(reference, rng.random())
    model = QuickStage(0, N_LAYERS, n_cells, False, right=rng.random())
    drafter = ModelDrafter(model, SequencePool(n_seq, n_cells), rng.choice([4, 16]))
    return LookupDrafter(drafter) if share < 0.6 else drafter


def check_answers(level: Level) -> None:
    """Make a larger draft's level assert that every live node it was asked about is answered: its prefix is there."""
    poll = level.poll

    def checked() -> tuple[InFlightRun, Any] | None:
        landed = poll()
        if landed and not landed[1].cancelled:
            for part in landed[0].parts:
                for row, node in enumerate(part.nodes, part.first):
                    alive = node.live and not part.request.finish
                    assert not alive or landed[1].guesses[row], f"nothing was evaluated at {node.position}"
        return landed

    level.poll = checked  # type: ignore[method-assign]


def state_pool(stages: Sequence[BlockStage], n_open: int, n_cells: int, parked: bool) -> SequencePool:
    """What a job has for `n_open` requests of a model whose layers keep states, which these stages become."""
    speculation = Speculation(policy=Speculative())
    n_seq, n_guesses = speculation.n_target_seq(n_open, False), speculation.n_target_guesses(n_open, False)
    pool = SequencePool(n_seq, n_cells, parked, False, n_guesses)
    for stage in stages:
        stage.rewinds, stage.n_states = False, pool.n_seq
    return pool


def run_case(seed: int) -> tuple[int, int]:
    """Several conversations at a time, with random turns, stops, policies, splits and cells. Returns how many prompt
    tokens were taken over, and how many there were."""
    rng, reference = random.Random(seed), Reference(N_LAYERS)
    blocks, parked, n_ctx = rng.random() < 0.5, rng.random() < 0.5, rng.choice([40, 240])
    n_cells, n_seq = n_ctx + rng.choice([10, 60, 400]), rng.choice([1, 2, 5, 31])
    cuts = [0, *sorted(rng.sample(range(1, N_LAYERS), rng.randrange(N_LAYERS))), N_LAYERS]
    stages = [BlockStage(first, last, last == N_LAYERS, n_cells, parked) for first, last in pairwise(cuts)]
    pipeline = ToyPipeline(stages, rng, late=rng.choice([0.0, 0.5, 0.95]))
    rewinds = rng.random() < 0.8
    drafter = some_drafter(rng, reference, n_seq, n_cells + 64)
    drafts = draft_levels(rng, n_cells, [rng.random() for _ in range(rng.choice([0, 0, 1]))])
    for level in drafts:
        check_answers(level)
    pool = SequencePool(n_seq, n_cells, parked) if rewinds else state_pool(stages, n_seq, n_cells, parked)
    options = {"n_chunk": rng.choice([3, 64, 128]), "n_rows": rng.choice([3, 32]), "cancel": rng.random() < 0.9}
    engine = toy_engine(pipeline, pool, drafter, drafts, blocks=blocks, **options)
    chats = [Chat() for _ in range(rng.choice([1, 1, 2, 3]))]
    penalty = 1.0 if blocks else rng.choice([1.0, 1.3])
    n_left, n_kept, n_prompt = 12, 0, 0
    while n_left or engine.busy:
        chat = rng.choice(chats)
        if n_left and (not chat.newest or chat.newest.finish) and (not engine.busy or rng.random() < 0.02):
            n_left -= 1
            chat.newest = next_request(rng, n_left, chat, blocks, n_ctx, rng.choice([1.0, penalty]))
            chat.counted, chat.stopped = Counted(), False
            engine.add(chat.newest, random_policy(rng) if drafter else Iterative(), chat.counted)
            if rng.random() < 0.2:  # and another one who says the same, and may have to wait for it
                chats.append(Chat(replace(chat.newest, id=100 + n_left)))
                engine.add(chats[-1].request, Iterative(), chats[-1].counted)
        if chat.newest and not chat.newest.finish and rng.random() < 0.003:
            chat.stopped = True
            engine.stop(chat.newest)
        engine.step() if engine.busy else None
        if rng.random() < 0.2:
            audit_engine(engine)
        for each in chats:
            if each.newest and each.newest.finish and each.counted.n_prompt:
                check(each, reference, blocks)
                n_kept, n_prompt = n_kept + each.counted.n_kept, n_prompt + each.counted.n_prompt
                each.counted = Counted()
    engine.forget()
    pools = [level.pool for level in engine.levels]
    model = drafter.model if isinstance(drafter, LookupDrafter) else drafter
    pools += [model.pool] if isinstance(model, ModelDrafter) else []
    assert all(pool.n_free == pool.n_seq and not pool.n_committed for pool in pools), "a sequence or a cell leaks"
    return n_kept, n_prompt


def check(chat: Chat, reference: Reference, blocks: bool) -> None:
    request, counted = chat.request, chat.counted
    text = expected(reference, request, blocks)
    said = request.tokens[len(request.prompt) :]
    assert said == (text[: len(said)] if chat.stopped else text), f"request {request.id}"
    if said and not counted.n_preempted:
        assert counted.n_context == len(request.prompt) - 1 - counted.n_kept, "tokens that were there are sent again"


@pytest.mark.parametrize("block", cases(2, 6))
def test_a_prefix_that_was_kept_changes_no_text(block: int) -> None:
    found = [run_case(seed) for seed in range(block * 20, block * 20 + 20)]
    assert sum(n_kept for n_kept, _ in found) > 0.25 * sum(n_prompt for _, n_prompt in found)


def chat_of(engine: Engine, policy: Iterative | PipeInfer | Speculative, blocks: bool, n_turns: int) -> list[Request]:
    """A conversation of so many turns, each of five new tokens, after a first one of 100."""
    requests: list[Request] = []
    for turn in range(n_turns):
        before = requests[-1] if requests else None
        said = before.tokens if before else []
        prompt = [*said, *((turn + 7 * at) % N_VOCAB for at in range(5 if said else 100))]
        spans = spans_to_continue(before.spans or (), len(said), len(said), len(prompt)) if before else None
        request = Request(turn, prompt, 7, SamplingParams(temp=0.0), 500, frozenset(), spans, keep=True)
        counted = Counted()
        engine.add(request, policy, counted)
        for _ in emitted(engine):
            audit_engine(engine)
        # the root, and the newest token of the turn before, which the target had no need to see
        assert counted.n_context == (5 if said else 99), f"turn {turn}"
        requests.append(request)
    return requests


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("n_stages", [1, 2, 3])
@pytest.mark.parametrize("policy", [Iterative(), Speculative(), PipeInfer(microbatch=3)], ids=lambda each: each.name)
def test_a_turn_of_twenty_costs_its_new_tokens(
    blocks: bool, n_stages: int, policy: Iterative | PipeInfer | Speculative
) -> None:
    rng, reference = random.Random(n_stages), Reference(N_LAYERS)
    cuts = [0, *range(1, n_stages), N_LAYERS]
    stages = [BlockStage(first, last, last == N_LAYERS, 600, True) for first, last in pairwise(cuts)]
    model = QuickStage(0, N_LAYERS, 600, False, right=0.7)
    drafter = ModelDrafter(model, SequencePool(8, 600), 16)
    engine = toy_engine(ToyPipeline(stages, rng), SequencePool(8, 600, True), drafter, blocks=blocks)
    for request in chat_of(engine, policy, blocks, 20):
        assert request.tokens[len(request.prompt) :] == expected(reference, request, blocks)
        assert request.spans == (Span(0, 99),)


def test_what_was_never_read_leaves_no_operation() -> None:
    """A draft that never steps has no run with which they go."""
    pool = SequencePool(2, 1000)
    for number in range(3):
        pool.open(number)
        pool.retain(number, 0)
        pool.close(number)
    assert not pool.take_pending()
    for n_kept in (0, 40):  # a prompt that was stopped while it was read leaves more than cells at stages
        pool.open(n_kept)
        pool.place(n_kept, 64, [])
        pool.retain(n_kept, n_kept)
        assert pool.take_pending()[-1] == KvOp(OpKind.REMOVE, pool._texts[n_kept].seq, first=n_kept)


def prefixes_of(blocks: bool, kept: Request) -> Prefixes:
    """Of one finished request."""
    pool = SequencePool(1, 1000)
    pool.open(kept.id)
    pool.place(kept.id, kept.n_retained, [])
    prefixes = Prefixes(Level(ToyPipeline([ToyStage(0, 1, True)], random.Random(0)), pool, blocks=blocks), {})
    prefixes.retain(kept)
    return prefixes


def finished(tokens: Sequence[int], n_prompt: int, spans: Spans | None = None, repeat_penalty: float = 1.0) -> Request:
    params = SamplingParams(repeat_penalty=repeat_penalty, repeat_last_n=9)
    request = Request(1, tokens[:n_prompt], 500, params, 1000, spans=spans)
    request.tokens, request.n_retained = list(tokens), len(tokens) - 1
    return request


TEXT = [at % 7 for at in range(300)]


def spans(*edges: int) -> Spans:
    return tuple(map(Span, edges[::2], edges[1::2]))


@pytest.mark.parametrize(
    ("wanted", "n_same", "usable"),
    [
        (spans(0, 199), 260, 249),  # the same rows in blocks: all that is common, but not the root
        (spans(0, 199), 230, 230),
        (spans(0, 199), 190, 128),  # not all of the last block is common
        (spans(0, 128), 230, 128),  # the whole blocks before, and what comes after is evaluated by itself
        (spans(0, 128), 128, 128),
        (spans(0, 128), 100, 64),
        (spans(0, 128), 63, 0),
        (spans(0, 127), 230, 0),  # no block ends there
        (spans(0, 192), 230, 128),  # nor there: the last one is longer
        (spans(0, 249), 230, 128),
        (spans(0, 199), 150, 128),
        (spans(64, 199), 230, 0),
        (spans(0, 128, 128, 249), 230, 128),  # blocks of their own behind those that are common
        (spans(0, 199, 210, 280), 260, 210),  # what was said is common, what is new comes in blocks
        (spans(0, 199, 210, 280), 205, 205),
        ((), 230, 0),
    ],
)
def test_only_rows_that_would_be_the_same_are_taken_over(wanted: Spans, n_same: int, usable: int) -> None:
    kept = finished(TEXT, 200)
    assert kept.spans == spans(0, 199) and kept.spans[0].edges == [0, 64, 128, 199]
    prompt = [*TEXT[:n_same], *[99] * 300][:250]
    request = Request(2, prompt, 9, SamplingParams(), 1000, spans=wanted)
    for blocks, n in ((True, usable), (False, min(n_same, 249))):
        found = prefixes_of(blocks, kept).best(request)
        assert (found.n_tokens if found else 0) == n


def test_what_follows_several_spans_is_taken_over() -> None:
    kept = finished([*TEXT, *TEXT], 300, spans(0, 70, 100, 230, 235, 299))
    for wanted, usable in (
        (spans(0, 70, 100, 230, 235, 299), 235),
        (spans(0, 70, 100, 230), 235),
        (spans(0, 70, 100, 164), 164),
        (spans(0, 70), 100),
        (spans(0, 70, 110, 230), 100),
        (spans(0, 70, 90, 230), 90),
    ):
        prefixes = prefixes_of(True, kept)
        found = prefixes.best(Request(2, TEXT[:290], 9, SamplingParams(), 1000, spans=wanted))
        assert found and found.n_tokens == usable, wanted


def test_what_looks_back_takes_over_whatever_is_kept() -> None:
    for kept_penalty, penalty in ((1.0, 1.3), (1.3, 1.3), (1.3, 1.0), (1.0, 1.0)):
        prefixes = prefixes_of(False, finished(TEXT, 40, repeat_penalty=kept_penalty))
        found = prefixes.best(Request(2, TEXT[:50], 9, SamplingParams(repeat_penalty=penalty, repeat_last_n=9), 1000))
        assert found and found.n_tokens == 49


def test_which_rows_of_a_turn_come_in_blocks_follows_from_the_texts() -> None:
    first = spans_of(200)
    assert first == spans(0, 199) and spans_of(64) == ()
    assert spans_to_continue(first, 260, 260, 280) == first, "so little is evaluated as guesses are"
    assert spans_to_continue(first, 260, 260, 400) == spans(0, 199, 259, 399)
    assert spans_to_continue(first, 260, 240, 400) == spans(0, 199, 240, 399), "it was rewritten from there"
    assert spans_to_continue(first, 260, 190, 220) == spans(0, 128, 128, 219), "the last block is evaluated anew"
    assert spans_to_continue(first, 260, 190, 180) == spans(0, 128)
    assert spans_to_continue(first, 260, 30, 300) == spans(0, 299), "nothing whole is common"
    assert spans_to_continue(first, 260, 200, 200) == first, "the same question again"
    assert spans_to_continue((), 50, 40, 70) == ()
    assert spans_to_continue((), 50, 40, 200) == spans(40, 199)
    assert spans_to_continue(spans(0, 70, 100, 199), 260, 120, 130) == spans(0, 70)


def test_what_is_kept_gives_way_to_who_needs_the_room() -> None:
    """One sequence, and cells for one text."""
    rng, reference = random.Random(1), Reference(N_LAYERS)
    for n_seq, n_cells in ((1, 400), (4, 60)):
        pool = SequencePool(n_seq, n_cells)
        pipeline = ToyPipeline([ToyStage(0, N_LAYERS, True, n_cells)], rng)
        engine = toy_engine(pipeline, pool, None)
        for number in range(4):
            request = Request(number, [number, 5, 6], 40, SamplingParams(temp=0.0), 50, keep=True)
            engine.add(request, Iterative())
            for _ in emitted(engine):
                audit_engine(engine)
            assert request.tokens[3:] == reference.generate([number, 5, 6], 40, SamplingParams(temp=0.0))
            assert pool.n_committed == 42
        engine.forget()
        assert pool.n_free == n_seq and pool.n_free_cells == n_cells


def test_what_is_kept_leaves_sequences_for_trees() -> None:
    """Short texts use sequences up long before cells."""
    rng, reference = random.Random(5), Reference(N_LAYERS)
    pipeline = ToyPipeline([BlockStage(0, N_LAYERS, True, 900)], rng)
    pool = SequencePool(12, 900)
    engine = toy_engine(pipeline, pool, OracleDrafter(reference, 0.5), n_chunk=8, n_rows=8)
    for number in range(20):
        prompt = [rng.randrange(N_VOCAB) for _ in range(5)]
        engine.add(Request(number, prompt, 4, SamplingParams(temp=0.0), 40, keep=True), Speculative(width=4))
        engine.complete()
    assert pool.n_free == 6 and pool.n_committed < 90
