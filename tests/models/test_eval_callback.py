"""The evaluation callback in C and in Python: the same bits, and the same answers to a stop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama import eval_callback
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from tests.models.test_architectures import possible_cuts, rows_of_slices
from tests.models.test_llama_stage import load, make_batch, random_tokens, run, state
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.gguf_factory import Shape, write_model

ROOT = Path(__file__).parents[2]
needs_compiled = pytest.mark.skipif(not eval_callback.compiled(), reason="the callback was not compiled")


def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_callback, "compiled", lambda: None)


@needs_compiled
@pytest.mark.parametrize("name", ["llama", "gemma", "glm4", "step35"])
def test_both_ways_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of graphs that are read, written over before the first layer, also of the first slice, and read under another
    name."""
    path, tokens = write_random_model(tmp_path / "model.gguf", MODELS[name]), random_tokens(40)
    cuts = possible_cuts(read_model_info(path).layers, 3)[0]
    compiled = rows_of_slices(path, cuts, tokens)
    in_python(monkeypatch)
    assert np.array_equal(rows_of_slices(path, cuts, tokens), compiled)


def stops(stage: LlamaStage, hidden: FloatArray | None) -> list[tuple[bool, int, int]]:
    """For each number of layers that may be computed: whether there was a result, how often `stop` was asked, and the
    next position of the cache afterwards."""
    found = []
    for n_layers in range(4):
        answers = iter([False] * n_layers + [True])
        result = stage.evaluate(make_batch(random_tokens(3), 20, hidden), lambda: next(answers))  # noqa: B023
        found.append((result is not None, n_layers + 1 - len(list(answers)), stage.next_position(0)))
        if result is not None:
            break
    return found


@needs_compiled
def test_both_ways_give_the_output_that_heads_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last layer, whose node has a name of its own."""
    info = read_model_info(write_random_model(tmp_path / "model.gguf", MODELS["qwen35"]))
    params = LlamaParams(256, n_batch=96, n_outputs_max=96, taps=(info.n_layer - 1,))
    found = []
    for way in ("C", "Python"):
        if way == "Python":
            in_python(monkeypatch)
        stage = LlamaStage(open_slice(info, 0, info.n_layer), params)
        stage._decoder.tapped[:] = np.nan
        run([stage], make_batch(random_tokens(20), 0))
        found.append(stage.features.copy())
        stage.close()
    assert np.array_equal(*found) and np.ptp(found[0]) > 0


@needs_compiled
def test_both_ways_stop_at_the_same_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "model.gguf", Shape(n_layer=4), type_name="Q4_K_M")
    params = LlamaParams(256, n_batch=64, n_outputs_max=64)
    found = []
    for way in ("C", "Python"):
        if way == "Python":
            in_python(monkeypatch)
        stages = load(path, (2,), params)
        run(stages, make_batch(random_tokens(20), 0))
        hidden = np.ones((3, stages[0].n_embd), np.float32)
        found.append(([stops(stages[0], None), stops(stages[1], hidden)], [state(stage, 0) for stage in stages]))
        for stage in stages:
            stage.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("way", ["C", "Python"])
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_what_drafts_read_is_what_a_slice_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, name: str
) -> None:
    """Of chunks in blocks, of rows in parts, and of the last layer of a slice; where layers have states, in the order
    of the rows."""
    if way == "Python":
        in_python(monkeypatch)
    path = write_random_model(tmp_path / "model.gguf", MODELS[name])
    info = read_model_info(path)
    cut = max(cuts[0] for cuts in possible_cuts(info.layers, 2))
    params = LlamaParams(256, n_batch=96, n_outputs_max=96, taps=(0, cut - 1))
    tapped = LlamaStage(open_slice(info, 0, cut), params)
    whole = LlamaStage(open_slice(info, 0, info.n_layer), params)
    for first, n_rows in ((0, 20), (20, 3)):
        batch = make_batch(random_tokens(n_rows), first)
        end = run([tapped], batch)
        batch.hidden = None
        run([whole], batch)
        assert np.array_equal(tapped.features[1], end)
        assert np.array_equal(whole.features, tapped.features) and np.ptp(whole.features[0]) > 0
    for stage in (tapped, whole):
        stage.close()


@pytest.mark.parametrize("way", ["C", "Python"])
def test_not_every_short_layer_is_asked_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """But where the evaluation is ended, `stop` was asked once for each layer in the end."""
    if way == "Python":
        in_python(monkeypatch)
    path = write_model(tmp_path / "model.gguf", Shape(n_layer=20))
    (stage,) = load(path, (), LlamaParams(256, stop_interval_s=1e6))
    callback, asked = stage._callback, list[int]()
    begin = callback.begin

    def begin_late(stop: Callable[[], bool] | None) -> None:
        begin(stop)
        callback.state.due = 8

    def stop() -> bool:
        asked.append(callback.state.n_layers)
        return len(asked) > 1

    assert stage.evaluate(make_batch([5], 0), stop) is not None and asked == [1]
    monkeypatch.setattr(callback, "begin", begin_late)
    assert stage.evaluate(make_batch([5], 1), stop) is None and asked == [1, *[8] * 8]
    stage.close()


def test_a_callback_of_another_source_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "eval_callback.py"
    other.with_suffix(".c").write_text("/* a later version */")
    monkeypatch.setattr(eval_callback, "__file__", str(other))
    assert eval_callback.compiled.__wrapped__() is None


def test_the_package_is_built_without_a_compiler(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    command = [sys.executable, "setup.py", "-q", "build_ext", "-b", str(tmp_path), "-t", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"CC": "false"})
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.so"))
