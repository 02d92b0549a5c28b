"""Grown models: the same function at real cost, for every architecture and quantisation that can be cut."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from experiments.grow import grow, main, scaled, search_noise
from pipeinfer.errors import UserError
from pipeinfer.job.inspect.pair_report import acceptance
from pipeinfer.models.gguf.model_info import read_model_info
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import ROOT, environment, run_json

PROMPT = [1, 40, 50, 60, 270]
MODELS = [
    (Shape(n_layer=2), "Q8_0"),
    (Shape(n_layer=2, arch="qwen2", tied=True), "Q4_0"),
    (Shape(n_layer=2, arch="falcon"), "F32"),
    (Shape(n_layer=2, arch="qwen3moe", n_expert=4), "Q8_0"),
    (Shape(n_layer=2, arch="phi3", rope_factors=True), "F16"),
    (Shape(n_layer=2), "Q4_K_M"),
    (Shape(n_layer=2), "Q3_K_M"),
]


@pytest.mark.parametrize(("shape", "type_name"), MODELS, ids=lambda value: getattr(value, "arch", value))
def test_without_noise_it_is_the_same_function(tmp_path: Path, shape: Shape, type_name: str) -> None:
    source = write_model(tmp_path / "model.gguf", shape, type_name)
    info, grown = read_model_info(source), tmp_path / "grown.gguf"
    grow(info, grown, 5, 0.0)
    deeper = read_model_info(grown)
    assert (deeper.n_layer, deeper.quantisation, deeper.n_vocab) == (5, info.quantisation, info.n_vocab)
    assert deeper.layer_bytes[2:4] == info.layer_bytes, "the added layers cost what the model's own cost"
    assert acceptance(grown, source, [PROMPT], 24) == acceptance(source, grown, [PROMPT], 24) == 1.0


def test_noise_lowers_the_acceptance(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model.gguf", Shape(n_layer=3))
    rates = []
    for noise in (0.0, 0.5, 4.0):
        grow(read_model_info(source), tmp_path / "grown.gguf", 9, noise)
        rates.append(acceptance(tmp_path / "grown.gguf", source, [PROMPT], 64))
    assert rates[0] == 1.0 and rates[0] > rates[1] > rates[2] and rates[2] < 0.2


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32"])
def test_scaling_blocks_scales_their_values(kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((4, 256), np.float32)
    packed = gguf.quants.quantize(values, quantisation)
    per_block, n_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    blocks = packed.view(np.uint8).reshape(-1, n_bytes)
    out = scaled(blocks, quantisation.value, 0.25, np.random.default_rng(1))
    before = gguf.quants.dequantize(blocks.reshape(4, -1), quantisation).reshape(-1, per_block)
    after = gguf.quants.dequantize(out.reshape(4, -1), quantisation).reshape(-1, per_block)
    np.testing.assert_allclose(np.abs(after), 0.25 * np.abs(before), rtol=1e-2, atol=1e-5)
    signs = np.sign(np.sum(after * before, axis=1))
    assert set(signs.tolist()) == {-1.0, 1.0}
    np.testing.assert_allclose(after, signs[:, None] * 0.25 * before, rtol=1e-2, atol=1e-5)


def test_a_model_that_changes_is_not_grown(tmp_path: Path) -> None:
    source, grown = write_model(tmp_path / "model.gguf"), tmp_path / "grown.gguf"
    info = read_model_info(source)
    write_model(source, Shape(seed=1))
    with pytest.raises(UserError, match=r"model.gguf was changed while it was read"):
        grow(info, grown, 9, 0.0)
    assert not grown.exists()


def test_the_search_finds_the_noise() -> None:
    made: list[float] = []

    def make(noise: float) -> float:
        made.append(noise)
        return max(0.0, 1.0 - noise / 3)

    for wanted in (1.0, 0.8, 0.5):
        noise, rate = search_noise(make, wanted)
        assert abs(rate - wanted) <= 0.03 and made[-1] == noise, "the last model made is the one that is kept"
    with pytest.raises(UserError, match=r"0\.7 cannot be reached: .* 0\.600"):
        search_noise(lambda noise: 0.6 - noise, 0.7)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "experiments/grow.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )


def test_the_command_measures_and_the_model_runs(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model.gguf", Shape(n_layer=3))
    grown = tmp_path / "grown.gguf"
    done = command("-m", str(source), "-o", str(grown), "--layers", "6", "--acceptance", "1")
    assert done.returncode == 0, done.stderr
    assert "6 layers" in done.stdout and "acceptance rate" in done.stdout and "1.000" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grown.gguf", "model.gguf"]
    common = ["-p", "the model", "-n", "24", "--temp", "0", "--ignore-eos"]
    result = run_json(3, ["-m", str(grown), "-md", str(source), *common])
    assert result["tokens"] == run_json(1, ["-m", str(source), *common])["tokens"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layers", "2"], "--layers 2"),
        (["--layers", "9999"], "512"),
        (["--layers", "6", "--noise", "-1"], "--noise"),
        (["--layers", "6", "--noise", "1", "--acceptance", "0.5"], "give one of them"),
        (["--layers", "6", "-o", "{folder}/none/x.gguf"], "x.gguf"),
        (["--layers", "6", "-o", "{folder}/model.gguf"], "another file"),
        (["--layers", "6", "--acceptance", "0.5", "-n", "2000000000"], "this host has"),
        (["--layers", "6", "-m", "{folder}/none.gguf"], "none.gguf"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, arguments: list[str], words: str) -> None:
    write_model(tmp_path / "model.gguf", Shape(n_layer=2))
    before = (tmp_path / "model.gguf").read_bytes()
    paths = ["-m", str(tmp_path / "model.gguf"), "-o", str(tmp_path / "grown.gguf")]
    done = CliRunner().invoke(main, [*paths, *(part.format(folder=tmp_path) for part in arguments)])
    assert done.exit_code == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "model.gguf").read_bytes() == before
