"""The trace of a real run: its tracks and messages fit together, and it can be drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from matplotlib import pyplot as plt

from pipeinfer.cli.simulate import simulate_command
from pipeinfer.errors import UserError
from pipeinfer.observe.trace import Arrow, TraceSpan, write_chrome_trace
from plot import write_timelines
from plots.timeline import Trace, draw_timelines, paint, window
from tests.support.jobs import ROOT, run_json

Event = dict[str, Any]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    result = run_json(3, ["-p", "def f", "-n", "24", "--temp", "0", "--ignore-eos", "--trace", str(path)])
    return result, path


def plot(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "plot.py"), *map(str, words)], capture_output=True, text=True, timeout=60
    )


def events_of(path: Path, **wanted: Any) -> list[Event]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if all(event.get(key) == value for key, value in wanted.items())]


def test_every_run_is_sent_evaluated_on_every_stage_and_answered(traced: tuple[dict[str, Any], Path]) -> None:
    result, path = traced
    n_runs = result["speculation"]["runs"]
    assert len(events_of(path, name="send", tid=0)) == len(events_of(path, name="verdict", tid=0)) == n_runs
    for rank in (1, 2):
        work = [event for kind in ("evaluate", "cancelled") for event in events_of(path, name=kind, tid=rank)]
        assert sorted(event["args"]["run"] for event in work) == list(range(1, n_runs + 1))
    hops = Counter((event["tid"], event["ph"]) for event in events_of(path, cat="message"))
    assert hops == {(rank, end): n_runs for rank in (0, 1, 2) for end in ("s", "f")}
    settled = sum(event["args"]["tokens"] for event in events_of(path, name="settle"))
    assert settled == len(result["tokens"]) == 24


def test_clocks_agree_and_a_stage_does_one_thing_at_a_time(traced: tuple[dict[str, Any], Path]) -> None:
    _, path = traced
    arrows: dict[int, dict[str, float]] = {}
    for event in events_of(path, cat="message"):
        arrows.setdefault(event["id"], {})[event["ph"]] = event["ts"]
    assert all(arrow["s"] <= arrow["f"] + 1.0 for arrow in arrows.values()), "ranks of one host read one clock"
    for rank in (1, 2):
        kinds = ("evaluate", "cancelled", "waiting", "idle")
        found = [event for kind in kinds for event in events_of(path, name=kind, tid=rank)]
        spans = sorted((event["ts"], event["ts"] + event.get("dur", 0.0)) for event in found)
        overlaps = [later[0] - earlier[1] for earlier, later in pairwise(spans)]
        assert min(overlaps) > -1.0, "microseconds"


def test_the_picture(traced: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    _, path = traced
    done = plot(path, "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        assert (tmp_path / f"trace.{suffix}").read_bytes().startswith(start)


def test_an_impossible_window_is_one_line(tmp_path: Path) -> None:
    done = plot(tmp_path / "trace.json", "--for", "-5")
    assert done.returncode == 2 and "--for above 0" in done.stderr and len(done.stderr.splitlines()) == 1


def test_what_is_drawn_begins_where_it_is_asked_and_is_never_empty() -> None:
    def event(name: str, at_ms: float, long_ms: float = 0.0) -> Event:
        return {"name": name, "tid": 0, "ts": 1e3 * at_ms, "dur": 1e3 * long_ms, "args": {}}

    events = [event("settle", at_ms) for at_ms in range(10, 50)] + [event("evaluate", 48.0, 4.0)]
    assert window(events, None, None) == (10.0, 22.0) and window(events, 20.5, None) == (20.5, 32.0)
    assert window(events, 45.0, None) == (45.0, 49.0) and window(events, 51.0, None) == (51.0, 52.0)
    assert window(events, 51.0, 30.0) == (51.0, 81.0) and window(events, 0.0, None) == (0.0, 21.0)
    for from_ms, for_ms, begins in ((0.0, 9.9, "10.0"), (20.25, 0.5, "21.0")):
        with pytest.raises(UserError, match=rf"--from {from_ms:g} --for {for_ms:g}: nothing .* begins at {begins} ms"):
            window(events, from_ms, for_ms)
    assert window(events, 50.0, 0.5) == (50.0, 50.5), "in the middle of something"
    with pytest.raises(UserError, match=r"--from 52: the trace ends at 52.0 ms; begin before"):
        window(events, 52.0, None)


def test_marks_at_the_edges_are_whole_and_questions_are_no_runs() -> None:
    def event(name: str, at_ms: float, long_ms: float = 0.0, tid: int = 0, **args: Any) -> Event:
        return {"name": name, "tid": tid, "ts": 1e3 * at_ms, "dur": 1e3 * long_ms, "args": args}

    events = [
        event("settle", 5.0, tokens=2),
        event("settle", 15.0, tokens=1),
        event("cancel", 15.0, runs=1),
        event("evaluate", 6.0, 4.0, 1, question=7),
        event("evaluate", 6.0, 4.0, 2, run=3),
        event("evaluate", 1.0, 20.0, 3, run=4),  # begins before the picture, and ends after it
    ]
    labels = {0: "rank 0: draft 1", 1: "rank 1: draft 2", 2: "rank 2: stage 0", 3: "rank 3: stage 1"}
    figure = paint([Trace("", labels, events, 5.0)], 10.0)
    (axes,) = figure.axes
    assert axes.get_xlim() == (0.0, 10.0)
    marks = [line for line in axes.lines if line.get_marker() in ("v", "x")]
    assert sorted(float(line.get_xdata()[0]) for line in marks) == [0.0, 10.0, 10.0]
    assert not any(line.get_clip_on() for line in marks)
    assert {text.get_text() for text in axes.texts} == {"2", "1", "q7", "3", "4"}
    assert "questions to a larger draft" in axes.get_xlabel()
    plt.close(figure)


def test_several_traces_take_the_same_time_and_tell_their_tokens(tmp_path: Path) -> None:
    """Of simulated pipelines: the head of one has a stage, that of the other a draft."""
    words = ["--profile", "ethernet", "--nodes", "4", "-n", "12"]
    for policy in ("iterative", "auto"):
        trace = ["--policy", policy, "--trace", str(tmp_path / f"{policy}.json")]
        assert CliRunner().invoke(simulate_command, [*words, *trace]).exit_code == 0
    paths = [tmp_path / f"{policy}.json" for policy in ("iterative", "auto")]
    figure = draw_timelines(paths, None, 5000.0)
    assert {axes.get_xlim() for axes in figure.axes} == {(0.0, 5.0)} and len(figure.axes) == 2
    for path, axes in zip(paths, figure.axes, strict=True):
        times_s = [(event["ts"] / 1e6, event["args"]["tokens"]) for event in events_of(path, name="settle")]
        assert sum(tokens for _, tokens in times_s) == 12
        n_tokens = sum(tokens for at_s, tokens in times_s if 0 < at_s - times_s[0][0] <= 5.0)
        assert axes.get_title(loc="left") == f"{path.stem}: {n_tokens} tokens in 5 s"
        assert len(axes.get_yticks()) == 4
    plt.close(figure)
    done = plot(*paths, tmp_path / "results.csv")
    assert done.returncode == 2 and "one table, or traces" in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "trace.json"),
        ("{}", "not a trace"),
        ("[1, 2]", "not a trace"),
        ('{"traceEvents": [{"ph": "X"}]}', "not a trace"),
        ('{"traceEvents": [{"ph": "X", "name": "draft", "tid": 0, "ts": "now", "args": {}}]}', "not a trace"),
        ('{"traceEvents": [', "not a trace"),
        ("\xd0" * 10_000, "not a trace"),
    ],
)
def test_a_bad_trace_is_one_line(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    with pytest.raises((UserError, OSError)) as caught:
        write_timelines([path], tmp_path, None, None)
    said = str(caught.value)
    assert words in said and "\n" not in said and len(said) < 400


def test_what_cannot_be_drawn_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("{}")
    for name, words in (("trace.json", "not a trace"), ("none.json", "none.json: No such file")):
        done = plot(tmp_path / name)
        assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_arrows_and_moments(tmp_path: Path) -> None:
    tracks = [
        ("rank 0", [TraceSpan("send", 1.0, 1e-6, {"run": 1})]),
        ("rank 1", [TraceSpan("evaluate", 1.5, 0.5), TraceSpan("cancel", 2.0)]),
    ]
    write_chrome_trace(tmp_path / "trace.json", tracks, [Arrow(1, 0, 1.0, 1, 1.5)])
    assert [event["ts"] for event in events_of(tmp_path / "trace.json", cat="message")] == [0.0, 0.5e6]
    assert events_of(tmp_path / "trace.json", name="cancel")[0]["ph"] == "i"
