"""Exact numerics with rows in whole groups: what kernels are found to do, and rows of requests, trees and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeinfer.core.blocks import Span
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.types import FloatArray
from pipeinfer.disk_cache import DiskCache
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.llama import repacking
from pipeinfer.models.llama.decoder import KvCacheFull
from pipeinfer.models.llama.params import (
    GROUP,
    MANY,
    TILED_ROWS,
    LlamaParams,
    TypeRows,
    in_whole_groups,
    largest_part,
    matrix_bytes,
    types_in_groups,
    worth_repacking,
)
from pipeinfer.models.llama.repacking import N_GROUPS, N_OUT, Kernels, grouped_types, repacked_types
from pipeinfer.models.llama.rows import pad_to_groups
from pipeinfer.models.llama.stage import LlamaStage
from tests.models.test_llama_stage import TreeDriver, load, loaded, make_batch, never, random_tokens, run  # noqa: F401
from tests.support.cases import in_long
from tests.support.gguf_factory import Shape, write_model

F16, Q4_K = 1, 12
N_TOKENS, N_REQUESTS = 40, 12
TYPES = ["Q4_K_M", "Q2_K", "Q6_K", "F16"]
PARTS = tuple(TypeRows(type, n_rows) for type, n_rows, _ in repacked_types())
Load = Callable[..., list[LlamaStage]]


def params_of(path: Path, n_threads: int = 1, group: int = GROUP, **changes: Any) -> LlamaParams:
    types = matrix_bytes(read_model_info(path)).keys()
    if not {(type, group) for type in types} <= {each[:2] for each in grouped_types()}:
        pytest.skip("this libggml gives rows other bits in other groups")
    repacked = tuple(TypeRows(type, group, True) for type in sorted(types))
    params = LlamaParams(1024, 32, n_batch=64, n_outputs_max=64, n_threads=n_threads, repacked=repacked)
    return replace(params, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("groups")


def model(folder: Path, type_name: str) -> Path:
    path = folder / f"{type_name}.gguf"
    return path if path.exists() else write_model(path, Shape(n_layer=3, peaky=8.0), type_name)


# -- kernels


class OtherIn(Kernels):
    """The bits of a row depend on `what`: its place in a group, the number of groups, its neighbours, or threads."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def _multiply(self, matrix: int, rows: FloatArray, n_threads: int) -> FloatArray:
        out = np.repeat(rows[:, :1], N_OUT, axis=1)
        changes = {
            "nothing": 0.0,
            "place": np.arange(len(rows)) % TILED_ROWS == 1,
            "size": len(rows) == 5 * TILED_ROWS,
            "neighbours": np.roll(rows[:, 0], 1) > rows[:, 0],
            "threads": n_threads > 1,
        }
        return out + np.broadcast_to(changes[self.what], len(rows))[:, None].astype(np.float32)


@pytest.mark.parametrize("what", ["nothing", "place", "size", "neighbours", "threads"])
def test_rows_of_a_type_must_have_the_same_bits_in_all_groups(what: str) -> None:
    rows = np.random.default_rng(0).standard_normal((N_GROUPS[-1] * TILED_ROWS, 4), np.float32)
    assert (OtherIn(what)._check_groups(TILED_ROWS, 0, rows) is not None) == (what == "nothing")


def test_what_was_found_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repacking, "user_cache", lambda: DiskCache(tmp_path))
    find: Any = grouped_types.__wrapped__
    found = find()
    assert found == grouped_types() and {each.type for each in found} >= {0, 8}
    monkeypatch.setattr(Kernels, "check_groups", lambda *_: pytest.fail("it was multiplied again"))
    assert find() == found


# -- batches


@pytest.mark.parametrize("group", [GROUP, TILED_ROWS])
@pytest.mark.parametrize(("n_rows", "n_wanted"), [(1, 1), (1, 0), (3, 1), (4, 4), (5, 4), (7, 2), (8, 3), (16, 16)])
def test_batches_and_wanted_rows_are_filled_up(n_rows: int, n_wanted: int, group: int) -> None:
    rng = np.random.default_rng(n_rows)
    batch, hidden = make_batch(random_tokens(n_rows), 5), rng.standard_normal((n_rows, 6), np.float32)
    wanted = rng.permutation(np.arange(n_rows) < n_wanted)
    filled = pad_to_groups(batch, hidden, wanted, 9, group)
    assert filled.hidden is not None and filled.wanted is not None
    n_filled = len(filled.batch.positions)
    assert n_filled == in_whole_groups(n_rows, group) == n_rows + filled.n_added
    assert n_filled == len(filled.hidden) == len(filled.wanted)
    assert np.count_nonzero(filled.wanted) == in_whole_groups(n_wanted, group)
    assert filled.batch.seqs == [(0,)] * n_rows + [(9,)] * filled.n_added
    assert filled.batch.positions[n_rows:].tolist() == list(range(filled.n_added))
    assert np.array_equal(filled.batch.tokens[:n_rows], batch.tokens)
    assert np.array_equal(np.flatnonzero(filled.wanted)[filled.logits], np.flatnonzero(wanted)), "logits go to others"


# -- rows


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return [random_tokens(N_TOKENS, seed) for seed in range(N_REQUESTS)]


def each_alone(stage: LlamaStage, texts: list[list[int]]) -> list[FloatArray]:
    """The logits after each token of each text, row by row, in an empty cache."""
    found = []
    for tokens in texts:
        stage.clear()
        found.append(np.array([run([stage], make_batch([token], at))[0] for at, token in enumerate(tokens)]))
    return found


class Requests:
    """Rows of many requests, a random number of each at a time, of which a random number want logits; some rows are
    wrong, and removed, and some evaluations are stopped between layers and made again."""

    def __init__(self, stages: list[LlamaStage], texts: list[list[int]], expected: list[FloatArray], seed: int) -> None:
        self.stages, self.texts, self.expected = stages, texts, expected
        self.rng = np.random.default_rng(seed)
        self.at, self.n_batches, self.n_stopped, self.n_used = [0] * len(texts), 0, 0, 0

    def apply(self, *ops: KvOp) -> None:
        for stage in self.stages:
            stage.apply(ops)

    def batch(self) -> tuple[Batch, list[tuple[int, int]]]:
        """Rows and, of each, its request and position; a position of -1 is a wrong guess."""
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[tuple[int, int]] = []
        most = int(self.rng.integers(1, 5))
        for seq in self.rng.permutation(len(self.texts))[: self.rng.integers(1, len(self.texts) + 1)].tolist():
            right = self.texts[seq][self.at[seq] :][: self.rng.integers(0, most)]
            wrong = random_tokens(int(self.rng.integers(0, 2)), seed=len(tokens))
            tokens += [*right, *wrong]
            positions += range(self.at[seq], self.at[seq] + len(right) + len(wrong))
            rows += [(seq, self.at[seq] + at) for at in range(len(right))] + [(seq, -1)] * len(wrong)
        seqs: list[tuple[int, ...]] = [(seq,) for seq, _ in rows]
        wanted = self.rng.random(len(rows)) < self.rng.choice([0.3, 1.0])
        return Batch(np.array(tokens, np.int32), np.array(positions, np.int32), seqs, None, wanted), rows

    def step(self) -> None:
        batch, rows = self.batch()
        if not rows:
            return
        if self.rng.random() < 0.1:
            before = [self.stages[0].next_position(seq) for seq in range(len(self.texts))]
            assert self.stages[0].evaluate(batch, lambda: True) is None
            assert before == [self.stages[0].next_position(seq) for seq in range(len(self.texts))]
            self.n_stopped += 1
        wanted = [row for row, is_wanted in zip(rows, batch.wanted, strict=True) if is_wanted]
        logits = run(self.stages, batch)
        assert len(logits) == len(wanted)
        for found, (seq, at) in zip(logits, wanted, strict=True):
            assert at < 0 or np.array_equal(found, self.expected[seq][at]), (seq, at, rows)
        for seq, at in rows:
            self.at[seq] = max(self.at[seq], at + 1)
        self.n_batches, self.n_used = self.n_batches + 1, self.n_used + len(rows)
        self.apply(*(KvOp(OpKind.REMOVE, seq, first=self.at[seq]) for seq in {seq for seq, _ in rows}))
        for seq in [seq for seq, at in enumerate(self.at) if at == N_TOKENS]:
            self.apply(KvOp(OpKind.REMOVE, seq))  # and the same text again
            self.at[seq] = 0
        if self.n_used > self.stages[0].n_cells - 96:
            self.apply(KvOp(OpKind.COMPACT, 0))
            self.n_used = sum(self.at)


@pytest.mark.parametrize(("n_threads", "group"), [(1, GROUP), in_long(2, GROUP), (2, TILED_ROWS)])
@pytest.mark.parametrize("type_name", TYPES)
def test_rows_are_the_same_in_every_batch_tree_and_slice(
    folder: Path,
    loaded: Load,  # noqa: F811
    texts: list[list[int]],
    type_name: str,
    n_threads: int,
    group: int,
) -> None:
    path = model(folder, type_name)
    params = params_of(path, n_threads, group)
    (alone,) = loaded(path, (), params=replace(params, n_threads=1))
    expected = each_alone(alone, texts)
    for cuts in ((), (2,)):
        requests = Requests(loaded(path, cuts, params=params), texts, expected, seed=n_threads)
        while requests.n_batches < 300:
            requests.step()
        assert requests.n_stopped > 5
    tokens = random_tokens(260)
    (rows,) = each_alone(alone, [tokens])
    driver = TreeDriver(loaded(path, (1,), params=replace(params, n_cells=256)), tokens, rows, seed=n_threads)
    driver.prefill(100)
    while driver.at < 200:
        driver.step()
    assert driver.n_compactions


@pytest.mark.parametrize("type_name", ["Q4_K_M", "F16"])
def test_the_bits_are_others_than_those_of_parts(
    folder: Path,
    loaded: Load,  # noqa: F811
    texts: list[list[int]],
    type_name: str,
) -> None:
    path = model(folder, type_name)
    groups = params_of(path)
    if type_name == "Q4_K_M" and not {each.type for each in PARTS} & matrix_bytes(read_model_info(path)).keys():
        pytest.skip("this libggml repacks nothing of the model")
    parts = replace(groups, repacked=worth_repacking(read_model_info(path), groups, PARTS))
    if largest_part(read_model_info(path), parts) >= GROUP:
        pytest.skip("kernels do not look at the number of rows")
    first, second = (each_alone(loaded(path, (), params=each)[0], texts[:1])[0] for each in (groups, parts))
    assert not np.array_equal(first, second), "rows did not come in groups"


def test_a_full_cache_is_left_as_it_was(folder: Path, loaded: Load) -> None:  # noqa: F811
    path = model(folder, "Q4_K_M")
    (stage,) = loaded(path, (), params=params_of(path, n_cells=256))
    tokens = random_tokens(512)
    rows = [run([stage], make_batch(tokens[at : at + 1], at))[0] for at in range(stage.n_cells - 1)]
    assert stage.n_cells == 256 and len(rows) == 255, "all planned cells are for rows of texts"
    run([stage], make_batch(tokens[255:256], 255))
    for at in range(256, 512, 64):
        run([stage], make_batch(tokens[at : at + 64], at))
    with pytest.raises(KvCacheFull):
        stage.evaluate(make_batch([5], 512), never)
    assert stage.next_position(0) == 512 and stage.next_position(stage.params.n_seq_max) == 0
    stage.apply([KvOp(OpKind.REMOVE, 0, first=200), KvOp(OpKind.COMPACT, 0)])
    assert np.array_equal(run([stage], make_batch(tokens[200:231], 200)), rows[200:231])


def test_outputs_of_layers_are_the_same_in_every_batch(folder: Path, loaded: Load) -> None:  # noqa: F811
    path, tokens = model(folder, "Q4_K_M"), random_tokens(30)
    (stage,) = loaded(path, (), params=params_of(path, taps=(0, 1)))
    alone = []
    for at, token in enumerate(tokens):
        run([stage], make_batch([token], at))
        alone.append(stage.features.copy())
    stage.clear()
    run([stage], make_batch(tokens, 0))
    assert stage.features.shape[1] == 30 and np.array_equal(stage.features, np.concatenate(alone, axis=1))


# -- prompts


def read_blocks(stages: list[LlamaStage], tokens: list[int], seq: int, chunk: int = 64) -> Iterator[FloatArray]:
    """What comes out of the first slice, a chunk of whole blocks at a time."""
    span, at = Span(0, len(tokens)), 0
    while at < span.end:
        end = span.chunk_end(at, chunk)
        positions, n = np.arange(at, end, dtype=np.int32), end - at
        batch = Batch(np.array(tokens[at:end], np.int32), positions, [(seq,)] * n, None, np.zeros(n, np.bool_), span)
        first = run(stages[:1], batch)
        batch.hidden = first
        if len(stages) > 1:
            run(stages[1:], batch)
        yield first
        at = end


@pytest.mark.parametrize("type_name", ["Q4_K_M", "Q6_K"])
def test_prompts_in_blocks_have_the_bits_that_they_have_without_groups(
    folder: Path,
    loaded: Load,  # noqa: F811
    type_name: str,
) -> None:
    """With rows of others in groups between the blocks, before which tiled kernels were kept from the weights."""
    path, prompt = model(folder, type_name), random_tokens(64 + 64 + 71, seed=3)
    params = params_of(path, n_batch=256)
    parts = replace(params, repacked=worth_repacking(read_model_info(path), params, PARTS))
    rows = list(read_blocks(loaded(path, (1,), params=parts), prompt, 0))
    stages, at = loaded(path, (1,), params=params), 0
    found = []
    for each in read_blocks(stages, prompt, 0):
        found.append(each)
        batch = make_batch(random_tokens(9, seed=at), at)
        batch.seqs = [(3,)] * 9
        run(stages, batch)
        at += 9
    assert np.array_equal(np.concatenate(found), np.concatenate(rows))
    after = run(stages, make_batch([7], len(prompt)))
    other = loaded(path, (), params=params)
    for _ in read_blocks(other, prompt, 0, chunk=256):
        pass
    assert np.array_equal(run(other, make_batch([7, 8, 9], len(prompt)))[:1], after)


# -- which models


def info_of(folder: Path, type_name: str, **shape: Any) -> ModelInfo:
    return read_model_info(write_model(folder / f"{type_name}-{len(shape)}.gguf", Shape(n_layer=2, **shape), type_name))


def test_groups_are_for_many_requests_where_parts_are_small(tmp_path: Path) -> None:
    info = info_of(tmp_path, "Q4_K_M")
    types, three = matrix_bytes(info).keys(), (TypeRows(Q4_K, 3),)
    expected = tuple(TypeRows(type, GROUP, True) for type in sorted(types))

    def groups(info: ModelInfo, in_parts: tuple[TypeRows, ...], types: Iterable[int], n: int) -> tuple[TypeRows, ...]:
        return types_in_groups(info, in_parts, [Q4_K], [(type, GROUP) for type in types], n)

    assert len(expected) > 1 and groups(info, three, types, MANY) == expected
    assert groups(info, three, types, MANY - 1) == ()
    assert groups(info, three, types - {Q4_K}, MANY) == (), "rows of one type have other bits in other groups"
    assert groups(info, (TypeRows(Q4_K, 7),), types, MANY) == (), "parts are larger than groups"
    half = info_of(tmp_path, "F16")
    assert groups(half, (), {0, F16}, MANY), "rows come one by one"
    experts = info_of(tmp_path, "Q4_K_M", arch="qwen3moe", n_expert=4)
    assert groups(experts, three, {*range(40)}, MANY) == (), "rows of an expert are as many as chose it"
