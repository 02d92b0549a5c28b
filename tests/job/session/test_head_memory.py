"""What rank 0 of a service keeps does not grow with the requests that it has served, nor with the time it was idle."""

from __future__ import annotations

import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeinfer.cluster.head_pipeline import HeadPipeline, HeadWaiter
from pipeinfer.cluster.stages.stage import StageWorker
from pipeinfer.cluster.transport import Comm
from pipeinfer.cluster.verdicts import decode_verdict
from pipeinfer.cluster.watch.protocol import Flow
from pipeinfer.core.admission import OpenLimits
from pipeinfer.core.engine import Engine
from pipeinfer.core.levels import Level
from pipeinfer.core.requests import Emission
from pipeinfer.core.run_cost import RunCost
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.errors import StopRequested
from pipeinfer.job.launch import Context
from pipeinfer.job.options.options import Speculation
from pipeinfer.job.placement.job_plan import JobPlan, capacity_of, engine_settings
from pipeinfer.job.process.stop import Drain, StopFlag
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.serve import serve as serving
from pipeinfer.job.serve.channel import Ask, Cancel, Finished, FromFront, FromHead, Heartbeat, TextUpdates
from pipeinfer.job.serve.serve import Service
from pipeinfer.job.session.ranks import LoadedRanks
from pipeinfer.job.session.session import Output, Session
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.trace import NO_TRACE, HeadLedger
from pipeinfer.policies import Auto
from tests.support.toy import N_LAYERS, N_VOCAB, OracleDrafter, Reference, ToyStage

N_OPEN, N_CELLS, N_DIFFERENT = 2, 400, 30
N_SPREAD = 1000
"""Blocks of Python's memory by which two moments may differ that are hundreds of requests apart."""


class Words:
    """A tokenizer of the toy's vocabulary: each token is a letter."""

    ends = ()

    def is_end(self, token: int) -> bool:
        return False

    def decode_piece(self, token: int, special: bool = False) -> bytes:
        return bytes([97 + token])


class Clients:
    """The front of a service whose clients ask all kinds of short requests, and leave some. `messages`: sent one at a
    time while no client has anything to say."""

    address, tunnel = "nowhere", ""

    def __init__(self, n_requests: int, messages: Sequence[FromFront] = ()) -> None:
        self.n_requests, self.messages, self.rng = n_requests, list(messages), random.Random(3)
        self.open: dict[int, int] = {}  # id -> tokens until its client leaves
        self.drops: list[FromFront] = []
        self.n_asked = self.n_ended = self.n_left = self.n_runs = 0

    def has_news(self) -> bool:
        return True

    def take(self) -> Sequence[FromFront]:
        found, self.drops = self.drops, []
        while len(self.open) < N_OPEN and self.n_asked < self.n_requests:
            found.append(self._ask())
        if not found and self.messages:
            found.append(self.messages.pop())
        return found

    def _ask(self) -> Ask:
        id, number = self.n_asked, self.rng.randrange(N_DIFFERENT)
        self.n_asked += 1
        self.open[id] = self.rng.randint(0, 6) if self.rng.random() < 0.2 else 1000
        rng = random.Random(number)
        prompt = tuple([*range(rng.choice((1, 4, 9))), rng.randrange(N_VOCAB)])
        sampling = SamplingParams(
            seed=number,
            temp=rng.choice((0.0, 0.8)),
            repeat_penalty=rng.choice((1.0, 1.2)),
            n_logprobs=rng.choice((-1, -1, 0, 3)),
        )
        stops = ("ab", "c") if rng.random() < 0.2 else ()
        keep, priority = rng.random() < 0.5, rng.choice((0, 0, 1))
        n_predict = rng.randint(1, 16)
        request = GenerationRequest(
            prompt, n_predict, len(prompt) + n_predict, sampling, frozenset(), stops, keep=keep, priority=priority
        )
        return Ask(id, "", request)

    def tell(self, message: FromHead) -> None:
        if isinstance(message, TextUpdates):
            for id, tokens, *_ in message.parts:
                self.open[id] -= len(tokens)
                if self.open[id] < 0:
                    del self.open[id]
                    self.drops.append(Cancel(id))
                    self.n_left += 1
        elif isinstance(message, Finished) and self.open.pop(message.id, None) is not None:
            self.n_ended, self.n_runs = self.n_ended + 1, message.n_runs

    def lost(self) -> str:
        is_busy = self.n_asked < self.n_requests or self.open or self.drops or self.messages
        return "" if is_busy else "all have their texts"

    def start(self, setup: object) -> None: ...

    def close(self, grace_s: float = 0.0) -> None: ...


class ToyRanks(LoadedRanks):
    """Their engine has a draft that knows the toy model."""

    def make_engine(self, has_work: Callable[[], bool], on_tokens: Callable[[Sequence[Emission]], object]) -> Engine:
        assert self._pipeline
        return Engine(
            Level(self._pipeline, SequencePool(self.plan.capacity.n_seq, N_CELLS)),
            OracleDrafter(Reference(N_LAYERS), 0.6),
            HeadWaiter(self.context.flag.check, self._pipeline, has_work),
            time.monotonic,
            on_tokens,
            run_cost=RunCost({1: 1e-5, 8: 2e-5}),
            limits=OpenLimits(N_OPEN),
        )


def toy_service(front: Clients) -> Service:
    """A service on a lone rank that hosts the toy model, as `run` leaves it when the models are loaded."""
    context = Context(cast(Any, None), StopFlag(), NO_TRACE, Flow())
    stages = [SimpleNamespace(rank=0)]
    assignment = SimpleNamespace(stages=stages, computing={0}, drafts={}, n_ranks=1, describe=lambda rank: "all")
    speculation = Speculation(policy=Auto())
    capacity = capacity_of(speculation, N_OPEN, 128, N_CELLS, rewinds=True)
    engine = engine_settings(speculation, N_OPEN, rewinds=True)
    model = SimpleNamespace(rewinds=True)
    plan = cast(JobPlan, SimpleNamespace(assignment=assignment, model=model, capacity=capacity, engine=engine))
    front_and_setup, tokenizer = (cast(Any, front), cast(Any, None)), cast(Tokenizer, Words())
    service = Service(plan, *front_and_setup, tokenizer, speculation.policy, Drain(1.0), verbose=False)
    service.context = context
    ranks = ToyRanks(context, plan)
    worker = StageWorker(ToyStage(0, N_LAYERS, True, N_CELLS), time.monotonic, is_first=True)
    ranks._pipeline = HeadPipeline(cast(Comm, None), [0], worker, 0, decode_verdict)
    service.session, service.snapshots = Session(ranks, tokenizer, service._has_work), serving.Snapshots(ranks)
    return service


def serve(service: Service) -> list[int]:
    """Until the clients have all they want: blocks of Python's memory whenever notes were taken."""
    blocks, ranks = list[int](), service.session.ranks
    with pytest.raises(StopRequested):
        while not service._has_drained():
            service.session.engine.step()
            n_records = ranks.n_records
            assert n_records < serving.MAX_RECORDS + 10
            service.snapshots.next()
            if ranks.n_records < n_records:
                gc.collect()
                blocks.append(sys.getallocatedblocks())
    return blocks


def test_nothing_is_kept_of_requests_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_RECORDS", 250)
    front = Clients(n_requests=500)
    service = toy_service(front)
    blocks = serve(service)
    assert front.n_ended > 350 and front.n_left > 50 and not service._open
    assert front.n_runs == service.session.ranks.n_runs and len(blocks) == front.n_runs // serving.MAX_RECORDS >= 5
    assert blocks[-1] < blocks[1] + N_SPREAD


def test_a_request_that_a_stop_string_ended_has_no_further_output() -> None:
    """Two runs of one request may have been heard before its new tokens are handed out."""
    session = toy_service(Clients(0)).session
    request = GenerationRequest((1,), 8, 9, SamplingParams(), frozenset(), ("b",))
    outputs = list[Output]()
    opened = session.begin(request, outputs.extend)
    session._hear([Emission(opened.state, [0, 1, 2]), Emission(opened.state, [3])])
    assert [(each.text, list(each.tokens), each.ended) for each in outputs] == [("a", [0, 1], True)]
    assert not session.n_open and opened.state.finish


def test_notes_take_less_than_a_megabyte() -> None:
    tracemalloc.start()
    ledger, at_s = HeadLedger(), 0.0
    for run_id in range(1000, 1000 + serving.MAX_RECORDS // 2):
        for windows in (ledger.waits, ledger.cancelled):
            windows.append((at_s + run_id, at_s + run_id))
        ledger.submitted_s[run_id] = at_s + run_id
        for moments in (ledger.verdicts, ledger.cancels):
            moments.append((at_s + run_id, run_id + 1))
    n_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ledger.n_notes == serving.MAX_RECORDS and n_bytes < 1e6


def test_an_idle_service_keeps_no_record_of_its_waits() -> None:
    """Each sign of life of the process that speaks HTTP ends a wait."""
    assert len(serve(toy_service(Clients(1, [Heartbeat()] * 3 * serving.MAX_RECORDS)))) >= 2
