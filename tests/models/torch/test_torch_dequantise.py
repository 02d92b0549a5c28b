"""Blocks of quantised types as torch reads them on a device, against ggml: bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pipeinfer.models.llama.ggml import dequantise

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pipeinfer[torch]'")

from pipeinfer.models.torch.quantised.dequantise import BLOCKS, dequantise_there  # noqa: E402

SCALES_AT = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "F16": (0,)}
N_BLOCKS = 400


@pytest.mark.parametrize("number", sorted(BLOCKS))
def test_blocks_of_any_bits_are_the_numbers_that_ggml_reads(number: int) -> None:
    kind = gguf.GGMLQuantizationType(number)
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(number)
    blocks = rng.integers(0, 256, (N_BLOCKS, n_bytes), np.uint8)
    if n_values == 1 and kind.name != "F16":
        blocks[:, -1] &= 0x3F  # neither infinite nor no number
    for at in SCALES_AT.get(kind.name, (0, 2) if n_values > 1 else ()):
        blocks[:, at : at + 2] = rng.normal(size=(N_BLOCKS, 1)).astype(np.float16).view(np.uint8)
    found = dequantise_there(number, torch.from_numpy(blocks.flatten()))
    expected = dequantise(number, memoryview(blocks.tobytes()), N_BLOCKS * n_values)
    assert found is not None and np.isfinite(expected).all() and len(np.unique(expected)) > 100
    assert np.array_equal(found.numpy(), expected)


def test_other_types_are_left_to_ggml() -> None:
    number = int(gguf.GGMLQuantizationType.IQ4_XS)
    assert dequantise_there(number, torch.zeros(136, dtype=torch.uint8)) is None
