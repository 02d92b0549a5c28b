"""What travels between stages as bf16: the nearest number there is, half the bytes, and one text at one split."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.cli.simulate import simulate_command
from pipeinfer.cluster.wire import WireType, activation_bytes, read_activations, write_activations
from pipeinfer.core.engine import Engine
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.levels import Level
from pipeinfer.core.requests import Request
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.types import FloatArray
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.drafts.model_drafter import ModelDrafter
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.policies import POLICIES, make_policy
from tests.support.jobs import finish, run_json
from tests.support.toy import ToyPipeline, ToyWaiter

F32, BF16 = WireType.F32, WireType.BF16
EDGES = [
    0x0000_0000,
    0x8000_0000,
    0x0000_0001,
    0x0000_8000,
    0x0000_8001,
    0x0001_8000,
    0x007F_FFFF,
    0x0080_0000,
    0x3F80_8000,
    0x3F81_8000,
    0x3F80_7FFF,
    0x7F7F_7FFF,
    0x7F7F_8000,
    0x7F7F_FFFF,
    0x7F80_0000,
    0xFF80_0000,
    0x7F80_0001,
    0xFF80_0001,
    0x7FC0_0000,
    0x7FFF_FFFF,
    0xFFFF_FFFF,
]
"""Zeros, denormals, ties, the largest numbers, infinities and all kinds of NaN."""


def passed_on(values: FloatArray, wire_type: WireType) -> FloatArray:
    n_rows, n_embd = values.shape
    buffer = np.empty(activation_bytes(n_rows, n_embd, wire_type), np.uint8)
    write_activations(values, buffer, wire_type)
    return read_activations(buffer, n_embd, wire_type)


def nearest(bits: int) -> int:
    """Of the bf16 numbers below and above, the one that is nearer; of two the even one. In exact arithmetic."""
    low = bits & 0xFFFF_0000
    number, below, above = (_magnitude(each) for each in (bits, low, low + 0x1_0000))
    if (bits & 0x7FFF_FFFF) >= 0x7F80_0000:
        return low
    is_up = number - below > above - number or (number - below == above - number and low & 0x1_0000)
    return low + 0x1_0000 if is_up else low


def _magnitude(bits: int) -> int:
    """In units of the smallest denormal; infinity is what would come after the largest number."""
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7F_FFFF
    return (mantissa | 0x80_0000) << exponent - 1 if exponent else mantissa


@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(EDGES), min_size=1, max_size=64), st.integers(1, 3))
def test_each_number_becomes_the_nearest_bf16(bits: list[int], n_rows: int) -> None:
    values = np.array([bits] * n_rows, np.uint32).view(np.float32)
    found = passed_on(values, BF16)
    assert found.shape == values.shape and np.array_equal(np.isnan(found), np.isnan(values))
    for row in found.view(np.uint32).tolist():
        for one, before in zip(row, bits, strict=True):
            assert one & 0xFFFF == 0 and (one >> 31) == (before >> 31)
            assert np.isnan(np.array(before, np.uint32).view(np.float32)) or one == nearest(before), hex(before)
    assert np.array_equal(passed_on(found, BF16).view(np.uint32), found.view(np.uint32)), "rounding twice is once"
    assert np.array_equal(passed_on(values, F32).view(np.uint32), values.view(np.uint32))


def test_every_edge_is_among_them() -> None:
    values = np.array([EDGES], np.uint32).view(np.float32)
    found = passed_on(values, BF16).view(np.uint32)[0].tolist()
    kept = [each for each, value in zip(zip(found, EDGES, strict=True), values[0], strict=True) if not np.isnan(value)]
    assert [one for one, _ in kept] == [nearest(before) for _, before in kept]
    assert np.isinf(passed_on(np.array([[3.4e38]], np.float32), BF16)), "beyond the largest bf16"


# --- texts of the shipped pair ----------------------------------------------------------------------------------------

N_PREDICT, PROMPT = 200, "def read_lines(path):\n    with open(path) as file:\n"
TOKENS = Tokenizer(TARGET).encode(PROMPT)
N_PROMPT = len(TOKENS)


def open_stages(cut: int, n_cells: int = 768) -> list[LlamaStage]:
    info = read_model_info(TARGET)
    edges, params = ((0, cut), (cut, info.n_layer)), LlamaParams(n_cells, 64, n_batch=160, n_outputs_max=64, exact=True)
    return [LlamaStage(open_slice(info, *each), params) for each in edges]


@pytest.fixture(scope="module")
def stages() -> Iterator[list[LlamaStage]]:
    found = open_stages(4)
    yield found
    for stage in found:
        stage.close()


@pytest.fixture(scope="module")
def draft() -> Iterator[LlamaStage]:
    info = read_model_info(DRAFT)
    stage = LlamaStage(open_slice(info, 0, info.n_layer), LlamaParams(768, 64, 32, 32, exact=False))
    yield stage
    stage.close()


def text_of(
    stages: list[LlamaStage], draft: LlamaStage, policy: str, wire_type: WireType, n_predict: int = N_PREDICT
) -> list[int]:
    for stage in (*stages, draft):
        stage.clear()
    pipeline = ToyPipeline(stages, random.Random(1), wire_type=wire_type)
    target = Level(pipeline, SequencePool(60, 768, parked=True), n_chunk=128, n_rows=32, blocks=True)
    drafter = ModelDrafter(draft, SequencePool(60, 768), 32)
    engine = Engine(target, drafter, ToyWaiter(pipeline.rng), lambda: 0.0)
    request = Request(0, list(TOKENS), n_predict, SamplingParams(temp=0.0), 300)
    engine.add(request, make_policy(policy, {}))
    engine.complete()
    return list(request.tokens)


def test_every_policy_has_one_text_at_one_split(stages: list[LlamaStage], draft: LlamaStage) -> None:
    """Rounding a row knows nothing of the others: with kernels that do not either the text is one."""
    texts = {policy: text_of(stages, draft, policy, BF16, 60) for policy in POLICIES}
    assert all(text == texts["iterative"] for text in texts.values()), texts


def logits_of(stages: list[LlamaStage], tokens: list[int], wire_type: WireType) -> FloatArray:
    """After each token."""
    found, n_rows = [], 32
    for stage in stages:
        stage.clear()
    for start in range(0, len(tokens), n_rows):
        ids = np.array(tokens[start : start + n_rows], np.int32)
        positions, wanted = np.arange(start, start + len(ids), dtype=np.int32), np.ones(len(ids), bool)
        hidden = stages[0].evaluate(Batch(ids, positions, [(0,)] * len(ids), None, wanted), lambda: False)
        assert hidden is not None
        hidden = passed_on(hidden, wire_type)
        logits = stages[1].evaluate(Batch(ids, positions, [(0,)] * len(ids), hidden, wanted), lambda: False)
        assert logits is not None
        found.append(logits.copy())
    return np.concatenate(found)


def test_most_tokens_are_those_of_f32(stages: list[LlamaStage], draft: LlamaStage) -> None:
    """After the same text, that of f32: alone a text differs from the first other token on."""
    text = text_of(stages, draft, "iterative", F32)
    plain, rounded = (logits_of(stages, text, wire_type)[N_PROMPT - 1 : -1] for wire_type in WireType)
    assert len(plain) == N_PREDICT and plain.argmax(1).tolist() == text[N_PROMPT:]
    assert (plain.argmax(1) == rounded.argmax(1)).mean() >= 0.97
    assert 1e-4 < np.linalg.norm(plain - rounded) / np.linalg.norm(plain) < 0.02


# --- jobs -------------------------------------------------------------------------------------------------------------

SETTINGS = "-n 24 --temp 0 -t 1 --ignore-eos --policy iterative -md none --numerics fast -s 1"
ASKED = ["-p", PROMPT, "-m", str(TARGET), *SETTINGS.split()]


def test_a_job_sends_half_the_bytes_of_activations(tmp_path: Path) -> None:
    table = tmp_path / "results.csv"
    # a prompt of one token: how a longer one is cut depends on times
    asked = [*ASKED, "-p", "def", "--results", str(table)]
    plain, rounded = (run_json(3, [*asked, "--wire-type", str(each)]) for each in WireType)
    n_embd, rows = read_model_info(TARGET).n_embd, plain["speculation"]["rows"]
    assert rows == rounded["speculation"]["rows"] and plain["options"] == "" != rounded["options"]
    for f32, bf16 in zip(plain["wire"]["hops"], rounded["wire"]["hops"], strict=True):
        assert f32["messages"] == bf16["messages"]
        assert f32["bytes"] - bf16["bytes"] == 2 * n_embd * rows and f32["bytes"] > 1.7 * bf16["bytes"]
    assert [row["options"] for row in csv.DictReader(table.open())] == ["", "wire-type bf16"]


def test_exact_numerics_refuse_it() -> None:
    for command in (["run", "-p", "x"], ["plan", "--profile", "pipeinfer-c", "-np", "4"]):
        done = finish(1, [*command, "--wire-type", "bf16"])
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "--wire-type bf16 rounds" in done.stderr and "give --numerics fast, or --wire-type f32" in done.stderr


def test_a_batch_does_not_go_on_with_texts_of_the_other_type(tmp_path: Path) -> None:
    source, output = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    source.write_text('{"prompt": "def f(", "max_tokens": 4}\n')
    words = ["batch", str(source), "-o", str(output), "-md", "none", "-m", str(TARGET), "-t", "1", "--numerics", "fast"]
    assert finish(1, words).returncode == 0
    refused = finish(1, [*words, "--wire-type", "bf16"])
    assert refused.returncode == 2 and str(output) in refused.stderr, refused.stderr
    assert len(output.read_text().splitlines()) == 1


def test_simulate_counts_the_bytes() -> None:
    words = ["--profile", "pipeinfer-c", "--gbit", "0.1", "--policy", "iterative", "-n", "8", "--json"]
    plain, rounded = (
        json.loads(CliRunner().invoke(simulate_command, [*words, "--wire-type", str(each)]).stdout) for each in WireType
    )
    hops = [[hop["bytes"] for hop in found["wire"]["hops"]] for found in (plain, rounded)]
    assert all(f32 > 1.9 * bf16 for f32, bf16 in zip(*(each[1:] for each in hops), strict=True)), hops
    assert hops[0][0] > 0 and plain["timings"]["ttft_s"] > 1.1 * rounded["timings"]["ttft_s"]
    assert plain["timings"]["predicted_per_second"] < rounded["timings"]["predicted_per_second"]
