"""The engine over torch's stages: every policy, split, tree and cancellation gives the text that they write token by
token."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.cluster.stages.runs import PendingRun
from pipeinfer.cluster.stages.stage import room_for
from pipeinfer.cluster.verdicts import encode_verdict
from pipeinfer.cluster.wire import Transaction, WireType
from pipeinfer.core.engine import Engine
from pipeinfer.core.levels import Level
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Request
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.drafts.model_drafter import ModelDrafter
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.torch.params import TorchParams
from pipeinfer.policies import POLICIES, Iterative, make_policy
from tests.core.test_engine import random_policy
from tests.support.audit import audit_engine
from tests.support.cases import cases
from tests.support.gguf_factory import Shape, write_model
from tests.support.toy import OracleDrafter, Reference, ToyPipeline, ToyWaiter, mix

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pipeinfer[torch]'")

from pipeinfer.models.torch.stage import TorchStage  # noqa: E402
from tests.models.torch.test_torch_queue import LateQueue  # noqa: E402

N_LAYER, N_CELLS, N_PREDICT = 3, 140, 24
TINY = Shape(n_layer=N_LAYER, n_embd=64, n_ff=96, n_vocab=320, peaky=5.0)


def open_stages(
    path: Path, cuts: Sequence[int], n_cells: int, exact: bool = True, padded: bool = False
) -> list[TorchStage]:
    info = read_model_info(path)
    params = TorchParams(n_cells, 64, 160, 64, 1, "cpu", exact=exact, padded=padded)
    return [TorchStage(open_slice(info, *edges), params) for edges in pairwise([0, *cuts, info.n_layer])]


# --- random trees on a tiny model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TINY, "F32")


@pytest.fixture(scope="module")
def chains(tiny: Path) -> dict[int, list[TorchStage]]:
    """By their number of stages."""
    return {n: open_stages(tiny, range(1, n), N_CELLS) for n in range(1, N_LAYER + 1)}


class KnownText(Reference):
    """What follows each prefix of one text; after any other path some token."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__(0)
        self.text = list(text)

    def hash_after(self, path: tuple[int, ...]) -> int:
        return mix(*path)

    def next_token(self, path: Sequence[int], params: SamplingParams) -> int:
        on_text = len(path) < len(self.text) and list(path) == self.text[: len(path)]
        return self.text[len(path)] if on_text else mix(*path) % 24


def make_request(seed: int) -> Request:
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 300) for _ in range(rng.choice([1, 2, 30, 70]))]
    params = SamplingParams(seed=seed, temp=rng.choice([0.0, 0.8]), repeat_penalty=rng.choice([1.0, 1.2]))
    return Request(0, prompt, N_PREDICT, params, 100)


def write_text(
    stages: Sequence[TorchStage],
    request: Request,
    policy: Policy,
    seed: int,
    known: list[int],
    make_pipeline: type[ToyPipeline] = ToyPipeline,
) -> None:
    """Run one request to its end, audited after every step. `known`: the text that guesses are made from."""
    rng = random.Random(seed)
    for stage in stages:
        stage.clear()
    parked = rng.random() < 0.5
    pipeline = make_pipeline(stages, rng, late=rng.choice([0.0, 0.5, 0.95]))
    pool = SequencePool(rng.choice([2, 4, 60]), N_CELLS, parked)
    target = Level(pipeline, pool, n_chunk=rng.choice([3, 64]), n_rows=32, blocks=True)
    engine = Engine(target, OracleDrafter(KnownText(known), rng.random(), seed), ToyWaiter(rng), lambda: 0.0)
    engine.add(request, policy)
    while engine.busy:
        engine.step()
        audit_engine(engine)
    assert not any(pipeline.queues), "a run was forgotten"


@pytest.mark.parametrize("block", cases(1, 3))
def test_any_tree_split_and_cancellation_gives_the_plain_text(chains: dict[int, list[TorchStage]], block: int) -> None:
    for seed in range(block * 8, block * 8 + 8):
        plain, other = make_request(seed), make_request(seed)
        write_text(chains[1], plain, Iterative(), seed, [])
        rng = random.Random(seed)
        write_text(chains[1 + seed % N_LAYER], other, random_policy(rng), seed, plain.tokens)
        assert other.tokens == plain.tokens, f"seed {seed}"
        assert len(plain.tokens) > N_PREDICT


# --- runs begun ahead -------------------------------------------------------------------------------------------------


class AheadPipeline(ToyPipeline):
    """Stages begin a run, or wait for the oldest that they have begun, as a coin says; two at most. Messages stay in
    their queue until then."""

    n_ahead = 0

    def __init__(self, stages: Sequence[TorchStage], rng: random.Random, late: float) -> None:
        super().__init__(stages, rng, late)
        self.begun: list[deque[PendingRun]] = [deque() for _ in stages]

    def advance(self) -> None:
        index = self.rng.choice([index for index in range(self.n_stages) if self.queues[index]] or [-1])
        if index < 0:
            return
        queue, begun = self.queues[index], self.begun[index]
        if len(begun) < min(2, len(queue)) and (not begun or self.rng.random() < 0.7):
            AheadPipeline.n_ahead += len(begun)
            begun.append(self.begin(index, queue[len(begun)]))
            return
        oldest, _ = begun.popleft(), queue.popleft()
        verdict = self.finish(index, oldest)
        done = encode_verdict(verdict) if verdict else oldest.transaction.message.copy()
        self.queues[index + 1].append(done)

    def begin(self, index: int, message: Any) -> PendingRun:
        transaction = (Transaction if index else room_for)(message, self.n_embd, self.wire_type)
        return self.workers[index].begin(transaction, self.prunings[index])

    def finish(self, index: int, begun: PendingRun) -> Any:
        return self.workers[index].finish(begun)


def test_runs_begun_ahead_on_late_devices_give_the_plain_text(
    chains: dict[int, list[TorchStage]], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations, trees, cancelled runs and pruned rows come while the device has not begun the runs before them."""
    monkeypatch.setattr("pipeinfer.models.torch.stage.DeviceQueue", lambda device: LateQueue())
    late = open_stages(tiny, [1], N_CELLS, exact=False, padded=True)
    for seed in range(30, 42):
        plain, other = make_request(seed), make_request(seed)
        write_text(chains[1], plain, Iterative(), seed, [])
        write_text(late, other, random_policy(random.Random(seed)), seed, plain.tokens, AheadPipeline)
        assert other.tokens == plain.tokens, f"seed {seed}"
    assert AheadPipeline.n_ahead > 50


# --- activations from device to device --------------------------------------------------------------------------------


class OutOfBandPipeline(AheadPipeline):
    """The same with activations out of band, in memory that is written over as soon as this run is done, as by MPI.
    Now and then a stage leaves its result with the host instead."""

    n_out_of_band = 0

    def __init__(self, stages: Sequence[TorchStage], rng: random.Random, late: float) -> None:
        super().__init__(stages, rng, late)
        self.memories: list[deque[Any]] = [deque() for _ in stages]
        self.rooms: dict[int, Any] = {}

    def begin(self, index: int, message: Any) -> PendingRun:
        worker, transaction = self.workers[index], room_for(message, self.n_embd)
        worker.leaves_as = self.rng.choice([WireType.F32] * 3 + [None]) if index + 1 < self.n_stages else None
        if transaction.comes_out_of_band:
            memory = self.memories[index].popleft()
            assert isinstance(worker.model, TorchStage)
            transaction.out_of_band = worker.model.device_rows(memory, transaction.n_rows, rounded=False)
            self.rooms[id(transaction)] = memory
        return worker.begin(transaction, self.prunings[index])

    def finish(self, index: int, begun: PendingRun) -> Any:
        verdict = self.workers[index].finish(begun)
        if (room := self.rooms.pop(id(begun.transaction), None)) is not None:
            room.fill_(255)  # no numbers
        if index + 1 < self.n_stages and (memory := begun.transaction.out_of_band_memory) is not None:
            OutOfBandPipeline.n_out_of_band += 1
            room = torch.full((len(memory) + 64,), 255, dtype=torch.uint8)
            room[: len(memory)] = memory
            self.memories[index + 1].append(room)
        return verdict


@pytest.mark.parametrize("late", [True, False])
def test_activations_from_device_to_device_give_the_plain_text(
    chains: dict[int, list[TorchStage]], tiny: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    if late:
        monkeypatch.setattr("pipeinfer.models.torch.stage.DeviceQueue", lambda device: LateQueue())
    stages = open_stages(tiny, [1, 2], N_CELLS, exact=not late, padded=late)
    before = OutOfBandPipeline.n_out_of_band
    for seed in range(50, 62):
        plain, other = make_request(seed), make_request(seed)
        write_text(chains[1], plain, Iterative(), seed, [])
        write_text(stages, other, random_policy(random.Random(seed)), seed, plain.tokens, OutOfBandPipeline)
        assert other.tokens == plain.tokens, f"seed {seed}"
    assert OutOfBandPipeline.n_out_of_band > before + 300


# --- every policy on the shipped pair ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft() -> Iterator[LlamaStage]:
    info = read_model_info(DRAFT)
    params = LlamaParams(512, 64, n_batch=32, n_outputs_max=32, exact=False)
    stage = LlamaStage(open_slice(info, 0, info.n_layer), params)
    yield stage
    stage.close()


@pytest.mark.parametrize(("temp", "n"), [(0.0, 14), (0.8, 24)])
def test_every_policy_gives_the_text_of_iterative(draft: LlamaStage, temp: float, n: int) -> None:
    stages = open_stages(TARGET, (4,), 512)
    prompts = [[rng.randrange(300, 3000) for _ in range(n)] for rng, n in ((random.Random(n), n) for n in (5, 70))]
    texts: dict[str, list[list[int]]] = {}
    for name in POLICIES:
        for stage in stages:
            stage.clear()
        draft.clear()
        pipeline = ToyPipeline(stages, random.Random(1))
        drafter = ModelDrafter(draft, SequencePool(60, 512), 32)
        target = Level(pipeline, SequencePool(60, 512, parked=True), n_chunk=128, n_rows=32, blocks=True)
        engine = Engine(target, drafter, ToyWaiter(pipeline.rng), lambda: 0.0)
        requests = [Request(i, prompt, n, SamplingParams(seed=i, temp=temp), 200) for i, prompt in enumerate(prompts)]
        for request in requests:
            engine.add(request, make_policy(name, {}))
        engine.complete()
        texts[name] = [request.tokens for request in requests]
    assert all(text == texts["iterative"] for text in texts.values()), texts
