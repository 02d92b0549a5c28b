"""LoRA adapters: slices against the whole model, rows against single ones, bit for bit; files that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pipeinfer.core.types import FloatArray
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.adapter import ScaledAdapter, check_exact, check_fits, check_order, digest_of, read_adapter
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import GROUP, LlamaParams, TypeRows, matrix_bytes
from pipeinfer.models.llama.repacking import grouped_types, repacked_types
from pipeinfer.models.llama.stage import LlamaStage
from tests.job.run.test_prompts import after, read, tokens_of
from tests.models.test_llama_stage import TreeDriver, exact_params, make_batch, random_tokens, run
from tests.support.adapters import write_adapter
from tests.support.gguf_factory import Shape, write_model

N_TOKENS = 240
Adapters = Sequence[tuple[Path, float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_model(folder / "model.gguf", Shape(n_layer=4, peaky=8.0), "Q4_0")


class Chains:
    """Stages with adapters, closed at the end of the test."""

    def __init__(self) -> None:
        self.opened: list[LlamaStage] = []

    def __call__(
        self, path: Path, adapters: Adapters, cuts: Sequence[int] = (), params: LlamaParams | None = None
    ) -> list[LlamaStage]:
        info, whole = read_model_info(path), [(read_adapter(each), scale) for each, scale in adapters]
        chain = []
        for first, last in pairwise([0, *cuts, info.n_layer]):
            slices = [ScaledAdapter(each.cut(first, last, info.n_layer), scale) for each, scale in whole]
            chain.append(LlamaStage(open_slice(info, first, last), params or exact_params(1), slices))
        self.opened += chain
        return chain


@pytest.fixture
def load() -> Iterator[Chains]:
    chains = Chains()
    yield chains
    for stage in chains.opened:
        stage.close()


def singles(chain: Sequence[Any], tokens: Sequence[int]) -> FloatArray:
    return np.array([run(chain, make_batch([token], at))[0] for at, token in enumerate(tokens)])


def check_rows(load: Chains, path: Path, adapters: Adapters, params: LlamaParams) -> None:
    """Rows of trees and batches, over two stages and with two threads, have the bits of rows alone in the whole."""
    tokens = random_tokens(N_TOKENS)
    alone = load(path, adapters, (), replace(params, n_threads=1))
    expected = singles(alone, tokens)
    driver = TreeDriver(load(path, adapters, (2,), replace(params, n_threads=2)), tokens, expected, seed=1)
    driver.prefill(100)
    while driver.at < N_TOKENS - 10:
        driver.step()
    (stage,) = load(path, adapters, (), replace(params, n_threads=2))
    at, n = 0, 1
    while at + n < N_TOKENS:
        assert np.array_equal(run([stage], make_batch(tokens[at : at + n], at)), expected[at : at + n]), n
        at, n = at + n, n % 40 + 3


@pytest.mark.parametrize(
    ("kind", "rank"), [("F16", 1), ("F16", 64), ("F32", 8), ("BF16", 16), ("Q8_0", 1), ("Q8_0", 64)]
)
def test_rows_have_the_same_bits_in_every_batch(load: Chains, folder: Path, model: Path, kind: str, rank: int) -> None:
    adapter = write_adapter(folder / f"{kind}-{rank}.gguf", model, rank, kind)
    check_rows(load, model, [(adapter, 0.7)], exact_params(1))


def test_so_have_those_of_ranks_that_differ_and_of_two_adapters(load: Chains, folder: Path, model: Path) -> None:
    mixed = write_adapter(folder / "mixed.gguf", model, 8, ranks={"attn_q": 16, "ffn_up": 3})
    check_rows(load, model, [(mixed, -0.5)], exact_params(1))
    second = write_adapter(folder / "second.gguf", model, 4, "F32", seed=1)
    check_rows(load, model, [(write_adapter(folder / "first.gguf", model, 8), 1.0), (second, 0.5)], exact_params(1))


@pytest.mark.parametrize(("arch", "n_expert"), [("qwen3moe", 4), ("phi3", 0)])
def test_so_have_those_of_experts_and_joined_matrices(load: Chains, folder: Path, arch: str, n_expert: int) -> None:
    path = write_model(folder / f"{arch}.gguf", Shape(arch, n_layer=4, n_expert=n_expert), "Q8_0")
    names = ("attn_q", "attn_qkv", "attn_output", "ffn_up", "ffn_up_exps", "ffn_down_exps", "ffn_gate_inp")
    adapter = write_adapter(folder / f"{arch}-lora.gguf", path, 8, "F16", names=names)
    check_rows(load, path, [(adapter, 1.0)], exact_params(1))


@pytest.mark.parametrize("in_groups", [False, True])
def test_so_have_those_of_repacked_weights(load: Chains, folder: Path, in_groups: bool) -> None:
    path = write_model(folder / f"repacked-{in_groups}.gguf", Shape(n_layer=4, peaky=8.0), "Q4_K_M")
    types = matrix_bytes(read_model_info(path)).keys()
    repacked = tuple(TypeRows(type, n_rows) for type, n_rows, _ in repacked_types() if type in types)
    if in_groups:
        repacked = tuple(TypeRows(type, GROUP, True) for type in sorted(types))
    lacks = types - {each.type for each in grouped_types()} if in_groups else set()
    if not repacked or lacks:
        pytest.skip("this libggml does not repack the model, or rows of groups differ")
    adapter = write_adapter(folder / f"repacked-{in_groups}-lora.gguf", path, 8)
    check_rows(load, path, [(adapter, 1.0)], replace(exact_params(1), repacked=repacked))


def test_chunks_and_splits_of_a_prompt_change_no_bit(load: Chains, folder: Path, model: Path) -> None:
    adapters = [(write_adapter(folder / "prompt.gguf", model, 16), 1.0)]
    params, prompt = replace(exact_params(1), n_batch=256), tokens_of(1)
    alone = load(model, adapters, (), params)
    list(read(alone, prompt, 256))
    expected = after(alone)
    chain = load(model, adapters, (1, 3), replace(params, n_threads=2))
    list(read(chain, tokens_of(2), 64, seq=1))
    list(read(chain, prompt, 64))
    assert np.array_equal(after(chain), expected)
    (without,) = load(model, [], (), params)
    list(read([without], prompt, 256))
    assert not np.array_equal(after([without]), expected)


def test_layers_without_changes_are_as_they_were(load: Chains, folder: Path, model: Path) -> None:
    """Slices of which an adapter has nothing, and a scale of 0."""
    adapter = write_adapter(folder / "some.gguf", model, 8, names=("attn_q",))
    whole, info = read_adapter(adapter), read_model_info(model)
    first = replace(whole, pairs=tuple(pair for pair in whole.pairs if pair.base.startswith("blk.0.")))
    assert not first.cut(1, 4, info.n_layer).pairs and sum(first.layer_bytes(4)[1:]) == 0
    tokens = random_tokens(9)
    plain, scaled = load(model, [], (2,)), load(model, [(adapter, 0.0)], (2,))
    expected = run(plain, make_batch(tokens, 0))
    assert np.array_equal(run(scaled, make_batch(tokens, 0)), expected)
    changed = load(model, [(adapter, 1.0)], (2,))
    assert not np.array_equal(run(changed, make_batch(tokens, 0)), expected)


# -- files that cannot be used


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "model"}, "is no LoRA adapter .general.type 'model'.; give one"),
        ({"adapter_type": "control_vector"}, "is no LoRA adapter .adapter.type 'control_vector'."),
        ({"architecture": "qwen2"}, "is for models of architecture 'qwen2', and model.gguf is of 'llama'"),
        ({"alpha": float("nan")}, "adapter.lora.alpha is nan"),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused(
    tmp_path: Path, model: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_fits(read_adapter(write_adapter(tmp_path / "a.gguf", model, **change)), read_model_info(model))


def test_tensors_that_do_not_fit_are_named(tmp_path: Path, model: Path) -> None:
    info = read_model_info(model)
    for name, shape, message in (
        (
            "wide",
            Shape(n_layer=4, n_ff=768),
            r"blk.0.ffn_down.weight are of shapes .768, 8. and .8, 256., and model.gguf",
        ),
        ("long", Shape(n_layer=6), "changes blk.4.attn_k.weight, which the layers of model.gguf do not have"),
    ):
        other = write_model(tmp_path / f"{name}.gguf", shape)
        with pytest.raises(UserError, match=message):
            check_fits(read_adapter(write_adapter(tmp_path / f"{name}-lora.gguf", other)), info)


def write_tensors(path: Path, **shapes: tuple[int, ...]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    for name, shape in shapes.items():
        writer.add_tensor(name.replace("__", "."), np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x__lora_a": (8, 256)}, "has no x.lora_b"),
        ({"x__weight": (8, 256)}, "has x.weight, which is no part of an adapter"),
        ({"x__lora_a": (8, 256), "x__lora_b": (256, 4)}, "which do not fit each other"),
        ({"x__lora_a": (8, 256), "x__lora_b": (256,)}, "which do not fit each other"),
    ],
)
def test_incomplete_files_are_refused(tmp_path: Path, shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_adapter(write_tensors(tmp_path / "a.gguf", **shapes))


def test_token_tables_are_not_changed(tmp_path: Path, model: Path) -> None:
    shapes = {"token_embd__weight__lora_a": (8, 256), "token_embd__weight__lora_b": (320, 8)}
    with pytest.raises(UserError, match=r"changes token_embd\.weight, which is in no layer"):
        check_fits(read_adapter(write_tensors(tmp_path / "a.gguf", **shapes)), read_model_info(model))


def test_norms_are_passed_over(tmp_path: Path) -> None:
    adapter = read_adapter(write_tensors(tmp_path / "a.gguf", blk__0__attn_norm__weight=(256,)))
    assert adapter.pairs == () and adapter.n_passed_over == 1


def test_more_than_two_adapters_have_no_order(tmp_path: Path, model: Path) -> None:
    one = ScaledAdapter(read_adapter(write_adapter(tmp_path / "a.gguf", model)), 1.0)
    check_order([one, one])
    with pytest.raises(UserError, match="3 adapters with 3 ranks of matrices are added up in an order"):
        check_order([one] * 3)


def test_types_with_other_bits_beside_others_are_for_fast_numerics(tmp_path: Path, model: Path) -> None:
    check_exact(read_adapter(write_adapter(tmp_path / "a.gguf", model, 32, "Q8_0")))
    with pytest.raises(UserError, match="--numerics fast"):
        check_exact(read_adapter(write_adapter(tmp_path / "b.gguf", model, 32, "Q4_0")))


def test_digests_follow_contents_and_scales(tmp_path: Path, model: Path) -> None:
    one, other = (read_adapter(write_adapter(tmp_path / f"{seed}.gguf", model, seed=seed)) for seed in (0, 1))
    names = [digest_of([ScaledAdapter(each, scale)]) for each, scale in ((one, 1.0), (one, 0.5), (other, 1.0))]
    assert len({*names, digest_of([])}) == 4 and digest_of([]) == ""
    assert digest_of([ScaledAdapter(one, 1.0 + 1e-12)]) == names[0], "libllama's scales have 32 bits"


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, model: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "a.gguf", model))
    write_adapter(tmp_path / "a.gguf", model, seed=1)
    with pytest.raises(UserError, match="was changed while the job started"):
        adapter.cut(0, 4, 4)
