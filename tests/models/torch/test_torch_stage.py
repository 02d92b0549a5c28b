"""Torch's layers against libllama's, alone and in one chain, and against themselves in every batch and tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest

from pipeinfer.core.blocks import Span
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import UserError
from pipeinfer.job.inspect.pair_report import TEXTS, greedy
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.layers import CacheTypes
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.models.torch.params import TorchParams
from tests.models.test_llama_stage import (
    TreeDriver,
    check_what_stop_raises_comes_out,
    make_batch,
    never,
    random_tokens,
    run,
)
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.gguf_factory import FILE_TYPES, Shape, quantise, write_model

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pipeinfer[torch]'")

from pipeinfer.models.torch.attention import CacheFull  # noqa: E402
from pipeinfer.models.torch.matrices import FEW_ROWS, multiply, to_int8  # noqa: E402
from pipeinfer.models.torch.stage import TorchStage, find_device  # noqa: E402
from pipeinfer.models.torch.weights import Weights  # noqa: E402

FAMILY = {
    "llama": Shape(rope_factors=True),
    "llama-tied": Shape(tied=True),
    "mixtral": Shape(n_expert=4),
    "qwen2": Shape("qwen2"),
    "qwen3": Shape("qwen3"),
    "qwen3moe": Shape("qwen3moe", n_expert=4),
}
MADE = ["BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"]
MADE += ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ3_S", "IQ4_XS"]
SMALL = Shape(n_layer=2, n_embd=128, n_ff=256, peaky=8.0)
LLAMA = LlamaParams(512, n_seq_max=8, n_batch=64, n_outputs_max=64, exact=False, cache=CacheTypes("f32", "f32"))
Opener = Callable[..., list[TorchStage]]


def torch_params(exact: bool = False, dtype: str = "f32", n_threads: int = 1, n_cells: int = 512) -> TorchParams:
    return TorchParams(n_cells, 16, 256, 64, n_threads, "cpu", dtype, exact=exact)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], LlamaStage]]:
    """Opens libllama on a whole model, with keys and values in float32 and nothing rounded: flash attention would round
    queries."""
    monkeypatch.setattr("pipeinfer.models.llama.decoder.FLASH_ATTENTION_AUTO", 0)
    opened: list[LlamaStage] = []

    def open_reference(path: Path) -> LlamaStage:
        info = read_model_info(path)
        opened.append(LlamaStage(open_slice(info, 0, info.n_layer), LLAMA))
        return opened[-1]

    yield open_reference
    for stage in opened:
        stage.close()


def open_chain(path: Path, cuts: Sequence[int] = (), params: TorchParams | None = None) -> list[TorchStage]:
    info = read_model_info(path)
    edges = pairwise([0, *cuts, info.n_layer])
    return [TorchStage(open_slice(info, first, last), params or torch_params()) for first, last in edges]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch")


@pytest.fixture(scope="module")
def small(folder: Path) -> Path:
    return write_model(folder / "small.gguf", SMALL)


def difference(found: FloatArray, expected: FloatArray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def chunks(tokens: Sequence[int]) -> Iterator[Batch]:
    """Of a prompt in two pieces, then single tokens."""
    edges = [0, 20, 33, *range(34, len(tokens) + 1)]
    for first, end in pairwise(edges):
        yield make_batch(tokens[first:end], first)


# --- against libllama -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY)
def test_logits_are_those_of_libllama(folder: Path, reference: Callable[[Path], LlamaStage], name: str) -> None:
    path = write_model(folder / f"{name}.gguf", FAMILY[name], "F32")
    whole, chain = reference(path), open_chain(path, (1, 3))
    for batch in chunks(random_tokens(38)):
        assert difference(run(chain, batch), run([whole], batch)) < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3moe"])
def test_every_tensor_and_key_that_libllama_knows_is_computed(
    folder: Path, reference: Callable[[Path], LlamaStage], name: str
) -> None:
    """Biases wherever there may be one, metadata that means nothing; only what classifies texts is not there."""
    known = replace(MODELS[name], without=("cls.output.weight",))
    path = write_random_model(folder / f"random-{name}.gguf", known, "F32")
    batch = make_batch(random_tokens(30), 0)
    assert difference(run(open_chain(path, (2,)), batch), run([reference(path)], batch)) < 1e-4


@pytest.mark.parametrize("name", FAMILY)
def test_logits_in_bf16_are_nearly_those_of_libllama(
    folder: Path, reference: Callable[[Path], LlamaStage], name: str
) -> None:
    """Of most rows: one whose router is undecided may get another expert."""
    path = write_model(folder / f"{name}-2.gguf", replace(FAMILY[name], n_layer=2), "F32")
    batch = make_batch(random_tokens(33), 0)
    expected = run([reference(path)], batch)
    found = run(open_chain(path, (1,), torch_params(dtype="bf16")), batch)
    assert np.median([difference(*rows) for rows in zip(found, expected, strict=True)]) < 1e-2


@pytest.mark.parametrize("name", FAMILY)
def test_logits_in_int8_are_nearly_those_of_libllama(
    folder: Path, reference: Callable[[Path], LlamaStage], name: str
) -> None:
    path = write_model(folder / f"{name}-8.gguf", replace(FAMILY[name], n_layer=2), "F32")
    batch = make_batch(random_tokens(33), 0)
    expected = run([reference(path)], batch)
    found = run(open_chain(path, (1,), torch_params(dtype="int8")), batch)
    apart = np.median([difference(*rows) for rows in zip(found, expected, strict=True)])
    assert 1e-3 < apart < 5e-2


@pytest.mark.parametrize("n_in", [64, 100, 7])
@pytest.mark.parametrize("n_rows", [1, 7, FEW_ROWS, FEW_ROWS + 1])
def test_int8_multiplies_with_the_nearest_of_255_numbers_a_row(
    monkeypatch: pytest.MonkeyPatch, n_rows: int, n_in: int
) -> None:
    monkeypatch.setattr("pipeinfer.models.torch.matrices.PIECE", n_in * 10)
    generator = torch.Generator().manual_seed(n_rows)
    matrix = torch.randn((33, n_in), generator=generator) * torch.logspace(-6, 6, 33)[:, None]
    matrix[5] = 0.0
    kept, rows = to_int8(matrix), torch.randn((n_rows, n_in), generator=generator).bfloat16()
    again = kept.values.float() * kept.scales.float()[:, None]
    assert ((again - matrix).abs() <= matrix.abs().amax(1)[:, None] / 250).all()
    assert not kept.values[5].any() and int(kept.values.abs().max()) == 127
    sizes = again.norm(dim=1).clamp_min(1e-30)  # so that every row of the matrix counts
    found, expected = multiply(rows.float(), kept) / sizes, rows.float() @ again.T / sizes
    assert difference(found.numpy(), expected.numpy()) < 4e-3


@pytest.fixture(scope="module")
def in_f32(folder: Path) -> Path:
    return write_model(folder / "weights.gguf", Shape(n_layer=2), "F32")


@pytest.mark.parametrize("type_name", [*MADE, *FILE_TYPES])
def test_weights_are_what_their_quantisation_says(folder: Path, in_f32: Path, type_name: str) -> None:
    path = folder / f"weights-{type_name}.gguf"
    quantise(in_f32, path, type_name)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = Weights(open_slice(read_model_info(path), 1, 2), "f32", torch.device("cpu"))
    for name in ("attn_q", "attn_v", "ffn_down"):
        source = read[f"blk.1.{name}.weight"]
        expected, found = (
            gguf.quants.dequantize(source.data, source.tensor_type),
            weights.matrix(f"blk.0.{name}.weight"),
        )
        assert isinstance(found, torch.Tensor)
        assert np.array_equal(found.numpy(), expected), (name, source.tensor_type)


def mixed(path: Path, kinds: str, llama: type[LlamaStage]) -> list[TorchStage | LlamaStage]:
    """A chain of torch's (t) and libllama's (l) stages of one layer each, the last with the rest."""
    info = read_model_info(path)
    edges = [*range(len(kinds)), info.n_layer]
    return [
        TorchStage(open_slice(info, first, last), torch_params())
        if kind == "t"
        else llama(open_slice(info, first, last), LLAMA)
        for kind, (first, last) in zip(kinds, pairwise(edges), strict=True)
    ]


CHAINS = ["tl", "lt", "tlt", "ltl", "lttl", "tllt"]


@pytest.mark.parametrize(
    ("name", "kinds"), [(name, CHAINS[(at + step) % len(CHAINS)]) for at, name in enumerate(FAMILY) for step in (0, 3)]
)
def test_chains_in_float32(folder: Path, reference: Callable[[Path], LlamaStage], name: str, kinds: str) -> None:
    path = write_model(folder / f"chain-{name}.gguf", FAMILY[name], "F32")
    whole, chain = reference(path), mixed(path, kinds, LlamaStage)
    for batch in chunks(random_tokens(36)):
        assert difference(run(chain, batch), run([whole], batch)) < 1e-4
    for stage in chain:
        stage.close()


@pytest.mark.parametrize(
    ("kinds", "type_name"), [("tl", "Q8_0"), ("lt", "Q4_K_M"), ("tlt", "Q4_K_M"), ("lttl", "Q8_0")]
)
def test_torch_and_libllama_in_one_chain(folder: Path, kinds: str, type_name: str) -> None:
    """Any order of the two computes the model, up to what libllama rounds its rows to before it multiplies them."""
    path = folder / f"chain-{type_name}.gguf"
    if not path.exists():
        write_model(path, type_name=type_name)
    info = read_model_info(path)
    chain = mixed(path, kinds, LlamaStage)
    whole = LlamaStage(open_slice(info, 0, info.n_layer), LLAMA)
    for batch in chunks(random_tokens(36)):
        assert difference(run(chain, batch), run([whole], batch)) < 0.05
    for stage in (*chain, whole):
        stage.close()


@pytest.mark.parametrize("shipped", [TARGET, DRAFT], ids=["target", "draft"])
def test_greedy_text_of_the_shipped_pair(folder: Path, reference: Callable[[Path], LlamaStage], shipped: Path) -> None:
    """200 tokens of two texts, of libllama with the weights in float32, and of torch with those that are shipped."""
    plain, tokenizer = folder / "plain.gguf", Tokenizer(shipped)
    quantise(shipped, plain, "F32")
    whole, (stage,) = reference(plain), open_chain(shipped)
    for text in TEXTS[:2]:
        prompt = tokenizer.encode(text)
        assert greedy(stage, prompt, 200) == greedy(whole, prompt, 200)
    tokenizer.close()


# --- exact numerics ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["f32", "bf16", "int8", "int4"])
def plain(request: pytest.FixtureRequest, small: Path) -> tuple[str, list[int], FloatArray]:
    """Some hundred random tokens and the logits after each, evaluated one row at a time."""
    (stage,) = open_chain(small, (), torch_params(True, request.param))
    tokens = random_tokens(240)
    return (
        request.param,
        tokens,
        np.array([run([stage], make_batch([token], at))[0] for at, token in enumerate(tokens)]),
    )


@pytest.mark.parametrize("n_threads", [1, 2])
def test_rows_are_the_same_in_every_batch(
    small: Path, plain: tuple[str, list[int], FloatArray], n_threads: int
) -> None:
    dtype, tokens, expected = plain
    chain = open_chain(small, (1,), torch_params(True, dtype, n_threads))
    at = 0
    for n in (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64):
        assert np.array_equal(run(chain, make_batch(tokens[at : at + n], at)), expected[at : at + n]), n
        at += n


def test_trees_are_the_same_as_plain_decoding(small: Path, plain: tuple[str, list[int], FloatArray]) -> None:
    dtype, tokens, expected = plain
    driver = TreeDriver(open_chain(small, (1,), torch_params(True, dtype, 2)), tokens, expected, seed=1)
    driver.prefill(150)
    while driver.at < 230:
        driver.step()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("block", [32, 256])
def test_on_a_device_rows_are_the_same_in_every_run(
    small: Path, dtype: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed there, on the CPU: runs that are filled up, and attention by blocks."""
    monkeypatch.setattr("pipeinfer.models.torch.attention.BLOCK", block)
    params, tokens = replace(torch_params(True, dtype, n_cells=600), padded=True), random_tokens(330)
    (one,), (by_row,) = open_chain(small, (), params), open_chain(small, (), replace(params, padded=False))
    expected = np.array([run([one], make_batch([token], at))[0] for at, token in enumerate(tokens)])
    wanted = np.array([run([by_row], make_batch([token], at))[0] for at, token in enumerate(tokens)])
    assert difference(expected, wanted) < {"f32": 1e-5, "bf16": 1e-2, "int8": 2e-2}[dtype]
    chain, at = open_chain(small, (1,), params), 0
    for n in (1, 2, 3, 5, 8, 9, 16, 33, 64, 65, 100):
        batch = make_batch(tokens[at : at + n], at, None, [index >= n - 64 for index in range(n)])
        assert np.array_equal(run(chain, batch), expected[at : at + n][-64:]), n
        at += n
    driver = TreeDriver(open_chain(small, (1,), params), tokens, expected, seed=2)
    driver.prefill(240)
    while driver.at < 310:
        driver.step()
    if block == 256:
        frames = chain[0]._replays._frames  # type: ignore[union-attr]
        assert {(1, 256), (16, 256), (64, 256)} <= set(frames) and 128 not in {rows for rows, _ in frames}


@pytest.mark.parametrize("name", ["qwen3moe", "qwen2"])
def test_on_a_device_rows_of_experts_are_the_same_in_every_run(folder: Path, name: str) -> None:
    path = write_model(folder / f"device-{name}.gguf", replace(FAMILY[name], n_layer=2, n_embd=128, n_ff=256))
    params = replace(torch_params(True), padded=True)
    one, other = open_chain(path, (), params), open_chain(path, (1,), params)
    tokens = random_tokens(60)
    alone = np.array([run(one, make_batch([token], at))[0] for at, token in enumerate(tokens)])
    for first, end in ((0, 3), (3, 36), (36, 60)):
        assert np.array_equal(run(other, make_batch(tokens[first:end], first)), alone[first:end])


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe", "qwen2"])
def test_rows_of_experts_and_biases_are_the_same_in_every_batch(folder: Path, name: str) -> None:
    path = write_model(folder / f"exact-{name}.gguf", replace(FAMILY[name], n_layer=2, n_embd=128, n_ff=256))
    one, other = open_chain(path, (), torch_params(True)), open_chain(path, (1,), torch_params(True, n_threads=2))
    tokens = random_tokens(60)
    alone = np.array([run(one, make_batch([token], at))[0] for at, token in enumerate(tokens)])
    for first, end in ((0, 3), (3, 36), (36, 60)):
        assert np.array_equal(run(other, make_batch(tokens[first:end], first)), alone[first:end])


@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_a_prompt_in_blocks_is_the_same_however_it_is_cut(small: Path, dtype: str) -> None:
    """In one batch or block by block, in an empty cache or beside others, on one core or two: the row after it has one
    result."""
    prompt, span, found = random_tokens(200), Span(0, 199), []
    for n_threads in (1, 2):
        (stage,) = open_chain(small, (), torch_params(True, dtype, n_threads, 900))
        for seq, edges in enumerate(([0, 199], [0, 64, 199], [0, 128, 199], [0, 64, 128, 199])):
            for first, end in pairwise(edges):
                block = in_sequence(seq, make_batch(prompt[first:end], first, None, [False] * (end - first)))
                block.span = span
                run([stage], block)
            found.append(run([stage], in_sequence(seq, make_batch(prompt[199:], 199))))
            stage.apply([KvOp(OpKind.REMOVE, seq, first=100)])
    assert all(np.array_equal(each, found[0]) for each in found)


def test_blocks_behind_those_of_another_request_are_the_same(small: Path) -> None:
    prompt = random_tokens(200)
    (stage,) = open_chain(small, (), torch_params(True, n_cells=600))

    def read(seq: int, first: int, tokens: Sequence[int]) -> None:
        block = in_sequence(seq, make_batch(tokens[first:], first, None, [False] * (len(tokens) - first)))
        block.span = Span(0, len(tokens))
        run([stage], block)

    read(0, 0, prompt[:199])
    read(1, 0, [*prompt[:128], *random_tokens(90, seed=2)])
    stage.apply([KvOp(OpKind.COPY, 1, 2, 0, 128)])
    read(2, 128, prompt[:199])
    stage.apply([KvOp(OpKind.SHARED, 1, 2, 0, 128), KvOp(OpKind.COMPACT, 0), KvOp(OpKind.REMOVE, 1)])
    alone, shared = (run([stage], in_sequence(seq, make_batch(prompt[199:], 199))) for seq in (0, 2))
    assert np.array_equal(alone, shared)


def in_sequence(seq: int, batch: Batch) -> Batch:
    batch.seqs = [(seq,)] * len(batch.tokens)
    return batch


def test_rows_of_many_requests_are_as_those_of_each_alone(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence over its own cells, where all cells would be many: as under one mask, and as alone."""
    texts, found = [random_tokens(50, seed) for seed in range(5)], []
    for sparse in (2.0, 1e9):
        monkeypatch.setattr("pipeinfer.models.torch.attention.SPARSE", sparse)
        (stage,) = open_chain(small)
        for first, end in ((0, 30), (30, 31), (31, 39)):
            rows = [(seq, at) for seq in range(len(texts)) for at in range(first, end)]
            rows.sort(key=lambda row: (row[1], -row[0]))  # requests in turns
            batch = Batch(
                np.array([texts[seq][at] for seq, at in rows], np.int32),
                np.array([at for _, at in rows], np.int32),
                [(seq,) for seq, _ in rows],
                None,
                np.full(len(rows), first > 0),
            )
            logits = run([stage], batch)
        found.append(logits)
    assert difference(found[0], found[1]) < 1e-5
    alone = open_chain(small)
    run(alone, make_batch(texts[2][:31], 0))
    assert difference(found[0][2::5], run(alone, make_batch(texts[2][31:39], 31))) < 1e-5


# --- runs of a few sizes ----------------------------------------------------------------------------------------------


def test_filled_up_runs_compute_the_same(small: Path) -> None:
    """Trees, branches and chunks in frames of a few sizes: what fills them up changes no row and no cell."""
    params = torch_params(n_cells=300)
    plain, filled = open_chain(small, (1,), params), open_chain(small, (1,), replace(params, padded=True))
    tokens, rng, at = random_tokens(300), np.random.default_rng(4), 0
    for _ in range(40):
        n, copied = int(rng.integers(1, 12)), int(rng.integers(0, 2))
        batch = make_batch(tokens[at : at + n], at)
        if copied and at:
            batch = Batch(
                np.append(batch.tokens, 7),
                np.append(batch.positions, at).astype(np.int32),
                [*batch.seqs, (1,)],
                None,
                np.ones(n + 1, bool),
            )
        for stage in (*plain, *filled):
            stage.apply([KvOp(OpKind.REMOVE, 1), KvOp(OpKind.COPY, 0, 1, 0, at)])
        expected = run(plain, batch)
        assert difference(run(filled, batch), expected) < 1e-5
        at += n
    frames = filled[0]._replays._frames  # type: ignore[union-attr]
    assert at > 200 and set(frames) <= {(rows, cells) for rows in (1, 2, 4, 8, 16) for cells in (256, 300)}
    assert filled[0].evaluate(make_batch([5], at), lambda: True) is None and filled[0].next_position(0) == at


# --- the cache, stopping, errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
def test_stopping_leaves_the_cache_as_before(small: Path, exact: bool) -> None:
    stages, undisturbed = (open_chain(small, (1,), torch_params(exact)) for _ in range(2))
    for chain in (stages, undisturbed):
        run(chain, make_batch(random_tokens(20), 0))
        for stage in chain:
            stage.apply([KvOp(OpKind.COPY, 0, 1)])
    guesses, hidden = random_tokens(5, seed=1), None
    for stage in stages:
        tree = Batch(
            np.array(guesses, np.int32),
            np.array([20, 21, 21, 22, 22], np.int32),
            [(0, 1), (0,), (1,), (0,), (1,)],
            hidden,
            np.ones(5, bool),
        )
        if stage.is_last:
            assert stage.evaluate(tree, lambda: True) is None
        n_asked = 0

        def stop() -> bool:
            nonlocal n_asked
            n_asked += 1
            return False

        hidden = stage.evaluate(tree, stop)
        assert hidden is not None and n_asked == int(stage.is_last)  # not where the slice's result is then there
    tree.hidden = None
    assert hidden is not None and np.array_equal(hidden, run(undisturbed, tree))


def test_what_stop_raises_comes_out(small: Path) -> None:
    (stage,) = open_chain(small)
    check_what_stop_raises_comes_out(stage)


def test_cells_are_free_as_soon_as_no_sequence_has_them(small: Path) -> None:
    (stage,) = open_chain(small, (), torch_params(True, n_cells=64))
    tokens = random_tokens(60)
    expected = run([stage], make_batch(tokens, 0))
    with pytest.raises(CacheFull, match="no room for 5 rows in the KV cache of 64 cells"):
        stage.evaluate(make_batch([5] * 5, 60), never)
    stage.apply([KvOp(OpKind.COPY, 0, 1, 0, 30), KvOp(OpKind.REMOVE, 0), KvOp(OpKind.COMPACT, 0)])
    assert (stage.next_position(0), stage.next_position(1)) == (0, 30)
    again = in_sequence(1, make_batch(tokens[30:], 30))
    assert np.array_equal(run([stage], again), expected[30:])
    stage.clear()
    assert np.array_equal(run([stage], make_batch(tokens, 0)), expected)


def test_batches_that_cannot_be(small: Path) -> None:
    (stage,) = open_chain(small, (), TorchParams(64, 4, 8, 2, device="cpu"))
    with pytest.raises(ValueError, match="9 rows, 1 to 8"):
        stage.evaluate(make_batch([5] * 9, 0), never)
    with pytest.raises(ValueError, match="3 rows want logits, at most 2"):
        stage.evaluate(make_batch([5] * 3, 0), never)
    with pytest.raises(ValueError, match="position 1 of sequence 0, which ends at 0"):
        stage.evaluate(make_batch([5], 1), never)
    run([stage], make_batch([5, 6], 0))


def test_models_that_torch_does_not_compute(folder: Path) -> None:
    path = write_model(folder / "phi3.gguf", Shape("phi3", rope_factors=True))
    with pytest.raises(UserError, match="phi3 model; --backend torch computes llama, qwen2"):
        open_chain(path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"--backend torch:cuda:1: torch .* sees no GPU here"):
        find_device("cuda:1", 0)
    assert find_device("auto", 3).type == "cpu"
