"""Every quantisation, of random weights or random blocks: slices, and rows in any company, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from tests.models.test_llama_stage import loaded, make_batch, random_tokens, run
from tests.support.gguf_factory import FILE_TYPES, Shape, quantise, write_model

__all__ = ["loaded"]
Loader = Callable[..., list[LlamaStage]]
PARAMS = LlamaParams(n_cells=512, n_seq_max=4, n_batch=64, n_outputs_max=33)
FLOAT = ["F16", "BF16"]
SIMPLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q1_0", "TQ1_0", "TQ2_0"]
IN_256 = [
    "Q2_K",
    "Q3_K_S",
    "Q3_K_M",
    "Q3_K_L",
    "Q4_K_S",
    "Q4_K_M",
    "Q5_K_S",
    "Q5_K_M",
    "Q6_K",
    "IQ3_S",
    "IQ3_M",
    "IQ4_XS",
]
NAMES = [*FLOAT, *SIMPLE, *IN_256, *FILE_TYPES]
SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 33)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(n_layer=2, n_expert=16, n_ff=256, peaky=8.0)
    return write_model(tmp_path_factory.mktemp("quantisations") / "f32.gguf", shape, "F32")


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_the_same_in_every_batch(source: Path, tmp_path: Path, loaded: Loader, name: str) -> None:
    path = tmp_path / f"{name}.gguf"
    quantise(source, path, name)
    tokens = random_tokens(sum(SIZES))
    (whole,) = loaded(path, (), PARAMS)
    expected = np.concatenate([run([whole], make_batch([token], at)) for at, token in enumerate(tokens)])
    chain, at = loaded(path, (1,), PARAMS), 0
    for n_rows in SIZES:
        wanted = [row in (n_rows // 2, n_rows - 1) for row in range(n_rows)]
        found = run(chain, make_batch(tokens[at : at + n_rows], at, None, wanted))
        assert np.array_equal(found, expected[at : at + n_rows][wanted]), n_rows
        at += n_rows
