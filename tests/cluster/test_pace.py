"""Pacing: real work stretched to a profile by sleeping, still stopped between layers; messages that come when due."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from experiments.record import Prompt, record_pair
from pipeinfer.cluster.stages.pace import Courier, JobClock, PacedStage
from pipeinfer.cluster.wire import WireType, encode
from pipeinfer.core.blocks import Span
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, OpKind, Row, Run
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import UserError
from pipeinfer.job.options.values import Pace
from pipeinfer.job.planning.deploy import pace_profile
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.figures import LATE, missed_pace, timings
from pipeinfer.policies import make_policy
from pipeinfer.virtual.costs import LinkCost, ModelCost, Work
from pipeinfer.virtual.simulation import simulate
from tests.support.jobs import finish, run_json
from tests.support.serving import Served

LAYER_S, N_LAYERS = 0.01, 5
PACE = """
embd = 288
[link]
latency_us = 200
gbit_per_s = 1
[head]
run_us = 200
verdict_us = 250
draft_us = 100
[[stages]]
layers = 4
rows = [1, 2, 8]
layer_ms = [4.0, 4.5, 9.0]
[[stages]]
layers = 4
rows = [1, 2, 8]
layer_ms = [4.0, 4.5, 9.0]
output_ms = [1.0, 1.0, 1.0]
[draft]
layers = 2
rows = [1]
layer_ms = [1.5]
"""
UNREACHABLE = re.sub(r"\[(\d\.\d, )+\d\.\d\]", "[0.001, 0.001, 0.001]", PACE)


class Time:
    """A clock that sleeping moves."""

    dilation = 1.0

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SlowModel:
    """Takes `own_s` for a batch; stops when told to."""

    n_embd, n_vocab, is_last = 4, 8, True

    def __init__(self, time: Time, own_s: float = 0.0) -> None:
        self.time, self.own_s, self.n_evaluated = time, own_s, 0
        self.ops: list[KvOp] = []

    def apply(self, ops: Sequence[KvOp]) -> None:
        self.ops += ops

    def next_position(self, seq: int) -> int:
        return 7

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        self.time.now += self.own_s
        self.n_evaluated += 1
        return None if stop() else np.zeros((len(batch.positions), 8), np.float32)

    def clear(self) -> None: ...

    def close(self) -> None: ...


def a_batch(n_rows: int = 1) -> Batch:
    return Batch(
        np.zeros(n_rows, np.int32), np.arange(n_rows, dtype=np.int32), [(0,)] * n_rows, None, np.ones(n_rows, bool)
    )


def a_stage(own_s: float = 0.0, output_s: float = 0.0) -> tuple[PacedStage, Time, SlowModel]:
    time = Time()
    model = SlowModel(time, own_s)
    work = Work((1.0, 2.0), (LAYER_S, 2 * LAYER_S))
    cost = ModelCost("toy", N_LAYERS, work, Work((1.0,), (output_s,)), run_s=0.001)
    return PacedStage(model, cost, cast(JobClock, time)), time, model


@pytest.mark.parametrize("own_s", [0.0, 0.004, 0.03])
def test_a_run_takes_what_the_profile_says_once_the_models_own_time_is_known(own_s: float) -> None:
    stage, time, model = a_stage(own_s)
    for n_rows in (1, 1, 2, 2):
        start_s = time.now
        assert stage.evaluate(a_batch(n_rows), lambda: False) is not None
        took_s = time.now - start_s
    assert took_s == pytest.approx(2 * N_LAYERS * LAYER_S)
    assert model.n_evaluated == 4


def test_the_first_of_a_prompts_blocks_takes_longer_by_what_its_context_costs() -> None:
    stage, time, _ = a_stage(own_s=0.004)
    assert isinstance(stage.cost, ModelCost)
    stage.cost = cost = replace(stage.cost, prompt_s=0.05)
    took_s = []
    for first in (0, 64, 128, 0, 64):
        batch, start_s = a_batch(64), time.now
        batch.positions += first
        batch.span = Span(0, 192)
        stage.evaluate(batch, lambda: False)
        took_s.append(time.now - start_s)
    alone_s = cost.layers * cost.layer.at(64)
    assert took_s[2:] == pytest.approx([alone_s, alone_s + 0.05, alone_s])


def test_a_model_slower_than_the_profile_takes_its_own_time() -> None:
    stage, time, _ = a_stage(own_s=0.2)
    stage.evaluate(a_batch(), lambda: False)
    start_s = time.now
    stage.evaluate(a_batch(), lambda: False)
    assert time.now - start_s == pytest.approx(0.2)
    late_s = 0.2 - N_LAYERS * LAYER_S  # not of the first run, whose own time nobody knew
    assert stage.take_late_s() == pytest.approx(late_s) and stage.take_late_s() == 0
    missed = missed_pace({0: 0.01, 2: 0.5}, 1.0)
    assert "rank 2 for 50% of the time" in missed and "rank 0" not in missed
    assert not missed_pace({0: 0.0}, 1.0)


@pytest.mark.parametrize("after_s", [0.0, 0.004, 0.012, 0.033])
def test_a_stopped_run_ends_with_the_layer_and_leaves_the_model_alone(after_s: float) -> None:
    stage, time, model = a_stage()
    start_s = time.now
    assert stage.evaluate(a_batch(), lambda: time.now >= start_s + after_s) is None
    n_layers = max(1, int(np.ceil(after_s / LAYER_S)))
    assert time.now - start_s == pytest.approx(n_layers * LAYER_S)
    assert model.n_evaluated == 0, "nothing to take back from its cache"


def test_the_rest_is_the_models() -> None:
    stage, _, model = a_stage()
    stage.apply([KvOp(OpKind.REMOVE, 0)])
    assert len(model.ops) == 1 and stage.next_position(0) == 7
    assert (stage.n_embd, stage.n_vocab, stage.is_last) == (4, 8, True)


def test_messages_are_due_after_latency_and_transfer_one_after_the_other() -> None:
    time = Time()
    courier = Courier(LinkCost(0.001, 1e6), time, n_embd=4, modelled_embd=1000)
    bare = encode(Run(1, [Row(0, 1, 0, (0,)), Row(0, 2, 1, (0,))]))
    first = courier.stamp(bare, 1, True)
    assert bytes(first[: len(bare)]) == bytes(bare)
    bare_s = len(bare) / 1e6
    assert courier.due_s(first) == pytest.approx(100.001 + bare_s)
    # with activations it counts as if the model were as wide as the profile's
    full = np.concatenate([bare, np.zeros(4 * 2 * 4, np.uint8)])
    second = courier.stamp(full, 1, True)
    assert courier.due_s(second) == pytest.approx(100.001 + 2 * bare_s + 8000 / 1e6)
    rounded = Courier(LinkCost(0.001, 1e6), time, n_embd=4, modelled_embd=1000, wire_type=WireType.BF16)
    third = rounded.stamp(np.concatenate([bare, np.zeros(2 * 2 * 4, np.uint8)]), 1, True)
    assert rounded.due_s(third) == pytest.approx(100.001 + bare_s + 4000 / 1e6)
    verdict = courier.stamp(np.zeros(3, np.int32), 1, False)
    assert courier.due_s(verdict) == pytest.approx(100.001 + 12e-6), "another stream, not behind the runs"


def test_a_profile_must_fit_the_ranks(tmp_path: Path) -> None:
    path = tmp_path / "pace.toml"
    path.write_text(PACE)
    assert pace_profile(Pace.parse(str(path)), 3, 1).n_stages == 2
    assert pace_profile(Pace.parse("pipeinfer-c:goliath-xwin7"), 9, 1).n_stages == 8
    assert len(pace_profile(Pace.parse("pipespec:llama-70b-8b-1b"), 4, 2).drafts) == 2
    with pytest.raises(UserError, match="measured on 3 ranks"):
        pace_profile(Pace.parse(str(path)), 4, 1)
    assert [stage.layers for stage in pace_profile(Pace.parse(str(path)), 3, 0).stages] == [3, 3, 2], (
        "the head's rank has layers too"
    )
    with pytest.raises(UserError, match="1 drafts, here are 2"):
        pace_profile(Pace.parse(str(path)), 3, 2)


@pytest.mark.parametrize("policy", ["speculative", "pipeinfer"])
def test_simulate_foretells_a_paced_job(tmp_path: Path, policy: str) -> None:
    """The same tokens, and about the speed; a busy machine may be later than it should, never much earlier."""
    pace, n_predict = tmp_path / "pace.toml", 40
    pace.write_text(PACE)
    words = ["-p", "def f(x):", "-n", str(n_predict), "--temp", "0", "--ignore-eos", "--policy", policy]
    paced = run_json(3, [*words, "--pace", str(pace), "-t", "1"])
    prompt = Prompt("f", Tokenizer(TARGET).encode("def f(x):"))
    choices = record_pair(TARGET, DRAFT, prompt, n_predict, n_threads=1)
    profile = pace_profile(Pace.parse(str(pace)), 3, 1)
    simulated = simulate(profile, choices, make_policy(policy).begin(), n_predict)
    assert simulated.request.tokens[len(choices.prompt) :] == paced["tokens"]
    # without the longest times between tokens, in which something may have stood still
    paced_s, simulated_s = (
        sum(found["itl_percentiles_s"][:90]) for found in (paced["timings"], timings(simulated.metrics))
    )
    ratio = paced_s / simulated_s
    assert 0.8 < ratio < 4, f"simulated / paced {ratio:.2f}"


def test_a_wrong_pace_is_one_line(tmp_path: Path) -> None:
    done = finish(3, ["run", "-p", "x", "--pace", "nowhere"])
    assert done.returncode == 2 and "pipeinfer-c" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_dilated_job_has_the_profiles_times_and_says_so(tmp_path: Path) -> None:
    """Every real second is a tenth: waiting ranks, links and policies see the profile's."""
    pace = tmp_path / "pace.toml"
    pace.write_text(PACE)
    words = ["-p", "def main(", "-n", "16", "--temp", "0", "--ignore-eos", "-t", "1", "--policy", "iterative"]
    real = run_json(3, [*words, "--pace", str(pace)])
    table = tmp_path / "results.csv"
    done = finish(3, ["run", "--json", *words, "--pace", f"{pace}*10", "--results", str(table)])
    assert done.returncode == 0 and "10 real seconds are one" in done.stderr, done.stderr
    (row,), dilated = csv.DictReader(table.open()), json.loads(done.stdout)
    assert row["pace"] == f"{pace}*10" and not row["joules_per_token"], "energy is that of real seconds"
    assert real["tokens"] == dilated["tokens"]
    ms, real_ms = (1000 * found["timings"]["itl_p50_s"] for found in (dilated, real))
    assert 34 <= ms < 45, f"a token takes 8 layers of 4 ms, an output of 1 ms and two messages, and not {ms:.1f} ms"
    assert real_ms >= 34


def late_ranks(result: str) -> list[float]:
    """By what part of the time with something to do each rank was late."""
    ranks = json.loads(result)["ranks"]
    busy_s = ranks[0]["wall_s"] - min(rank["idle_s"] for rank in ranks)
    return [rank["late_s"] / busy_s for rank in ranks]


def test_a_batch_of_ranks_that_miss_their_times_says_so(tmp_path: Path) -> None:
    (pace := tmp_path / "pace.toml").write_text(UNREACHABLE)
    (asked := tmp_path / "in.jsonl").write_text('{"prompt": "def main(", "ignore_eos": true}\n' * 2)
    words = ["batch", str(asked), "-t", "1", "-md", "none", "--policy", "iterative", "--json"]
    late = finish(3, [*words, "-o", str(tmp_path / "late.jsonl"), "-n", "200", "--pace", str(pace)])
    assert late_ranks(late.stdout)[2] > 0
    assert late.returncode == 0 and re.search(r"slower than --pace says: .*rank 2 for \d+% of", late.stderr), (
        late.stderr
    )
    pace.write_text(PACE)
    done = finish(3, [*words, "-o", str(tmp_path / "out.jsonl"), "-n", "24", "--pace", f"{pace}*5"])
    assert done.returncode == 0
    assert ("slower than" in done.stderr) == (max(late_ranks(done.stdout)) > LATE), "on a busy host some are"


def test_so_does_a_server_at_its_end(tmp_path: Path) -> None:
    (pace := tmp_path / "pace.toml").write_text(UNREACHABLE)
    with Served(3, ["-md", "none", "--policy", "iterative", "--pace", str(pace)]) as served:
        answer = served.http.post("/completion", json={"prompt": "def main(", "n_predict": 400, "ignore_eos": True})
        assert answer.status_code == 200
    assert re.search(r"slower than --pace says: .*rank 2 for \d+% of", served.errors), served.errors


@pytest.mark.parametrize("factor", ["0.5", "x", "nan", "1e9", ""])
def test_a_dilation_that_is_no_number_from_1_on_is_refused(factor: str) -> None:
    with pytest.raises(UserError, match="from 1 to 10000"):
        Pace.parse(f"pipeinfer-c*{factor}")
    assert Pace.parse(text := "pipeinfer-c:pair*4") == Pace(text, "pipeinfer-c", "pair", 4.0)
