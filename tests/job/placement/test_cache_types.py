"""Caches of other types than 16-bit floats: slices against plain llama.cpp, what they take, what is refused."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeinfer.cluster.hosts.host import Host
from pipeinfer.errors import UserError
from pipeinfer.job.options.values import Backend
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.layers import CACHE_TYPES, CacheTypes, KvShape
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.ggml import load_library
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from tests.models.test_llama_stage import make_batch, run
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import finish, run_json
from tests.support.paces import pace_words, slow_target
from tests.support.planned import lay_out, options_of

TOKENS = [(7 * number) % 300 for number in range(48)]
HOSTS = [Host("a", frozenset(range(8)), 8) for _ in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cache") / "model.gguf", Shape())


def plain(path: Path, types: CacheTypes) -> Any:
    """The last token's logits of the whole model, and the bytes of its cells."""
    lib = load_library()
    loaded = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_threads = 256, 1
    params.type_k, params.type_v = types.ggml
    context = lib.llama_init_from_model(loaded, params)
    for token in TOKENS:
        assert lib.llama_decode(context, lib.llama_batch_get_one((ctypes.c_int * 1)(token), 1)) == 0
    found = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (320,)).copy()
    n_bytes = lib.llama_state_seq_get_size(context, 0)
    lib.llama_free(context)
    lib.llama_model_free(loaded)
    return found, n_bytes


def sliced(path: Path, types: CacheTypes) -> Any:
    info = read_model_info(path)
    params = LlamaParams(n_cells=256, n_seq_max=4, n_batch=64, exact=False, cache=types)
    stages = [LlamaStage(open_slice(info, first, last, None), params) for first, last in ((0, 1), (1, 4))]
    found = [run(stages, make_batch([token], position)) for position, token in enumerate(TOKENS)][-1][0]
    sizes = [stage._lib.llama_state_seq_get_size(stage._context.handle, 0) for stage in stages]
    for stage in stages:
        stage.close()
    return found, sum(sizes)


@pytest.mark.parametrize("name", [name for name in CACHE_TYPES if name != "f16"])
def test_slices_keep_what_the_whole_model_would(model: Path, name: str) -> None:
    types, f16 = CacheTypes(name, name), CacheTypes()
    (expected, n_bytes), (found, n_found) = plain(model, types), sliced(model, types)
    other, n_f16 = sliced(model, f16)
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    # flash attention makes F16 of F32
    assert np.array_equal(found, other) == (name == "f32"), "another type has no effect"
    per_cell = [sum(each.cell_bytes(read_model_info(model).kv_shapes)) for each in (types, f16)]
    assert n_found - n_f16 == len(TOKENS) * (per_cell[0] - per_cell[1])
    assert abs(n_found - n_bytes) < 1000, "what is besides the cells"


def test_bytes_of_a_cell() -> None:
    shapes = [KvShape(2, 64, 32), KvShape()]
    assert CacheTypes().cell_bytes(shapes) == (2 * 2 * 96, 0)
    assert CacheTypes("q8_0", "q4_0").cell_bytes(shapes) == (4 * 34 + 2 * 18, 0)


def plan(**options: Any) -> Any:
    asked = options_of(model=TARGET, drafts=(DRAFT,), **options)
    return lay_out(asked, HOSTS, read_model_info(TARGET), [read_model_info(DRAFT)], 4096, 100)


def test_the_plan_counts_them() -> None:
    full, small = plan(numerics="fast"), plan(numerics="fast", cache_type_k="q8_0", cache_type_v="q4_0")
    for rank in (1, 2):
        assert small.memory[rank].kv == full.memory[rank].kv * (34 + 18) // 128
    drafts = plan(cache_type_k_draft="q8_0", cache_type_v_draft="q8_0")
    assert drafts.memory[0].kv == plan().memory[0].kv * 34 // 64, "a draft's may be so with exact numerics too"
    assert drafts.memory[1].kv == plan().memory[1].kv


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_type_k": "q8_0"}, "--cache-type-k q8_0 --cache-type-v f16: --numerics exact needs types of its own"),
        (
            {"cache_type_v": "bf16", "numerics": "fast", "backend": (Backend(), Backend("torch"), Backend())},
            "rank 1 has --backend torch, whose caches are as its weights",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        plan(**options)


def test_a_head_must_be_whole_blocks(tmp_path: Path) -> None:
    path = write_model(tmp_path / "odd.gguf", Shape(n_embd=160, n_layer=3))
    asked = options_of(model=path, numerics="fast", cache_type_v="q4_0")
    with pytest.raises(
        UserError, match=r"--cache-type-v q4_0 takes 32 numbers together, and a head of odd\.gguf has 40"
    ):
        lay_out(asked, HOSTS, read_model_info(path), [], 512, 100)


def test_a_job_with_trees_in_quantised_caches(tmp_path: Path) -> None:
    pace = pace_words(tmp_path, slow_target(4.0))
    words = ["-p", "def fibonacci(n):", "--temp", "0", "-n", "24", "-t", "1", "--numerics", "fast", "-ctk", "q8_0"]
    found = run_json(3, [*words, "-ctv", "q8_0", "-ctkd", "q8_0", "-ctvd", "q4_0", *pace])
    assert found["options"].endswith(
        "cache-type-k q8_0, cache-type-v q8_0, cache-type-k-draft q8_0, cache-type-v-draft q4_0"
    )
    alone = run_json(1, [*words, "-ctv", "q8_0", "--policy", "iterative"])
    assert found["tokens"][:12] == alone["tokens"][:12] and found["speculation"]["acceptance_rate"] > 0
    done = finish(1, ["run", *words, "-ctv", "q3_0"])
    assert done.returncode == 2 and "q3_0" in done.stderr
