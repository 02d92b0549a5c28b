"""Profiles: the shipped ones, their arithmetic, and what is said about wrong ones."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from pipeinfer.cluster.assignment import Sizes, assign
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import UserError
from pipeinfer.job.bench.measure import ModelToTime, StageRun, overheads, slowdowns, time_model
from pipeinfer.observe.trace import HeadLedger
from pipeinfer.policies import PipeInfer
from pipeinfer.virtual.choices import ranks_for, synthetic_team
from pipeinfer.virtual.costs import Work, roofline
from pipeinfer.virtual.profile import SHIPPED, load_profile, share_layers, shipped_profiles
from pipeinfer.virtual.simulation import simulate
from pipeinfer.virtual.toml_text import ModelTimes, Overheads, disturbed_line, profile_toml
from plots.timeline import read_trace
from tests.support.jobs import environment, finish, launcher, run_json
from tests.support.toy import check_blocks

SIZES = Sizes((20, 20, 20, 20, 20, 20), 50)

MEASURED = """
embd = 288
[link]
latency_us = 20
gbit_per_s = 10
[head]
run_us = 100
[[stages]]
layers = 4
rows = [1, 2, 4]
layer_ms = [1.0, 1.5, 2.0]
[[stages]]
layers = 5
rows = [1, 4]
layer_ms = [1.0, 2.0]
output_ms = [3.0, 6.0]
context_ns = 10
run_us = 50
prompt_us = 40
[draft]
layers = 2
rows = [1]
layer_ms = [0.5]
"""


HARDWARE = """
[link]
latency_us = 20
gbit_per_s = 10
[nodes.one]
gb_per_s = 16
gflop_per_s = 1e9
[[cluster]]
node = "one"
count = {count}
[models.large]
layers = {n_layers}
embd = 64
layer_mb = {layer_mb}
layer_mparam = 1
output_mb = {output_mb}
output_mparam = 1
[models.small]
layers = 1
embd = 64
layer_mb = 1
layer_mparam = 1
output_mb = 1
output_mparam = 1
[pairs.both]
target = "large"
draft = "small"
acceptance = 0.7
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "profile.toml"
    path.write_text(text)
    return str(path)


def test_work_is_straight_between_its_points_and_goes_on_after_them() -> None:
    work = Work((1.0, 2.0, 4.0), (1.0, 1.5, 2.0), context_s=(0.001,))
    assert [work.at(n) for n in (1, 2, 3, 4, 8)] == pytest.approx([1.0, 1.5, 1.75, 2.0, 3.0])
    assert work.at(2, context=100) == pytest.approx(1.5 + 0.2)
    assert Work((1.0,), (0.5,)).at(9) == 0.5


def test_roofline_is_flat_until_arithmetic_takes_longer() -> None:
    work = roofline(n_bytes=100, flop_per_row=10, bytes_per_s=10, flop_per_s=4, fixed_s=1)
    assert [work.at(n) for n in (1, 2, 4, 5, 8)] == pytest.approx([11, 11, 11, 13.5, 21])
    assert roofline(1, 10, 1, 1).at(3) == pytest.approx(30), "bound by arithmetic from the first row on"


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_can_be_laid_out(name: str) -> None:
    file = load_profile(name)
    for pair in file.pairs:
        with_draft, without = file.lay_out(0, pair), file.lay_out(0, pair, has_draft=False)
        assert with_draft.n_ranks == without.n_ranks == file.n_nodes_max
        assert with_draft.n_stages == without.n_stages - len(with_draft.drafts)
        target = file.top.tables("pairs")[pair].text("target", list(file.top.tables("models")))
        layers = file.top.tables("models")[target].count("layers")
        assert sum(stage.layers for stage in with_draft.stages) == layers
        assert sum(stage.layers for stage in without.stages) == layers
        assert len(with_draft.acceptance) == len(with_draft.drafts) >= 1
        assert all(0.5 <= share < 0.9 for share in with_draft.acceptance)
        total_s = sum(stage.seconds(1, 0) for stage in with_draft.stages)
        assert 0.01 < total_s < 3, f"{total_s} s a token"
        assert all(draft.seconds(1, 0) < total_s for draft in with_draft.drafts)


def test_layers_go_where_they_are_fast() -> None:
    file = load_profile("pipeinfer-b")
    stages = file.lay_out(13, "dolphin-tinyllama").stages
    assert stages[0].layers > 3 * stages[-1].layers
    times = [stage.seconds(1, 0) for stage in stages]
    assert max(times[:7]) < 1.3 * min(times[:7])


def test_layers_need_room() -> None:
    file = load_profile("pipedec-14")
    nodes = list(file.machines())
    target, _, _ = file.models_of("")
    assert sum(share_layers(nodes[1:], target)) == 80
    with pytest.raises(UserError, match="more nodes"):
        share_layers(nodes[1:8], target)


def test_more_stages_than_layers_are_refused_for_that(tmp_path: Path) -> None:
    text = re.sub(r"layers = \d+", "layers = 2", (SHIPPED / "pipedec-14.toml").read_text())
    (tmp_path / "shallow.toml").write_text(text)
    profile = load_profile(str(tmp_path / "shallow.toml"))
    with pytest.raises(UserError, match=r"--nodes 9: .* has 2 layers, too few for 8 stages; give at most 3$"):
        profile.lay_out(9)
    assert len(profile.lay_out(3).stages) == 2


def test_a_measured_profile(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, MEASURED)).lay_out()
    assert profile.n_embd == 288 and profile.n_ranks == 3 and profile.acceptance == ()
    assert profile.stages[0].seconds(3, 0) == pytest.approx(4 * 1.75e-3)
    assert profile.stages[1].seconds(1, 1000) == pytest.approx(5 * (1e-3 + 1e-5) + 3e-3 + 50e-6)
    assert [stage.prompt_s for stage in profile.stages] == pytest.approx([0, 40e-6]), "it may be left out"
    assert profile.drafts[0].seconds(1, 0) == pytest.approx(1e-3)
    assert profile.link.latency_s == pytest.approx(20e-6) and profile.link.transfer_s(1.25e9) == pytest.approx(1)
    assert profile.head.run_s == pytest.approx(100e-6) and profile.head.verdict_s == 0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("embd = 288", "", "lacks embd"),
        ("embd = 288", "embd = 288\nblocks = 1", "true or false"),
        ("embd = 288", "embd = 288\nparked = 1", "true or false"),
        ("latency_us = 20", "latency_us = -1", "latency_us = -1"),
        ("gbit_per_s = 10", "gbit_per_s = 0", "above 0"),
        ("gbit_per_s = 10", 'gbit_per_s = "fast"', "'fast'"),
        ("layers = 4", "layers = 4.5", "whole number"),
        ("layer_ms = [1.0, 1.5, 2.0]", "layer_ms = [1.0, 1.5]", "3 numbers"),
        ("rows = [1, 2, 4]", "rows = [2, 1, 4]", "ascend"),
        ("layer_ms = [1.0, 1.5, 2.0]", "layer_ms = [0, 0.0, 2.0]", "above 0"),
        ("[link]", "[lin]", r"\[link\]"),
        ("[[stages]]", "[[stage]]", "stages"),
        ("embd = 288", "embd = ", "profile"),
        ("prompt_us = 40", "prompt_us = -40", "prompt_us = -40"),
        ("prompt_us = 40", 'prompt_us = "long"', "prompt_us = 'long'"),
    ],
)
def test_wrong_profiles_are_refused_with_the_place_and_the_way_out(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        load_profile(write(tmp_path, MEASURED.replace(old, new))).lay_out()


NUMBERS = ("nan", "inf", "-inf", "-1", "0", "1e308", "1e-308", "1e-9", "1e12", "1" + "0" * 400, "1" + "0" * 5000)


@pytest.mark.parametrize("text", [MEASURED, (SHIPPED / "flowspec.toml").read_text()], ids=["measured", "hardware"])
def test_odd_numbers_anywhere_are_refused_or_simulated(tmp_path: Path, text: str) -> None:
    text = re.sub("#.*", "", text)
    places = list(re.finditer(r"(?<![\w.])[0-9][0-9.]*(?![\w.\"])", text))
    assert len(places) > 10
    n_simulated = 0
    for place in places:
        for number in NUMBERS:
            path = write(tmp_path, text[: place.start()] + number + text[place.end() :])
            try:
                profile = load_profile(path).lay_out()
                first, *larger = synthetic_team([ranks_for(share) for share in profile.acceptance or (0.7,)], 0, 4)
                simulated = simulate(profile, first, PipeInfer(), 4, larger=larger)
            except UserError as error:
                assert len(str(error)) < 400
            else:
                n_simulated += 1
                assert all(map(math.isfinite, simulated.metrics.token_s)), (number, text[place.start() - 20 :])
    assert n_simulated > 5


def test_files_that_are_deep_nests_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "embd = " + "[" * 100_000)
    for read in (load_profile, lambda name: read_trace(Path(name))):
        with pytest.raises(UserError, match=r"profile\.toml"):
            read(path)
        write(tmp_path, "[" * 100_000)


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pipeinfer-c"):
        load_profile("nowhere")
    with pytest.raises(UserError, match="no profile"):
        load_profile(str(tmp_path / "x.toml"))


# -- measuring


def test_what_was_measured_makes_a_profile(tmp_path: Path) -> None:
    """A job of single rows through two stages of 1 and 2 ms, the second 4 µs more for each token of context: overheads
    of 0.1 ms a stage, 0.05 a hop, 0.3 the head."""
    stages = [
        ModelTimes(2, {1: 1e-3, 4: 2e-3}),
        ModelTimes(4, {1: 2e-3, 4: 4e-3}, 100, {1: 2.4e-3, 4: 4.8e-3}, reshape_s=0.2e-3),
    ]
    runs: tuple[list[StageRun], list[StageRun]] = ([], [])
    ledger = HeadLedger()
    at_s = 5.0
    for run_id in range(1, 12):
        ledger.submitted_s[run_id] = at_s
        first_s = at_s + 0.07e-3
        second_s = first_s + 1.1e-3 + 0.05e-3
        runs[0].append((run_id, at_s, first_s, first_s + 1.1e-3, False))
        end_s = second_s + 2.1e-3 + 4e-6 * run_id
        runs[1].append((run_id, at_s, second_s, end_s, False))
        at_s = end_s + 0.05e-3
        ledger.verdicts.append((at_s, run_id))
        at_s += 0.3e-3
    draft = ModelTimes(2, {1: 0.4e-3})
    extra = overheads(ledger, runs, stages, [0.5e-3] * 3, draft)
    assert extra.stage_s == pytest.approx((0.1e-3, 0.1e-3))
    found = (extra.hop_s, extra.run_s, extra.verdict_s, extra.draft_s)
    assert found == pytest.approx((0.05e-3, 0.02e-3, 0.3e-3, 0.1e-3))
    text = profile_toml(
        ["Measured."],
        64,
        SIZES,
        stages,
        [draft],
        extra,
        gbit_per_s=8.0,
        slowdown={1: [1.0, 1.25, 2.0], 32: [1.0, 1.5, 3.0]},
        blocks=True,
        parked=True,
    )
    profile = load_profile(write(tmp_path, text)).lay_out()
    assert profile.stages[0].seconds(1, 0) == pytest.approx(1.1e-3, rel=1e-3)
    assert profile.stages[1].seconds(1, 100) == pytest.approx(2.5e-3, rel=1e-3)
    assert profile.stages[1].seconds(1, 100, reshapes=True) == pytest.approx(2.7e-3, rel=1e-3)
    assert profile.stages[1].seconds(4, 100) == pytest.approx(4.9e-3, rel=1e-3), "attention costs rows in batches less"
    assert profile.drafts[0].seconds(1, 0) == pytest.approx(0.5e-3, rel=1e-3)
    assert profile.blocks and profile.parked and profile.link.bytes_per_s == pytest.approx(1e9)
    assert [profile.slowdown_at(3, n_rows) for n_rows in (1, 32, 128)] == [2.0, 3.0, 3.0]
    of_two = [profile.slowdown_at(2, n_rows) for n_rows in (1, 16, 32, 64)]
    assert of_two[0] < of_two[1] < of_two[2] == of_two[3] == 1.5
    assert profile.slowdown_at(1, 64) == 1.0 and profile.slowdown_at(9, 1) == 2.0


def measured_text(sizes: Sizes, counts: Sequence[int], rng: random.Random) -> str:
    """What `measure` writes of a rank for a draft and one for each of the stages, which are not equally fast."""
    stages = [ModelTimes(count, {1: count * rng.uniform(0.5e-3, 2e-3)}) for count in counts]
    extra = Overheads((0.0,) * len(stages), 1e-6, 0.0, 0.0, 0.0)
    return profile_toml(["Measured."], 64, sizes, stages, [ModelTimes(1, {1: 1e-3})], extra, gbit_per_s=8.0)


def test_simulate_splits_what_was_measured_as_run_does(tmp_path: Path) -> None:
    """Also without the draft, whose rank holds layers then."""
    rng = random.Random(3)
    for _ in range(20):
        n_layers, n_ranks = rng.randint(6, 40), rng.randint(2, 6)
        layers = tuple(rng.choice((1_000_003, 1_250_000)) for _ in range(n_layers))
        sizes = Sizes(layers, rng.randint(1, 9_000_000))
        with_draft = assign(n_ranks, [sizes], sizes)
        path = write(tmp_path, measured_text(sizes, [stage.last - stage.first for stage in with_draft.stages], rng))
        for n_drafts in (0, 1):
            profile = load_profile(path).lay_out(has_draft=bool(n_drafts))
            planned = [stage.last - stage.first for stage in assign(n_ranks, [sizes] * n_drafts, sizes).stages]
            assert [stage.layers for stage in profile.stages] == planned


def test_simulate_splits_over_equal_machines_as_run_does(tmp_path: Path) -> None:
    """Both know what a layer and the output table take: how fast the machines are is no matter if they are alike."""
    rng = random.Random(4)
    for _ in range(20):
        n_layers, n_ranks, layer_mb, output_mb = (rng.randint(*limits) for limits in ((8, 60), (2, 8), (1, 9), (1, 40)))
        path = write(
            tmp_path, HARDWARE.format(n_layers=n_layers, count=n_ranks, layer_mb=layer_mb, output_mb=output_mb)
        )
        sizes = Sizes((layer_mb,) * n_layers, output_mb)
        for n_drafts in (0, 1):
            profile = load_profile(path).lay_out(has_draft=bool(n_drafts))
            planned = [stage.last - stage.first for stage in assign(n_ranks, [sizes] * n_drafts, sizes).stages]
            assert [stage.layers for stage in profile.stages] == planned


def test_sizes_must_be_those_of_the_layers(tmp_path: Path) -> None:
    text = measured_text(SIZES, [2, 4], random.Random(1))
    assert [stage.layers for stage in load_profile(write(tmp_path, text)).lay_out(has_draft=False).stages] == [2, 3, 1]
    with pytest.raises(UserError, match=r"\[target\]: layer_bytes = .* give a list of 6 numbers"):
        load_profile(write(tmp_path, text.replace("[20, ", "["))).lay_out(has_draft=False)


def test_times_that_cannot_be_right_are_said() -> None:
    """Of more rows a run takes longer; chunks of prompts have kernels of their own."""
    fine = {1: 1e-3, 2: 1.2e-3, 4: 1.1e-3, 32: 9e-3, 64: 5e-3, 128: 8e-3}
    assert ModelTimes(2, fine).disorder == pytest.approx(1.2 / 1.1)
    assert not disturbed_line([ModelTimes(2, fine), ModelTimes(2, {1: 1e-3})])
    for size, seconds, words in ((2, 2.2e-3, "2.0 times"), (64, 24e-3, "3.0 times")):
        assert words in disturbed_line([ModelTimes(2, fine), ModelTimes(2, fine | {size: seconds})])


class TimedModel:
    """A model on a clock of its own: a run takes 1 ms, 0.1 ms a row, 1 µs a row and token before it, and 2 ms more if
    it has another size than the one before. Every seventh run is disturbed."""

    n_embd, is_last, disturbed_every = 8, True, 7

    def __init__(self) -> None:
        self.now_s, self.n_runs, self.n_rows_before = 0.0, 0, 0

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray:
        n_rows, self.n_runs = len(batch.positions), self.n_runs + 1
        disturbed_s = 0.5 if self.n_runs % self.disturbed_every == 0 else 0.0
        reshape_s = 2e-3 if n_rows != self.n_rows_before else 0.0
        context_s = 1e-6 * n_rows * int(batch.positions[0])
        self.now_s += 1e-3 + 1e-4 * n_rows + reshape_s + context_s + disturbed_s
        self.n_rows_before = n_rows
        return np.zeros((1, 4), np.float32)

    def apply(self, ops: Sequence[KvOp]) -> None:
        pass

    def next_position(self, seq: int) -> int:
        return 0


def test_a_model_is_timed_from_single_rows_to_chunks_of_prompts() -> None:
    model = TimedModel()
    found = time_model(ModelToTime(model, 2, 129, 1024), lambda: model.now_s, 1e9)
    assert list(found.by_rows)[-2:] == [64, 128]
    assert all(seconds == pytest.approx(1e-3 + 1e-4 * n_rows) for n_rows, seconds in found.by_rows.items())
    assert found.reshape_s == pytest.approx(2e-3) and found.rest_s == pytest.approx(0, abs=1e-9)
    assert [found.context_s(n_rows) for n_rows in (1, 5, 128, 500)] == pytest.approx([0.5e-6] * 4)


class BlockModel(TimedModel):
    """A prompt in blocks gets a context of its own, which takes 5 ms and has no graph yet; a block is a run to it."""

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray:
        check_blocks(batch)
        if batch.span:
            begins = int(batch.positions[0]) == 0
            self.now_s += 5e-3 * begins
            self.n_rows_before = 0 if begins else len(batch.positions)
        return super().evaluate(batch, stop)


def test_what_the_context_of_a_prompt_takes_is_told_apart_from_its_chunks(tmp_path: Path) -> None:
    model = BlockModel()
    found = time_model(ModelToTime(model, 2, 129, 1024, blocks=True), lambda: model.now_s, 1e9)
    assert all(seconds == pytest.approx(1e-3 + 1e-4 * n_rows) for n_rows, seconds in found.by_rows.items())
    assert found.prompt_s == pytest.approx(5e-3) and found.reshape_s == pytest.approx(2e-3)
    assert [found.context_s(n_rows) for n_rows in (1, 64, 128)] == pytest.approx([0.5e-6] * 3)
    extra = Overheads((0.0,), 0.0, 0.0, 0.0, 0.0)
    text = profile_toml([], 8, SIZES, [found], [found], extra, gbit_per_s=8.0, blocks=True)
    assert text.count("prompt_us = 5000\n") == 2
    stage = load_profile(write(tmp_path, text)).lay_out().stages[0]
    assert stage.seconds(128, 0) == pytest.approx(13.8e-3, rel=1e-3)
    assert stage.seconds(128, 0, begins=True) == pytest.approx(18.8e-3, rel=1e-3)


class Tiles(BlockModel):
    """Runs of guesses attend ten times as slowly as blocks do."""

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray:
        if batch.span is None:
            self.now_s += 9e-6 * len(batch.positions) * int(batch.positions[0])
        return super().evaluate(batch, stop)


def test_attention_of_chunks_is_timed_for_each_of_their_sizes() -> None:
    model = Tiles()
    found = time_model(ModelToTime(model, 2, 129, 1024, blocks=True), lambda: model.now_s, 1e9)
    assert [found.context_s(n_rows) for n_rows in (1, 32, 64, 128)] == pytest.approx([5e-6, 5e-6, 0.5e-6, 0.5e-6])


@pytest.mark.parametrize("budget_s", [1e9, 0.0])
def test_chunks_of_prompts_are_timed_in_blocks(budget_s: float) -> None:
    class Blocks(TimedModel):
        n_chunks = 0

        def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray:
            check_blocks(batch)
            assert bool(batch.span) == (len(batch.tokens) > 32)
            self.n_chunks += bool(batch.span)
            return super().evaluate(batch, stop)

    model = Blocks()
    time_model(ModelToTime(model, 2, 129, 1024, blocks=True), lambda: model.now_s, budget_s)
    assert model.n_chunks > 0


def test_a_chunk_is_timed_after_other_tokens_even_if_there_is_little_time() -> None:
    """What attention takes a single row says nothing of it."""

    class Slow(Tiles):
        disturbed_every = 10**9

        def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray:
            self.now_s += 10.0 * bool(batch.span)
            return super().evaluate(batch, stop)

    model = Slow()
    found = time_model(ModelToTime(model, 2, 129, 1024, blocks=True), lambda: model.now_s, 5.0)
    assert list(found.in_context_s) == [1, 64] and list(found.by_rows)[-1] == 64
    assert found.context_s(1) == pytest.approx(5e-6)
    assert found.context_s(64) == found.context_s(128) == pytest.approx(0.5e-6)


def test_little_time_is_enough_for_single_rows() -> None:
    model = TimedModel()
    found = time_model(ModelToTime(model, 2, 129, 1024), lambda: model.now_s, 0.0)
    assert list(found.by_rows) == [1] and found.context_s(1) >= 0


def test_ranks_of_one_host_slow_each_other_down() -> None:
    beside = [{1: 1e-3, 2: 1.2e-3, 3: 2e-3}, {1: 2e-3, 2: 2.8e-3, 3: 4e-3}, {1: 2.5e-3, 3: 5e-3}]
    assert slowdowns(beside) == pytest.approx([1.0, 1.3, 2.0])


LACKS = """
import sys
from pipeinfer.errors import UserError
from pipeinfer.job.loading import load as loading

load = loading.load_part
def refused(context, *arguments):
    if context.rank:
        raise UserError("target.gguf differs")
    return load(context, *arguments)

loading.load_part = refused
from pipeinfer.cli import main
main()
"""


def test_measure_says_which_rank_cannot_load() -> None:
    done = subprocess.run(
        [*launcher(2), sys.executable, "-c", LACKS, "measure", "-o", "m.toml", "-t", "1"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "target.gguf differs" in done.stderr, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("pipeinfer: ")]
    (line,) = [line for line in said if not line.startswith("pipeinfer: waiting for ")]
    assert line.startswith("pipeinfer: rank 1 (") and not Path("m.toml").exists()


def test_measure_writes_a_profile_that_simulate_takes(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    refused = finish(2, ["measure", "-o", str(path), "-t", "1", "--tolerance", "0"])
    assert refused.returncode and "foretells" in refused.stderr and not path.exists(), refused.stderr
    # what was measured is not lost where there is no room for it
    done = finish(2, ["measure", "-o", "/dev/full", "-t", "1", "--tolerance", "100"])
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "No space left on device" in last and last.endswith("the profile is on standard output"), last
    path.write_text(done.stdout)
    told = r"foretells [\d.]+ tokens/s without guesses, a job .* made [\d.]+: \d+\.\d% off, 10000% is accepted$"
    assert re.search(told, done.stderr, re.MULTILINE), done.stderr
    found = load_profile(str(path)).lay_out()
    assert "timing the models" in done.stderr, "it takes minutes where they are large"
    assert found.n_stages == 1 and len(found.slowdown) == len(found.slowdown_of_many) == 2
    assert finish(1, ["simulate", "--profile", str(path), "-n", "32"]).returncode == 0
    alone = load_profile(str(path)).lay_out(has_draft=False)
    run = run_json(2, ["-p", "x", "-n", "1", "-t", "1", "--policy", "iterative"])
    planned = [rank["layers"][1] - rank["layers"][0] for rank in run["ranks"]]
    assert [stage.layers for stage in alone.stages] == planned
    none = finish(1, ["measure", "-o", str(path), "-md", "none"])
    assert none.returncode == 2 and "measure needs a draft model" in none.stderr
    lone = finish(1, ["measure", "-o", str(path)])
    assert lone.returncode == 2 and "mpirun" in lone.stderr
