"""Tensors that are elsewhere than their layers: by names and layers of the whole model, also where a slice has others,
and counted as they are."""

from __future__ import annotations

import random
import re

import pytest

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of, read_model_info
from pipeinfer.models.gguf.slice import slice_tensors
from pipeinfer.models.llama.tensor_places import HOST, TensorPlace, TensorPlaces, check_names, moved_tensors
from tests.support.gguf_factory import Shape, write_model

PATTERNS = (
    "exps",
    r"blk\.[13]\.",
    "ffn_(up|gate)_exps",
    "attn_.*weight$",
    "^output",
    r"\.(2|3|5)\.ffn",
    "norm",
    "token_embd",
)


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    shape = Shape("qwen3moe", n_layer=6, n_embd=64, n_ff=64, n_expert=4)
    return read_model_info(write_model(tmp_path_factory.mktemp("places") / "model.gguf", shape))


def places_of(*texts: str, n_cpu_moe: int = 0) -> TensorPlaces:
    return TensorPlaces(tuple(map(TensorPlace.parse, texts)), n_cpu_moe)


@pytest.mark.parametrize("text", ["", "exps", "exps=", "=CPU", "(=CPU", "exps=0", "exps=a b"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not PATTERN=DEVICE|no regular expression"):
        TensorPlace.parse(text)


def test_names_are_those_of_the_whole_model(info: ModelInfo) -> None:
    places = places_of(r"blk\.(3|4)\.ffn_up_exps=CPU", "^output=RPC1", "norm=CPU")
    assert moved_tensors(info, 2, 4, places) == {
        r"^blk\.(1)\.ffn_up_exps\.weight$": HOST,
        **{rf"^blk\.(0|1)\.{name}_norm\.weight$": HOST for name in ("attn", "attn_q", "attn_k", "ffn")},
        r"^output_norm\.weight$": "RPC1",
    }
    # a last slice has the output head under the name of the token table
    assert moved_tensors(info, 4, 6, places)[r"^token_embd\.weight$"] == "RPC1"
    assert moved_tensors(info, 0, 6, places)[r"^output\.weight$"] == "RPC1"
    experts = moved_tensors(info, 2, 5, places_of("blk.2.*down_exps=RPC0", n_cpu_moe=2))
    assert experts == {
        r"^blk\.(0)\.ffn_down_exps\.weight$": "RPC0",
        r"^blk\.(1)\.ffn_down_exps\.weight$": HOST,
        **{rf"^blk\.(0|1)\.ffn_{name}_exps\.weight$": HOST for name in ("gate", "up")},
    }


@pytest.mark.parametrize("seed", range(60))
def test_what_is_counted_on_gpus_is_what_libllama_is_told(seed: int, info: ModelInfo) -> None:
    rng = random.Random(seed)
    texts = [f"{rng.choice(PATTERNS)}={rng.choice([HOST, 'RPC0'])}" for _ in range(rng.randrange(4))]
    places = places_of(*texts, n_cpu_moe=rng.choice([0, 0, 2, -1]))
    first, last = sorted(rng.sample(range(info.n_layer + 1), 2))
    n_on_gpu, is_last = rng.randint(0, last - first), last == info.n_layer
    has_head = is_last and n_on_gpu == last - first and rng.random() < 0.5
    moved, n_bytes = moved_tensors(info, first, last, places), 0
    for each in slice_tensors(info, first, last):
        layer = layer_of(each.name)
        is_on_gpu = layer >= last - first - n_on_gpu if layer is not None else has_head
        for pattern, device in moved.items():
            if re.search(pattern, each.name):
                is_on_gpu = device != HOST
        is_output = layer is None and each.tensor.name.startswith("output")
        n_bytes += each.tensor.n_bytes * (is_on_gpu and (layer is not None or (is_output and is_last)))
    assert places.gpu_bytes(info, first, last, n_on_gpu, has_head) == n_bytes


def test_a_pattern_without_a_tensor_is_refused(info: ModelInfo) -> None:
    check_names(info, places_of("exps=CPU", "^output=CPU").by_name)
    for pattern in ("ffn_up_exp$", "blk.6.", "token_embd"):
        with pytest.raises(UserError, match="no tensor of a layer or of the output head has such a name"):
            check_names(info, places_of(f"{pattern}=CPU").by_name)
