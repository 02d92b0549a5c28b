"""Slices against the whole model, batches against single rows, stopping, packing: bit for bit."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeinfer.core.interfaces import Batch, StageModel
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.types import POSITION_END, FloatArray
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.decoder import KvCacheFull
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.gguf_factory import Shape, write_model

ARCHITECTURES = {
    "llama": Shape(rope_factors=True),
    "llama-tied": Shape(tied=True),
    "mixtral": Shape(n_expert=4),
    "qwen2": Shape("qwen2"),
    "qwen3": Shape("qwen3"),
    "qwen3moe": Shape("qwen3moe", n_expert=4),
    "falcon": Shape("falcon", n_head_kv=1),
    "phi3": Shape("phi3", rope_factors=True),
}
PARAMS = LlamaParams(n_cells=1024, n_seq_max=16, n_batch=64, n_outputs_max=64)


def never() -> bool:
    return False


def make_batch(
    tokens: Sequence[int], first: int, hidden: FloatArray | None = None, wanted: Sequence[bool] | None = None
) -> Batch:
    """A chain of tokens in sequence 0, from position `first` on."""
    n = len(tokens)
    positions = np.arange(first, first + n, dtype=np.int32)
    wanted_rows = np.ones(n, bool) if wanted is None else np.array(wanted)
    return Batch(np.array(tokens, np.int32), positions, [(0,)] * n, hidden, wanted_rows)


def run(stages: Sequence[StageModel], batch: Batch) -> FloatArray:
    result: FloatArray | None = None
    for stage in stages:
        result = stage.evaluate(batch, never)
        batch.hidden = result
    assert result is not None
    return result.copy()


def load(path: Path, cuts: Sequence[int] = (), params: LlamaParams = PARAMS) -> list[LlamaStage]:
    info = read_model_info(path)
    edges = [0, *cuts, info.n_layer]
    return [LlamaStage(open_slice(info, a, b), params) for a, b in pairwise(edges)]


@pytest.fixture
def loaded() -> Iterator[Callable[..., list[LlamaStage]]]:
    """`load`, with everything closed at the end of the test."""
    opened: list[LlamaStage] = []

    def open_and_note(*args: object, **kwargs: object) -> list[LlamaStage]:
        opened.extend(load(*args, **kwargs))  # type: ignore[arg-type]
        return opened[-(len(args[1]) + 1 if len(args) > 1 else 1) :]  # type: ignore[arg-type]

    yield open_and_note
    for stage in opened:
        stage.close()


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="session")
def model(directory: Path) -> Path:
    return write_model(directory / "model.gguf")


def random_tokens(n: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, 300, n).tolist()
    return tokens


@pytest.mark.parametrize("type_name", ["Q8_0", "F32", "F16", "Q4_0", "Q4_K_M", "Q6_K"])
def test_slices_equal_the_whole_model(directory: Path, loaded: Callable[..., list[LlamaStage]], type_name: str) -> None:
    path = write_model(directory / f"whole-{type_name}.gguf", type_name=type_name)
    check_chains(path, [(2,)], loaded)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_slices_equal_the_whole_model_for_every_architecture(
    directory: Path, loaded: Callable[..., list[LlamaStage]], name: str
) -> None:
    path = write_model(directory / f"arch-{name}.gguf", ARCHITECTURES[name])
    check_chains(path, [(2,), (1, 3), (1, 2, 3)], loaded)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_K_M"])
def test_fast_slices_equal_the_fast_whole_model(
    directory: Path, loaded: Callable[..., list[LlamaStage]], type_name: str
) -> None:
    path = write_model(directory / f"fast-{type_name}.gguf", type_name=type_name)
    params = LlamaParams(n_cells=512, n_batch=64, n_outputs_max=64, exact=False)
    check_chains(path, [(1, 3)], loaded, params)


def check_chains(
    path: Path, all_cuts: Sequence[Sequence[int]], loaded: Callable[..., list[LlamaStage]], params: LlamaParams = PARAMS
) -> None:
    """Prefill in two chunks, then greedy decoding, on the whole model and on chains of slices."""
    chains = [loaded(path, cuts, params=params) for cuts in all_cuts]
    (whole,) = loaded(path, (), params=params)
    tokens, at, best = random_tokens(33), 0, 0
    seen: set[int] = set()
    for chunk in (tokens[:20], tokens[20:], *[None] * 12):
        inputs = [best] if chunk is None else chunk
        wanted = [chunk is None or i % 3 == 0 for i in range(len(inputs))]
        expected = run([whole], make_batch(inputs, at, None, wanted))
        assert expected.shape == (sum(wanted), whole.n_vocab)
        for chain in chains:
            assert np.array_equal(run(chain, make_batch(inputs, at, None, wanted)), expected)
        at += len(inputs)
        best = int(expected[-1].argmax())
        seen.add(best)
    assert len(seen) > 1 or read_model_info(path).tied


def test_split_model_computes_the_same(tmp_path: Path, model: Path, loaded: Callable[..., list[LlamaStage]]) -> None:
    write_model(tmp_path / "split.gguf", part_tensors=15)
    first = min(tmp_path.iterdir())
    tokens = random_tokens(10)
    expected = run(loaded(model), make_batch(tokens, 0))
    assert np.array_equal(run(loaded(first), make_batch(tokens, 0)), expected)
    assert np.array_equal(run(loaded(first, (2,)), make_batch(tokens, 0)), expected)


def test_no_row_wanted(model: Path, loaded: Callable[..., list[LlamaStage]]) -> None:
    first, last = loaded(model, (2,))
    result = run([first, last], make_batch(random_tokens(5), 0, None, [False] * 5))
    assert result.shape == (0, last.n_vocab) and last.next_position(0) == 5


# --- exact numerics -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", params=["Q8_0", "Q4_K_M", "Q6_K"])
def exact_model(directory: Path, request: pytest.FixtureRequest) -> Path:
    shape = Shape(n_layer=2, peaky=8.0)
    return write_model(directory / f"exact-{request.param}.gguf", shape, request.param)


def exact_params(n_threads: int, n_cells: int = 1536) -> LlamaParams:
    return LlamaParams(n_cells=n_cells, n_seq_max=16, n_batch=64, n_outputs_max=64, n_threads=n_threads)


@pytest.fixture(scope="session")
def plain(exact_model: Path) -> tuple[list[int], FloatArray]:
    """660 random tokens and the logits after each, evaluated one row at a time."""
    (stage,) = load(exact_model, (), exact_params(n_threads=1))
    tokens = random_tokens(660)
    rows = [run([stage], make_batch([token], i))[0] for i, token in enumerate(tokens)]
    stage.close()
    return tokens, np.array(rows)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_rows_are_the_same_in_every_batch(
    exact_model: Path, plain: tuple[list[int], FloatArray], loaded: Callable[..., list[LlamaStage]], n_threads: int
) -> None:
    tokens, expected = plain
    (stage,) = loaded(exact_model, (), params=exact_params(n_threads))
    at = 0
    # 1 to 32 rows in ascending order up to 528 cells, then the same sizes at the end again, wrong guesses parked
    for n in range(1, 33):
        assert np.array_equal(run([stage], make_batch(tokens[at : at + n], at)), expected[at : at + n]), n
        at += n
    for n in range(32, 0, -1):
        assert np.array_equal(run([stage], make_batch(tokens[at : at + n], at)), expected[at : at + n]), n
        stage.apply([KvOp(OpKind.REMOVE, 0, first=at)])


class TreeDriver:
    """Random token trees over known tokens: the known path among wrong branches, verified, settled and packed.
    `alone`: each node has a sequence of its own, not each leaf."""

    def __init__(
        self, stages: Sequence[Any], tokens: list[int], expected: FloatArray, seed: int, alone: bool = False
    ) -> None:
        self.stages, self.tokens, self.expected, self.alone = stages, tokens, expected, alone
        self.rng = np.random.default_rng(seed)
        self.n_cells_used = self.n_compactions = self.at = 0

    def apply(self, *ops: KvOp) -> None:
        for stage in self.stages:
            stage.apply(ops)

    def prefill(self, n: int) -> None:
        for start in range(0, n, 64):
            chunk = self.tokens[start : min(start + 64, n)]
            run(self.stages, make_batch(chunk, start))
        self.at = self.n_cells_used = n

    def step(self) -> None:
        """One batch: the root, some correct successors, wrong branches off random nodes, in random (legal) order."""
        n_right, n_wrong = int(self.rng.integers(0, 6)), int(self.rng.integers(0, 5))
        parents = [-1, *range(n_right)]
        tokens = self.tokens[self.at : self.at + n_right + 1]
        for _ in range(n_wrong):
            parent = int(self.rng.integers(0, len(parents)))
            for _ in range(int(self.rng.integers(1, 4))):
                parents.append(parent)
                tokens = [*tokens, int(self.rng.integers(3, 300))]
                parent = len(parents) - 1
        order = self.random_order(parents)
        ends = [node for node in range(len(parents)) if self.alone or node not in parents]
        seqs_of: list[list[int]] = [[] for _ in parents]
        for seq, node in enumerate(ends, 1):
            while node >= 0:
                seqs_of[node].append(seq)
                node = parents[node]
        depth = [0] * len(parents)
        for node in range(1, len(parents)):
            depth[node] = depth[parents[node]] + 1
        self.apply(*(KvOp(OpKind.COPY, 0, seq, 0, self.at) for seq in range(1, len(ends) + 1)))
        batch = Batch(
            np.array([tokens[node] for node in order], np.int32),
            np.array([self.at + depth[node] for node in order], np.int32),
            [tuple(seqs_of[node]) for node in order],
            None,
            np.ones(len(order), bool),
        )
        logits = run(self.stages, batch)
        for row, node in enumerate(order):
            if node <= n_right:
                assert np.array_equal(logits[row], self.expected[self.at + node]), (self.at, node, order)
        kept = seqs_of[n_right][0]
        self.apply(KvOp(OpKind.COPY, kept, 0, self.at, self.at + n_right + 1))
        self.apply(*(KvOp(OpKind.REMOVE, seq) for seq in range(1, len(ends) + 1)))
        self.at += n_right + 1
        self.n_cells_used += len(order)
        if self.n_cells_used > self.stages[0].n_cells - 32:
            self.apply(KvOp(OpKind.COMPACT, 0))
            self.n_cells_used = self.at
            self.n_compactions += 1

    def random_order(self, parents: list[int]) -> list[int]:
        order: list[int] = []
        ready = [0]
        while ready:
            node = ready.pop(int(self.rng.integers(0, len(ready))))
            order.append(node)
            ready += [child for child, parent in enumerate(parents) if parent == node]
        return order


@pytest.mark.parametrize("n_threads", [1, 2])
def test_trees_are_the_same_as_plain_decoding(
    exact_model: Path, plain: tuple[list[int], FloatArray], loaded: Callable[..., list[LlamaStage]], n_threads: int
) -> None:
    tokens, expected = plain
    stages = loaded(exact_model, (1,), params=exact_params(n_threads, n_cells=768))
    driver = TreeDriver(stages, tokens, expected, seed=n_threads)
    driver.prefill(500)
    while driver.at < 640:
        driver.step()
    assert driver.n_compactions >= 1


def test_compaction_frees_parked_cells(model: Path, loaded: Callable[..., list[LlamaStage]]) -> None:
    params = LlamaParams(n_cells=512, n_seq_max=16, n_batch=64, n_outputs_max=64)
    (stage,) = loaded(model, (), params=params)
    (reference,) = loaded(model, (), params=params)
    tokens = random_tokens(300)
    for at in range(0, 300, 60):
        run([reference], make_batch(tokens[at : at + 60], at))
        run([stage], make_batch(tokens[at : at + 60], at))
        wrong = random_tokens(30, seed=at + 1)
        run([stage], make_batch(wrong, at + 60))
        stage.apply([KvOp(OpKind.REMOVE, 0, 0, at + 60, POSITION_END)])
    with pytest.raises(KvCacheFull, match="no room for 64 rows in the KV cache of 512 cells"):
        stage.evaluate(make_batch(random_tokens(64), 300), never)
    before = state(stage, 0)
    stage.apply([KvOp(OpKind.COMPACT, 0)])
    assert state(stage, 0) == before
    assert stage.next_position(0) == 300 and stage.next_position(15) == 0
    for at in (300, 364, 428):
        follow = random_tokens(64, seed=at)
        assert np.array_equal(run([stage], make_batch(follow, at)), run([reference], make_batch(follow, at)))


def test_a_fast_stage_frees_cells(model: Path, loaded: Callable[..., list[LlamaStage]]) -> None:
    params = LlamaParams(n_cells=256, n_batch=64, n_outputs_max=64, exact=False)
    (stage,) = loaded(model, (), params=params)
    for _ in range(10):
        run([stage], make_batch(random_tokens(64), 0))
        stage.apply([KvOp(OpKind.REMOVE, 0)])
        assert stage.next_position(0) == 0


def test_guesses_beyond_a_window_leave_what_the_next_token_sees(
    directory: Path, loaded: Callable[..., list[LlamaStage]]
) -> None:
    """Two runs of guesses, behind cells that another request has freed: libllama would take cells of the text that are
    outside of the newest guess's window."""
    model = replace(MODELS["gemma3"], metadata={**MODELS["gemma3"].metadata, "attention.sliding_window": 64})
    path, tokens, wrong = write_random_model(directory / "window.gguf", model), random_tokens(80), random_tokens(16, 2)
    params = LlamaParams(512, n_seq_max=4, n_batch=64, n_outputs_max=64, exact=False, parks=True)
    found = []
    for has_guesses in (False, True):
        (stage,) = loaded(path, (), params=params)
        run([stage], moved(make_batch(wrong, 0), 1))
        run([stage], make_batch(tokens[:55], 0))
        stage.apply([KvOp(OpKind.REMOVE, 1)])
        for at in range(55, 63):
            run([stage], make_batch(tokens[at : at + 1], at))
        if has_guesses:
            run([stage], make_batch(wrong[:8], 63))
            run([stage], make_batch(wrong[8:], 71))
            stage.apply([KvOp(OpKind.REMOVE, 0, first=63)])
        found.append([run([stage], make_batch(tokens[at : at + 1], at)) for at in range(63, 67)])
    assert np.allclose(np.array(found[0]), np.array(found[1]), atol=1e-3)


# --- stopping -------------------------------------------------------------------------------------------------------


def state(stage: LlamaStage, seq: int) -> bytes:
    """The cells of a sequence, positions and contents."""
    size = stage._lib.llama_state_seq_get_size(stage._context.handle, seq)
    buffer = (ctypes.c_uint8 * size)()
    assert stage._lib.llama_state_seq_get_data(stage._context.handle, buffer, size, seq) == size
    return bytes(buffer)


def test_compaction_keeps_every_requests_bits(model: Path, loaded: Callable[..., list[LlamaStage]]) -> None:
    """Three requests whose cells, right and wrong, lie between each other's; each goes on as if it were alone."""
    params = LlamaParams(n_cells=768, n_seq_max=16, n_batch=64, n_outputs_max=64)
    (stage,) = loaded(model, (), params=params)
    alone = [loaded(model, (), params=params)[0] for _ in range(3)]
    texts = [random_tokens(200, seed=seq) for seq in range(3)]
    for at in range(0, 120, 6):
        for seq, tokens in enumerate(texts):
            batch = make_batch(tokens[at : at + 6], at)
            expected = run([alone[seq]], batch)
            assert np.array_equal(run([stage], moved(batch, seq)), expected)
            run([stage], moved(make_batch(random_tokens(4, seed=at), at + 6), seq))
            stage.apply([KvOp(OpKind.REMOVE, seq, 0, at + 6, POSITION_END)])
    before = [state(stage, seq) for seq in range(3)]
    stage.apply([KvOp(OpKind.COMPACT, 0)])
    assert [state(stage, seq) for seq in range(3)] == before
    for at in (120, 160):
        for seq, tokens in enumerate(texts):
            batch = make_batch(tokens[at : at + 40], at)
            assert np.array_equal(run([stage], moved(batch, seq)), run([alone[seq]], batch))


def moved(batch: Batch, seq: int) -> Batch:
    """The same rows in another sequence."""
    return Batch(batch.tokens, batch.positions, [(seq,)] * len(batch.tokens), None, batch.wanted)


@pytest.mark.parametrize("cuts", [(), (2,), (1, 3)])
@pytest.mark.parametrize("exact", [True, False])
def test_stopping_leaves_the_cache_as_before(
    model: Path, loaded: Callable[..., list[LlamaStage]], cuts: tuple[int, ...], exact: bool
) -> None:
    params = LlamaParams(n_cells=256, n_seq_max=16, n_batch=64, n_outputs_max=64, exact=exact)
    stages, undisturbed = loaded(model, cuts, params=params), loaded(model, cuts, params=params)
    prompt, guesses = make_batch(random_tokens(20), 0), random_tokens(5, seed=1)
    for chain in (stages, undisturbed):
        run(chain, make_batch(random_tokens(20), 0))
        for stage in chain:
            stage.apply([KvOp(OpKind.COPY, 0, 1)])
    assert prompt.hidden is None
    hidden: FloatArray | None = None
    for stage in stages:
        positions, seqs = np.array([20, 21, 21, 22, 22], np.int32), [(0, 1), (0,), (1,), (0,), (1,)]
        tree = Batch(np.array(guesses, np.int32), positions, seqs, hidden, np.ones(5, bool))
        before = state(stage, 0), state(stage, 1), stage.next_position(0)
        n_asked = 0

        def stop() -> bool:
            nonlocal n_asked
            n_asked += 1
            return n_asked > n_layers_done  # noqa: B023

        for n_layers_done in range(10):
            n_asked = 0
            hidden = stage.evaluate(tree, stop)
            if hidden is not None:
                break
            assert n_asked == n_layers_done + 1
            assert (state(stage, 0), state(stage, 1), stage.next_position(0)) == before
        # asked after every layer but the last of a slice, whose result is then already there
        assert n_layers_done == stage._n_layer - (not stage.is_last)
        assert hidden is not None
        hidden = hidden.copy()
    assert hidden is not None
    tree.hidden = None
    assert np.array_equal(hidden, run(undisturbed, tree))
    follow = random_tokens(3, seed=2)
    assert np.array_equal(run(stages, make_batch(follow, 23)), run(undisturbed, make_batch(follow, 23)))


def check_what_stop_raises_comes_out(stage: StageModel) -> None:
    """Of a stage that is the whole model, its cache empty."""

    def stop() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage.evaluate(make_batch([5, 6], 0), stop)
    assert stage.next_position(0) == 0
    run([stage], make_batch([5, 6], 0))


def test_a_gpu_would_be_waited_for_once(model: Path, loaded: Callable[..., list[LlamaStage]]) -> None:
    """Played on a CPU: only the last layer is looked at, and a run is given up before it has begun or not at all."""
    asked = list[int]()

    def stop() -> bool:
        asked.append(len(asked))
        return False

    found = []
    for between in (True, False):
        stages = loaded(model, (2,))
        for stage in stages:
            stage._callback.between = between
        batch, first, last = make_batch(random_tokens(5), 0), *stages
        hidden = first.evaluate(batch, stop)
        assert hidden is not None
        batch.hidden = hidden.copy()
        logits = last.evaluate(batch, stop)
        assert logits is not None
        found.append((batch.hidden, logits.copy(), len(asked)))
        before = state(first, 0)
        assert first.evaluate(make_batch([3], 5), lambda: True) is None and state(first, 0) == before
        assert first.evaluate(make_batch([3], 5), stop) is not None
        asked.clear()
    (*plain, n_plain), (*apart, n_apart) = found
    assert all(np.array_equal(one, other) for one, other in zip(plain, apart, strict=True))
    assert n_plain > 2 == n_apart


def test_what_stop_raises_comes_out(model: Path, loaded: Callable[..., list[LlamaStage]]) -> None:
    (stage,) = loaded(model)
    check_what_stop_raises_comes_out(stage)


# --- limits and errors ----------------------------------------------------------------------------------------------


def test_batches_libllama_would_die_of(model: Path, loaded: Callable[..., list[LlamaStage]]) -> None:
    (stage,) = loaded(model, (), params=LlamaParams(n_cells=256, n_batch=8, n_outputs_max=2))
    with pytest.raises(ValueError, match="9 rows, 1 to 8"):
        stage.evaluate(make_batch([5] * 9, 0), never)
    with pytest.raises(ValueError, match="3 rows want logits, at most 2"):
        stage.evaluate(make_batch([5] * 3, 0), never)
    run([stage], make_batch([5, 6], 0))
    before = state(stage, 0)
    with pytest.raises(RuntimeError, match="failed with -1"):
        stage.evaluate(make_batch([5, 6], 1), never)
    assert state(stage, 0) == before


def test_token_outside_the_vocabulary(model: Path, loaded: Callable[..., list[LlamaStage]]) -> None:
    first, _ = loaded(model, (2,))
    with pytest.raises(ValueError, match="for a vocabulary of 320"):
        first.evaluate(make_batch([320], 0), never)


def test_damaged_weights_say_why(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(model.read_bytes().replace(b"blk.2.ffn_up.weight", b"blk.2.ffn_op.weight"))
    with pytest.raises(UserError, match=r"layers 0-3 of .*bad.gguf cannot be loaded: .*blk.2.ffn_up.weight"):
        load(path)
    with pytest.raises(UserError, match=r"layers 2-3 of .* cannot be loaded: .*blk.0.ffn_up.weight"):
        LlamaStage(open_slice(read_model_info(path), 2, 4), PARAMS)


def test_gpu_layers_need_a_gpu_build(model: Path) -> None:
    from pipeinfer.models.llama import ggml

    if ggml.has_gpu():
        pytest.skip("this build can offload")
    with pytest.raises(UserError, match="no GPU here: -ngl 3"):
        load(model, (), LlamaParams(n_cells=256, n_gpu_layers=3))


PEAK = """
import sys; from pathlib import Path; import numpy as np
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.core.interfaces import Batch
info = read_model_info(sys.argv[1]); first, last = int(sys.argv[2]), int(sys.argv[3])
params = LlamaParams(2048, 64, n_batch=512, n_outputs_max=32, exact=sys.argv[4] == "exact")
cache = Path(sys.argv[5]) if sys.argv[5] else None
stage = LlamaStage(open_slice(info, first, last, cache), params)
for at in (0, 512):
    wanted = np.arange(512) >= 480
    hidden = None if first == 0 else np.full((512, info.n_embd), 0.01, np.float32)
    stage.evaluate(Batch(np.arange(512, dtype=np.int32), np.arange(at, at + 512, dtype=np.int32), [(0,)] * 512,
                         hidden, wanted), lambda: False)
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print((peak - stage.slice_bytes - stage.kv_bytes) // 1000000)
"""


@pytest.fixture(scope="session")
def wide_model(directory: Path) -> Path:
    """150 000 tokens: the tables of 41 MB each outweigh everything else."""
    return write_model(directory / "wide.gguf", Shape(n_layer=3, n_vocab=150_000))


PEAKS = [
    (0, 1, "exact", True, 100),
    (1, 2, "exact", True, 100),
    (2, 3, "exact", True, 150),
    (0, 3, "exact", True, 150),
    (2, 3, "fast", True, 150),
    (2, 3, "exact", False, 150),
]


@pytest.mark.parametrize(("first", "last", "mode", "cached", "limit_mb"), PEAKS)
def test_peak_memory_is_slice_and_cache_and_little_more(
    wide_model: Path, tmp_path: Path, first: int, last: int, mode: str, cached: bool, limit_mb: int
) -> None:
    cache = str(tmp_path) if cached else ""
    command = [sys.executable, "-c", PEAK, str(wide_model), str(first), str(last), mode, cache]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) <= limit_mb


def test_a_gpu_gets_the_cache_types_that_it_has_kernels_for() -> None:
    """Seen on no GPU: that CUDA's attention declines K and V of different types is from its source."""
    assert LlamaParams(256).mixed_cache
    assert not LlamaParams(256, exact=False).mixed_cache
    assert not LlamaParams(256, n_gpu_layers=3).mixed_cache and not LlamaParams(256, n_gpu_layers=-1).mixed_cache
