"""`pipeinfer bench` of many requests at a time: who asks when, what is measured, going on after an interruption."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib import pyplot as plt

from pipeinfer.cli.bench import bench
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.bench.bench import Arrivals, Bench
from pipeinfer.job.bench.sweep import LoadCase, Variant, n_requests
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.text_sections import Loads
from pipeinfer.job.placement.job_plan import engine_settings
from pipeinfer.job.requests.bench_prompts import BenchPrompt, first_turns, read_prompts
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.session.result import ExperimentSettings
from pipeinfer.models.demo import TARGET
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.columns import LOAD_COLUMNS, Record
from pipeinfer.observe.summary import print_loads, summarise_loads
from pipeinfer.observe.table import LOADS, RESULTS
from pipeinfer.policies import PipeInfer
from pipeinfer.virtual.simulation import arrivals_s
from plot import draw
from plots.frames import frame_of
from plots.loads import FACETS, FIGURES
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import ROOT, finish, start
from tests.support.paces import pace_words, slow_target
from tests.support.planned import options_of
from tests.support.rows import make_load, make_row
from tests.test_plot import overlaps, texts

SHAPE = Shape(n_layer=6, peaky=12.0, n_strong=2, weak=0.1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_model(folder / "target.gguf", SHAPE)
    draft = write_model(folder / "draft.gguf", replace(SHAPE, n_layer=2))
    lines = [{"turns": ["the model of a rank", "again"]}, {"prompt": "a token is in the layer"}, {"prompt": "of the"}]
    (folder / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["-m", str(target), "-md", str(draft), "-t", "1", "--prompts", str(folder / "asked.jsonl")]


def rows_of(path: Path) -> list[Record]:
    return LOADS.read(path)


# -- who asks when


def case_of(n: int, concurrency: int, rate: float = math.nan, seed: int = 3) -> LoadCase:
    request = GenerationRequest((1, 2), 4, 6, SamplingParams(seed=seed), frozenset())
    options = options_of(model=Path("m"), predict=4)
    return LoadCase(variant_of(options), 1, (request,) * n, "x", concurrency, rate, 1)


def variant_of(options: RunOptions) -> Variant:
    return Variant(ExperimentSettings.of(options), engine_settings(options.speculation, 1, rewinds=True))


def test_a_client_asks_again_when_it_has_its_text() -> None:
    arrivals = Arrivals(case_of(5, 2), 10.0)
    assert list(arrivals.due_s) == [10.0, 10.0]
    for ended_s in (11.0, 12.5, 13.0, 14.0):
        assert arrivals.is_due(ended_s)
        arrivals.begin()
        arrivals.ended(ended_s)
    assert arrivals.n_begun == 4 and list(arrivals.due_s) == [13.0], "five in all"
    assert list(Arrivals(case_of(2, 4), 0.0).due_s) == [0.0, 0.0], "more clients than requests"


def test_requests_come_at_random_as_in_a_simulation() -> None:
    arrivals = Arrivals(case_of(400, 0, 8.0), 100.0)
    assert [when_s - 100.0 for when_s in arrivals.due_s] == pytest.approx(arrivals_s(400, 8.0, 3))
    gaps_s = [after - before for before, after in zip(arrivals.due_s, list(arrivals.due_s)[1:], strict=False)]
    mean_s = sum(gaps_s) / len(gaps_s)
    assert mean_s == pytest.approx(1 / 8, rel=0.15)
    deviation_s = math.sqrt(sum((gap - mean_s) ** 2 for gap in gaps_s) / len(gaps_s))
    assert deviation_s == pytest.approx(mean_s, rel=0.2), "as a Poisson process has it"
    assert not arrivals.is_due(99.9) and arrivals.is_due(100.0)
    arrivals.ended(101.0)
    assert len(arrivals.due_s) == 400, "nobody comes because somebody has ended"


def test_no_load_begins_with_what_another_one_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(model=Path("m"), predict=4, policy=PipeInfer())
    case = replace(case_of(2, 1), variant=variant_of(options))
    began: list[tuple[bool, float]] = []

    def carry(head: Bench, session: Any, case: LoadCase) -> Record:
        assert len({id(request.policy) for request in case.requests}) == 1, "a load's requests share what it learns"
        policy = case.requests[0].policy.begin()
        assert isinstance(policy, PipeInfer)
        began.append((policy.pacing, policy.calibration.hit_rate))
        policy.calibration.hit_rate = 0.9
        return {}

    monkeypatch.setattr(Bench, "_carry", carry)
    monkeypatch.setattr(Bench, "_keep_load", MagicMock())
    head: Any = Bench(MagicMock(flag=MagicMock(reason="")), MagicMock(warm_up=1, base=options), [])
    variant = replace(case, variant=variant_of(options.changed(policy=replace(PipeInfer(), pacing=False))))
    session = MagicMock()
    head.measure(session, MagicMock(cases=(case, variant, case)))
    assert began == [(True, 0.5), (True, 0.5), (False, 0.5), (True, 0.5)] and session.ranks.unlearn.call_count == 4


# -- real jobs


def test_loads_are_measured_and_resumed(pair: list[str], tmp_path: Path) -> None:
    results = tmp_path / "load.csv"
    words = ["bench", *pair, "-n", "8", "--policy", "iterative,speculative", "--concurrency", "1,3", "--rate", "30"]
    words += ["--requests", "7", "--results", str(results), "-o", "jsonl"]
    done = finish(3, words)
    assert done.returncode == 0, done.stderr
    rows = rows_of(results)
    assert [(row["policy"], row["concurrency"]) for row in rows] == [
        (policy, count) for policy in ("iterative", "speculative") for count in (1, 3, 0)
    ]
    assert len({LOADS.key_of(row) for row in rows}) == 6
    for row in rows:
        assert (
            row["cache_n"] < row["prompt_n"]
            and row["predicted_n"] == 7 * 8
            and row["parallel"] == 32
            and row["prompt"] == "asked"
        )
        assert row["predicted_per_second"] * row["wall_s"] == pytest.approx(56)
        assert row["ttft_p50_s"] <= row["ttft_p90_s"] <= row["ttft_p99_s"] <= row["ttft_percentiles_s"][100] * 1.001
        assert len(row["itl_percentiles_s"]) == len(row["tpot_percentiles_s"]) == 101
        assert row["open_max"] <= (row["concurrency"] or 7) and 0 < max(row["busy"]) <= 1
        assert len(row["busy"]) == len(row["layers"]) and len(row["busy_s"]) == 3
        assert math.isnan(row["rate"]) == (row["concurrency"] > 0)
    assert {row["open_max"] for row in rows if row["concurrency"]} == {1, 3}
    assert len(done.stdout.splitlines()) == 6

    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:2] + lines[3:]))
    again = finish(3, [*words, "--resume"])
    assert again.returncode == 0 and "1 load to measure, 7 requests" in again.stderr, again.stderr
    assert sorted(map(LOADS.key_of, rows_of(results)), key=str) == sorted(map(LOADS.key_of, rows), key=str)
    nothing = finish(3, [*words, "--resume"])
    assert nothing.returncode == 0 and not nothing.stdout, nothing.stdout
    assert f"nothing left to measure: {results} has it all" in nothing.stderr, nothing.stderr


def test_who_comes_while_others_are_open_waits_and_that_counts(pair: list[str], tmp_path: Path) -> None:
    results = tmp_path / "load.csv"
    words = ["--rate", "1000", "--parallel", "1", "--requests", "6", "-n", "100", "-md", "none", "--results"]
    done = finish(1, ["bench", *pair[:2], *pair[4:], *words, str(results)])
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(results)
    assert row["open_max"] == 1 and row["policy"] == "iterative"
    least_s, waited_s = 99 * row["tpot_percentiles_s"][0], row["ttft_percentiles_s"][::20]
    assert list(waited_s) == sorted(waited_s)
    assert 4 * least_s < waited_s[-1] < row["wall_s"], "the last waits for five others"
    plain = tmp_path / "results.csv"
    RESULTS.append(plain, make_row())
    for file, load in ((plain, True), (results, False)):
        mixed = finish(
            1, ["bench", *pair[:2], "-p", "9", *(["--concurrency", "2"] if load else []), "--results", str(file)]
        )
        assert mixed.returncode == 2 and "has other columns" in mixed.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--requests", "4"], "are of loads"),
        (["--parallel", "4"], "are of loads"),
        (["--concurrency", "8", "--parallel", "4"], "--parallel 4 is less than --concurrency 8"),
        (["--concurrency", "8", "--requests", "4"], "--requests 4 are fewer than the clients"),
        (["--concurrency", "2,2"], "--concurrency has 2 twice"),
        (["--rate", "0.5,0.5"], "--rate has 0.5 twice"),
        (["--rate", "1", "--turns", "2"], "--turns 2"),
        (["--rate", "1", "--sequences", "4"], "--sequences 4 is less than --parallel 32"),
    ],
)
def test_what_is_asked_wrongly_is_said(words: list[str], said: str) -> None:
    found = CliRunner().invoke(bench, ["-p", "9", *words])
    assert isinstance(found.exception, UserError) and said in str(found.exception), found


def test_a_context_without_room_for_all_clients_is_refused(pair: list[str]) -> None:
    done = finish(1, ["bench", *pair, "--concurrency", "4", "-n", "50", "-c", "100"])
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "-c 100 has no room for 4 requests" in done.stderr


def test_how_many_requests_a_load_has() -> None:
    clients = Loads(concurrencies=(1, 16))
    assert n_requests(clients, 3) == 32 and n_requests(clients, 80) == 80
    assert n_requests(Loads(rates=(0.5,)), 80) == 80 and n_requests(Loads(concurrencies=(4,), requests=9), 80) == 9


def test_lines_with_a_prompt_are_questions(pair: list[str]) -> None:
    assert [prompt.text for prompt in read_prompts(pair[-1], 0)] == [
        "the model of a rank",
        "a token is in the layer",
        "of the",
    ]


def test_prompts_of_a_length_are_other_parts_of_a_text() -> None:
    """Requests that are alike would share cells, and the first of them alone would read its prompt."""
    tokenizer = Tokenizer(TARGET)
    for n in (40, 5000):
        found = first_turns([BenchPrompt("pp", n_tokens=n), BenchPrompt("a", "def f")], 9, tokenizer, 0)
        lengths, others = found[::2], found[1::2]
        assert {len(tokens) for tokens in lengths} == {n} and len({tokens[:30] for tokens in lengths}) == 5
        assert {tokens[0] for tokens in lengths} == {tokenizer.bos} and len(set(others)) == 1
    assert first_turns([BenchPrompt("pp", n_tokens=40)], 1, tokenizer, 0)[0] == lengths[0][:40]
    tokenizer.close()


def test_ctrl_c_keeps_the_loads_that_are_complete(pair: list[str], tmp_path: Path) -> None:
    results = tmp_path / "load.csv"
    pace = pace_words(tmp_path, slow_target(5.0, stages=1))
    words = ["--concurrency", "2", "-n", "4,2000", "--policy", "iterative", "--results", str(results)]
    job = start(2, ["bench", *pair, *words, *pace], start_new_session=True)
    assert job.stderr
    said = ""
    while "[1] iterative, 2 clients, n 4" not in said:
        said += (line := job.stderr.readline())
        assert line, said
    job.send_signal(signal.SIGINT)
    out, rest = job.communicate(timeout=60)
    assert job.returncode and "--resume goes on from it" in rest, rest
    assert len(rows_of(results)) == 1 and "2 clients" in out and "Traceback" not in rest


# -- tables and figures


def table() -> list[Record]:
    return [
        LOADS.as_read(make_load(policy, count, rate, seed=repetition, repetition=repetition))
        for policy in ("iterative", "speculative", "pipeinfer")
        for count, rate in ((1, math.nan), (4, math.nan), (16, math.nan), (0, 0.5), (0, 2.0))
        for repetition in (1, 2)
    ]


def test_repetitions_are_averaged_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table()
    rows[1] |= {"predicted_per_second": 30.0, "busy": (0.7, 0.8)}
    found = summarise_loads(rows)
    assert len(found) == 15 and {load["samples"] for load in found} == {2}
    assert found[0]["predicted_per_second"] == 20.0 and found[0]["busy"] == pytest.approx((0.6, 0.7))
    print_loads(rows, "md")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 17 and "1 client " in lines[2] and "0.5/s, 16 at a time" in lines[5]
    assert len({len(line) for line in lines}) == 1, "columns stand under each other"


def test_who_comes_faster_than_answered_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        LOADS.as_read(make_load("iterative", 0, rate, served_per_second=served))
        for rate, served in ((20.0, 3.0), (2.0, 1.9))
    ]
    print_loads(rows[1:], "md")
    assert " of " not in capsys.readouterr().out
    print_loads([*rows, LOADS.as_read(make_load())], "md")
    first, *others, _, line = capsys.readouterr().out.splitlines()[2:]
    assert (
        " 3.00 of 20.00 " in first and not any(" of " in other for other in others) and "the longer they wait" in line
    )


MANY = {
    "options": "lookup, batch-size 64, ctx-size 5000, max-delay 0.2",
    "temp": 0.7,
    "top_k": 10,
    "numerics": "fast",
    "repeat_penalty": 1.2,
    "n_requests": 7,
    "model": "a-long-name-of-a-model-" * 3,
    "model_hash": "ff",
}


@pytest.mark.parametrize("others", [{}, MANY])
def test_every_figure_of_loads_and_no_overlapping_text(others: Record) -> None:
    """Nor cut: also where loads differ in much."""
    drawn = []
    for name, figure in draw([*table(), *([row | others for row in table()] if others else [])], has_loads=True):
        drawn.append(name)
        width, height = figure.canvas.get_width_height()
        for text in (shown := texts(figure)):
            box = text.get_window_extent()
            assert min(box.x0, box.y0) >= 0 and box.x1 <= width and box.y1 <= height, (name, text.get_text())
        asked = "7 to " if others else ""
        note = " ".join(figure.get_supxlabel().split())
        assert f"A load: {asked}" in note and "tokens each" in note
        assert not overlaps(shown), name
    assert drawn == list(FIGURES)


def test_ablations_are_lines_of_their_own_and_a_policy_looks_the_same_everywhere() -> None:
    rows = [
        LOADS.as_read(make_load("speculative", n, variant=variant)) for n in (1, 4) for variant in ("", "no-cancel")
    ]
    colours = []
    for found in (rows, [*rows, LOADS.as_read(make_load("iterative", 1))]):
        for name, figure in draw(found, has_loads=True):
            drawn = {str(line.get_label()): line.get_color() for panel in figure.axes for line in panel.lines}
            assert drawn["speculative"] != drawn["speculative, no-cancel"], name
            colours.append((drawn["speculative"], drawn["speculative, no-cancel"]))
    assert len(set(colours)) == 1 and len(colours) == 2 * len(FIGURES)


def test_the_busiest_stage_is_the_same_in_table_and_figure(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [LOADS.as_read(make_load(repetition=n, busy=busy)) for n, busy in ((1, [0.5, 0.9]), (2, [0.8, 0.2]))]
    print_loads(rows, "md")
    figure = FIGURES["load_utilisation"](frame_of(rows, LOAD_COLUMNS))
    assert figure and "65.0%" in capsys.readouterr().out
    assert pytest.approx([65.0]) in [numbers(line.get_ydata()) for line in figure.axes[0].lines]
    plt.close("all")


def numbers(data: Any) -> list[float]:
    return [float(each) for each in np.asarray(data)]


def test_lines_go_through_the_means() -> None:
    rows = table()
    rows[1] |= {"predicted_per_second": 30.0}
    figure = FIGURES["load_curves"](frame_of(rows, LOAD_COLUMNS))
    assert figure
    lines = {str(line.get_label()): line for line in figure.axes[0].lines}
    assert numbers(lines["iterative"].get_xdata()) == [1.0, 4.0, 16.0]
    assert numbers(lines["iterative"].get_ydata()) == [20.0, 40.0, 160.0]
    assert numbers(lines["pipeinfer"].get_ydata()) == [20.0, 80.0, 320.0]
    (rates,) = [line for line in figure.axes[4].lines if line.get_label() == "pipeinfer"]
    assert numbers(rates.get_xdata()) == [0.5, 2.0]
    drawn = [numbers(line.get_ydata()) for line in figure.axes[1].lines if len(numbers(line.get_xdata())) == 3]
    assert [line[0] for line in drawn[:3]] == pytest.approx([180.0] * 3), "medians of all policies, in ms"
    plt.close("all")


@pytest.mark.parametrize("name", FACETS)
def test_loads_that_were_asked_otherwise_are_never_pooled(name: str) -> None:
    kind = {column.name: column.kind for column in LOAD_COLUMNS}[name]
    other: Any = {"text": "other", "integer": 99, "number": 0.5, "integers": (9,), "numbers": (9.0,)}[kind]
    row = LOADS.as_read(make_load())
    figure = FIGURES["load_utilisation"](frame_of([row, row | {name: other}], LOAD_COLUMNS))
    assert figure and len({panel.get_title() for panel in figure.axes}) == 2
    plt.close("all")


def test_files_from_a_table_of_loads(tmp_path: Path) -> None:
    for row in (make_load(), make_load("iterative")):
        LOADS.append(tmp_path / "load.csv", row)
    command = [sys.executable, str(ROOT / "plot.py"), str(tmp_path / "load.csv")]
    nobody, names = os.pipe()
    os.close(nobody)
    done = subprocess.run(command, stdout=names, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(names)
    assert done.returncode == 0 and not done.stderr, "whoever reads their names, the files are written"
    for name in FIGURES:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
        assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")
