"""plot.py as a user starts it, and what its figures show."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from pipeinfer.observe.columns import COLUMNS, KEY, Record
from pipeinfer.observe.summary import markdown, summarise
from pipeinfer.observe.table import LOADS, RESULTS, lines_of
from plot import draw
from plots.charts import POLICY_LOOKS
from plots.frames import SHOWN, frame_of, points
from plots.original import original_rows
from plots.results import FACETS, FIGURES, USES
from tests.support.jobs import ROOT, environment
from tests.support.rows import SPEEDS, make_load, make_row


@pytest.fixture(autouse=True)
def no_figure_left() -> Iterator[None]:
    yield
    plt.close("all")


PNG = b"\x89PNG"


def drawn(name: str, rows: list[Record]) -> Figure | None:
    return FIGURES[name](frame_of(rows, COLUMNS))


def table(name: str = "big.gguf") -> list[Record]:
    rows = []
    for ranks in (3, 4, 8):
        for policy, speed in SPEEDS.items():
            for prompt in ("program", "tale", "gsm8k/1", "gsm8k/2"):
                for repetition in (1, 2):
                    rows.append(make_row(policy, prompt, repetition, ranks=ranks, speed=speed + repetition))
        for variant in ("no-cancel", "no-continuous"):
            rows += [make_row("pipeinfer", "tale", 1, ranks=ranks, speed=11.0, variant=variant)]
    return [RESULTS.as_read(row | {"model": name}) for row in rows]


def plot(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "plot.py"), *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


def texts(figure: Figure) -> list[Text]:
    """What is drawn: of the ticks, those within the axes."""
    figure.draw_without_rendering()
    found = figure.findobj(Text)
    hidden = {
        id(tick.label1)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    figure.draw_without_rendering()  # asking for the ticks has moved them
    return [text for text in found if text.get_visible() and text.get_text().strip() and id(text) not in hidden]


def overlaps(drawn: Iterable[Text]) -> list[tuple[str, str]]:
    boxes = [(text.get_text(), text.get_window_extent()) for text in drawn]
    return [
        (one, other) for (one, box), (other, later) in combinations(boxes, 2) if box.shrunk(0.98, 0.9).overlaps(later)
    ]


@pytest.mark.parametrize("name", ["big.gguf", "$\\frac{1}{" + "long-name-" * 20 + "\x07"])
def test_every_figure_and_no_overlapping_text(name: str) -> None:
    names = []
    for title, figure in draw(table(name), has_loads=False):
        names.append(title)
        assert not overlaps(texts(figure)), title
    assert names == list(FIGURES)


def test_bars_are_the_means() -> None:
    figure = drawn("speed", [row for row in table() if row["ranks"] == 3])
    assert figure is not None
    assert heights(figure) == pytest.approx([SPEEDS[policy] + 1.5 for policy in SPEEDS])
    assert "tokens/s" in figure.axes[0].get_ylabel()


def panel_titles(figure: Figure | None) -> list[str]:
    assert figure is not None
    return [axes.get_title() for axes in figure.axes]


def heights(figure: Figure | None) -> list[float]:
    assert figure is not None
    return [patch.get_height() for axes in figure.axes for patch in axes.patches if isinstance(patch, Rectangle)]


def whiskers(figure: Figure | None) -> list[tuple[float, float]]:
    """(lowest, highest) of each."""
    assert figure is not None
    lines = [line for axes in figure.axes for line in axes.collections if isinstance(line, LineCollection)]
    ends = [[point[1] for point in segment] for line in lines for segment in line.get_segments()]
    return [(min(pair), max(pair)) for pair in ends]


def note_of(figure: Figure | None) -> str:
    assert figure is not None
    return " ".join(figure.get_supxlabel().split())


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("predicted_n", 128, "128 tokens"),
        ("temp", 0.8, "temperature 0.8"),
        ("top_k", 3, "top k 3"),
        ("numerics", "fast", "fast"),
        ("options", "ctx-size 512", "ctx-size 512"),
        ("threads", [4, 4, 4], "4 threads a rank"),
        ("threads", [1, 1, 1], "1 thread a rank"),
        ("threads", [1, 2, 3], "threads 1,2,3"),
        ("model_hash", "ffff567890abcdef", "#ffff"),
        ("model_draft_hash", "ffff567890abcdef", "#ffff"),
        ("pace", "other", "on other"),
        ("pace_hash", "ffff567890abcdef", "#ffff"),
    ],
)
def test_what_differs_is_never_pooled(column: str, value: Any, words: str) -> None:
    """It gets a panel of its own, whose title names it."""
    rows = [RESULTS.as_read(make_row(speed=speed, **more)) for speed, more in ((10.0, {}), (30.0, {column: value}))]
    for name in ("speed", "time", "latencies"):
        titles = dict.fromkeys(panel_titles(drawn(name, rows)))
        assert len(titles) == 2 and any(words in title for title in titles), (name, titles)
    assert heights(drawn("speed", rows)) == [10.0, 30.0]
    assert note_of(drawn("speed", rows)).startswith("Each bar is one generation.")


@pytest.mark.parametrize(
    ("column", "value", "words"), [("settings", "width 1", "width 1"), ("layers", [1, 7], "layers 1,7")]
)
def test_settings_and_splits_are_bars_of_their_own(column: str, value: Any, words: str) -> None:
    rows = [RESULTS.as_read(make_row(speed=speed, **more)) for speed, more in ((10.0, {}), (30.0, {column: value}))]
    figure = drawn("speed", rows)
    assert heights(figure) == [10.0, 30.0] and len(panel_titles(figure)) == 1
    assert figure and any(words in text.get_text() for text in figure.legends[0].get_texts())


def test_every_asked_column_is_shown_or_keeps_rows_apart() -> None:
    assert set(SHOWN) | set(FACETS) == set(KEY)


def test_prompts_of_one_name_are_told_apart() -> None:
    rows = [
        RESULTS.as_read(make_row(prompt=name, speed=10.0) | {"prompt_hash": digest})
        for name, digest in (("tale", "aaaa"), ("tale", "bbbb"), ("set/1", "c"), ("set/2", "d"))
    ]
    figure = drawn("prompts", rows)
    assert figure is not None
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert shown == ["tale #aaaa", "tale #bbbb", "set"]


def test_prompts_are_in_the_same_places_in_all_panels() -> None:
    rows = [
        RESULTS.as_read(make_row(prompt=prompt, ranks=ranks))
        for ranks, prompt in ((2, "c"), (2, "a"), (3, "a"), (3, "b"))
    ]
    figure = drawn("prompts", rows)
    assert figure and len(figure.axes) == 2
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_xticklabels()] == ["c", "a", "b"]


def test_figures_can_be_read_without_colours() -> None:
    """Curves differ in their dashes; what lies beside each other in its grey or its hatch."""
    dashes = [look.dashes for look in POLICY_LOOKS.values()]
    assert len({str(each) for each in dashes}) == len(POLICY_LOOKS)
    bars = [(look.colour, look.hatch) for look in POLICY_LOOKS.values()]
    uses = [(colour, hatch) for _, colour, hatch in USES.values()]
    for one, other in [*combinations(bars, 2), *pairwise(uses)]:
        greys = [np.dot(to_rgb(colour), (0.299, 0.587, 0.114)) for colour, _ in (one, other)]
        assert one[1] != other[1] or abs(greys[0] - greys[1]) > 0.1, (one, other)


def test_distributions_are_steps_of_what_was_measured() -> None:
    gaps = np.array([0.0, 0.0, 0.01, 0.02, 0.02, 0.4])
    row = make_row(predicted_n=7) | {"itl_percentiles_s": list(np.percentile(gaps, range(101)))}
    figure = drawn("latencies", [RESULTS.as_read(row)])
    assert figure
    (line,) = figure.axes[0].lines
    assert np.asarray(line.get_xdata()) == pytest.approx([0.0, *(1e3 * gaps)], abs=1e-3)
    assert np.asarray(line.get_ydata()) == pytest.approx([each / 6 for each in range(7)])
    assert line.get_drawstyle() == "steps-post"


@pytest.mark.parametrize("n", [1, 2, 8, 50, 101])
def test_percentiles_are_the_values_they_are_of(n: int) -> None:
    values = np.sort(np.random.default_rng(n).exponential(size=n))
    found, weights = points(np.percentile(values, range(101)), n)
    assert found == pytest.approx(values) and list(weights) == [1.0] * n


def test_percentiles_of_more_values_or_of_another_number_stay_percentiles() -> None:
    values = np.random.default_rng(0).exponential(size=300)
    percentiles = np.percentile(values, range(101))
    for n in (300, 20):
        found, weights = points(percentiles, n)
        assert found == pytest.approx(percentiles) and weights.sum() == pytest.approx(n)


def test_whiskers_say_what_they_are_and_stay_above_0() -> None:
    rows = [RESULTS.as_read(make_row(speed=speed, repetition=at)) for at, speed in enumerate((1.0, 1.0, 10.0), start=1)]
    figure = drawn("speed", rows)
    ((low, high),) = whiskers(figure)
    assert low == 0.0 and high == pytest.approx(4 + 27**0.5)
    assert note_of(figure).startswith(
        "Bars: means over n = 3 generations (3 repetitions); whiskers: one sample "
        "standard deviation over repetitions of the same prompt."
    )
    assert whiskers(drawn("speed", rows[:1])) == [], "a single sample has none"
    more = [*rows, RESULTS.as_read(make_row(prompt="other")), RESULTS.as_read(make_row("iterative"))]
    assert "n = 1 to 4" in note_of(drawn("speed", more)) and panel_titles(drawn("speed", more)) == [
        "big + small\nn = 1 to 4"
    ]
    assert "Not all bars average over the same prompts" in note_of(drawn("speed", more))
    assert "mean" in heights_label(figure)


def test_whiskers_are_of_repetitions_and_not_of_prompts() -> None:
    def row(prompt: str, repetition: int, speed: float) -> Record:
        return RESULTS.as_read(make_row(prompt=prompt, repetition=repetition, speed=speed))

    rows = [row("slow", 1, 10.0), row("slow", 2, 12.0), row("fast", 1, 100.0), row("fast", 2, 104.0)]
    ((low, high),) = whiskers(drawn("speed", rows))
    assert (high - low) / 2 == pytest.approx(((2 + 8) / 2) ** 0.5)
    alone = drawn("speed", rows[::2])
    assert heights(alone) == [55.0] and whiskers(alone) == [] and "whiskers" not in note_of(alone)
    assert "n = 2 generations (2 prompts)" in note_of(alone)


def test_a_prompt_that_was_repeated_weighs_no_more() -> None:
    rows = [
        RESULTS.as_read(make_row("iterative", prompt, repetition, speed=speed))
        for prompt, repetition, speed in (("tale", 1, 10.0), ("tale", 2, 10.0), ("tale", 3, 10.0), ("gsm8k/1", 1, 20.0))
    ]
    assert heights(figure := drawn("speed", rows)) == [15.0]
    assert "(2 prompts, 3 repetitions), each prompt weighed alike;" in note_of(figure)
    assert "weighed" not in note_of(drawn("speed", rows[:1] + rows[3:]))


def test_time_to_first_token_says_what_it_counts_from() -> None:
    figure = drawn("ttft", [RESULTS.as_read(make_row())])
    assert figure and "from submission" in figure.legends[0].get_title().get_text()


def heights_label(figure: Figure | None) -> str:
    assert figure is not None
    return figure.axes[0].get_ylabel()


def test_acceptance_stands_beside_the_speed() -> None:
    rows = [RESULTS.as_read(make_row(policy)) for policy in SPEEDS]
    for name in ("speed", "ttft"):
        figure = drawn(name, rows)
        assert figure is not None
        shown = [text.get_text() for text in figure.axes[0].texts if text.get_text()]
        assert ("% on a bar: acceptance rate" in figure.axes[0].get_ylabel()) == (name == "speed")
        assert shown == (["80%", "80%"] if name == "speed" else [])


def test_bars_of_policies_whose_guesses_never_reached_the_target_say_so() -> None:
    worked = {"iterative": (0, 0), "speculative": (60, 5), "pipeinfer": (0, 0)}
    rows = [
        RESULTS.as_read(make_row(policy)) | {"draft_steps": n_steps, "draft_n_sent": n_sent}
        for policy, (n_steps, n_sent) in worked.items()
    ]
    figure = drawn("speed", rows)
    assert figure is not None
    assert [text.get_text() for text in figure.axes[0].texts if text.get_text()] == ["80%", "none"]
    assert "none: no guess went to the target" in note_of(figure)
    assert "none" not in note_of(drawn("speed", [row | {"draft_n_sent": 1} for row in rows]))


@pytest.mark.parametrize("column", ["settings", "options", "model"])
def test_what_differs_at_the_end_of_a_long_text_is_never_pooled(column: str) -> None:
    long = "width 4, microbatch 0, inflight 0, p-accept 0."
    rows = [
        RESULTS.as_read(
            make_row(speed=speed) | {column: f"{long}{end}", "model_hash": end if column == "model" else "1"}
        )
        for end, speed in (("3", 10.0), ("5", 30.0))
    ]
    assert sorted(heights(drawn("speed", rows))) == [10.0, 30.0]


def test_a_long_legend_leaves_the_panels_their_height() -> None:
    panel_heights = []
    for settings in (
        ["width 4"],
        [f"width {number}, microbatch 0, inflight 0, accept_cutoff 0.5" for number in range(3)],
    ):
        figure = drawn("speed", [RESULTS.as_read(make_row(speed=10.0) | {"settings": each}) for each in settings])
        assert figure is not None
        figure.canvas.draw()
        panel_heights.append(figure.axes[0].get_window_extent().height)
    assert panel_heights[1] > 0.8 * panel_heights[0]


def test_labels_of_several_settings_do_not_overlap() -> None:
    long = "microbatch 0, inflight 0, accept_cutoff 0.5"
    rows = [RESULTS.as_read(make_row(ranks=2) | {"settings": f"width {number}, {long}"}) for number in range(4)]
    for name, figure in draw(rows, has_loads=False):
        assert not overlaps(texts(figure)), name


def test_names_of_several_drafts_have_no_suffixes() -> None:
    rows = [RESULTS.as_read(make_row(model_draft="small.gguf+large.gguf"))]
    assert panel_titles(drawn("speed", rows)) == ["big + small+large"]
    assert "| small+large |" in markdown(summarise(rows))[-1]


def test_the_drafting_rank_is_marked() -> None:
    figure = drawn("time", [RESULTS.as_read(make_row(policy)) for policy in ("iterative", "pipeinfer")])
    assert figure is not None
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0", "1", "2", "0\nD", "1", "2"]
    assert "D: this rank drafts" in note_of(figure)


@pytest.mark.parametrize(("ranks", "n_settings"), [(15, 1), (40, 1), (3, 20)])
def test_bars_of_many_ranks_go_below_each_other(ranks: int, n_settings: int) -> None:
    """Where a picture of them in one row would be too wide to read."""
    rows = [
        RESULTS.as_read(make_row(policy, ranks=ranks) | {"settings": f"width {n}" if policy != "iterative" else ""})
        for policy in SPEEDS
        for n in range(n_settings)
    ]
    figure = dict(draw(rows, has_loads=False))["time"]
    assert figure.get_figwidth() <= 10.5
    n_parts = len(figure.axes)
    assert n_parts > 1 and panel_titles(figure)[0].endswith(f"(1 of {n_parts})")
    assert len([text for axes in figure.axes for text in axes.get_xticklabels()]) == ranks * (1 + 2 * n_settings)
    assert ranks == 40 or not overlaps(texts(figure))


def test_ablations_are_held_against_what_was_asked_alike_on_a_scale_of_each_pair() -> None:
    rows = [
        RESULTS.as_read(make_row(speed=speed, variant=variant, model=model, model_hash=model))
        for model, speed in (("slow", 10.0), ("fast", 1000.0))
        for variant in ("", "no-cancel")
    ]
    rows += [RESULTS.as_read(make_row(speed=77.0, model="slow", model_hash="slow", predicted_n=8))]
    figure = drawn("ablation", rows)
    assert panel_titles(figure) == ["slow + small, pipeinfer"] * 2 + ["fast + small, pipeinfer"] * 2
    assert figure and heights(figure)[:2] == [10.0, 10.0], "what was measured otherwise does not count"
    assert figure.axes[0].get_ylim()[1] < 20 < 1000 < figure.axes[2].get_ylim()[1]


def test_ablations_of_policies_are_not_averaged() -> None:
    rows = [
        RESULTS.as_read(make_row(policy, speed=speed, variant=variant))
        for policy, speed in (("pipeinfer", 20.0), ("pipedec", 10.0))
        for variant in ("", "no-cancel")
    ]
    figure = drawn("ablation", rows)
    assert panel_titles(figure) == ["big + small, pipeinfer"] * 2 + ["big + small, pipedec"] * 2
    assert figure and not {15.0, 15000.0} & set(heights(figure)), heights(figure)


def test_ablations_look_different_and_are_named_alike() -> None:
    off = ["no-cancel", "no-pacing", *(f"no-{letter}" for letter in "abcdefghij")]
    figure = drawn("ablation", [RESULTS.as_read(make_row(variant=variant)) for variant in ["", *off]])
    assert figure and [text.get_text() for text in figure.legends[0].get_texts()] == ["complete", *off]
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in figure.axes[0].patches}) == 13


def test_what_was_simulated_is_said_to_be() -> None:
    rows = [
        RESULTS.as_read(make_row(policy, numerics="virtual", ranks=3, variant=variant))
        for policy in SPEEDS
        for variant in ("", "no-cancel")
    ]
    for name, figure in draw(rows, has_loads=False):
        assert "simulated generation" in note_of(figure), name
        shown = " ".join(text.get_text() for text in texts(figure))
        assert "MPI" not in shown and "node" in shown, name
    for name, figure in draw([RESULTS.as_read(row | {"numerics": "exact"}) for row in rows], has_loads=False):
        assert "simulated" not in note_of(figure) and "node" not in note_of(figure), name
    load = make_load(numerics="virtual", ttft_percentiles_s=[], itl_percentiles_s=[])
    drawn_of_load = dict(draw([LOADS.as_read(load)], has_loads=True))
    assert drawn_of_load.keys() == {"load_curves", "load_utilisation"}
    for name, figure in drawn_of_load.items():
        assert "is one simulated load" in note_of(figure), name


def test_whiskers_of_what_was_simulated_are_over_its_texts() -> None:
    """A text simulated again gives the same: chance is in the texts alone, which have a seed and a repetition each."""
    rows = [
        RESULTS.as_read(
            make_row(numerics="virtual", speed=speed, repetition=at, seed=at, prompt="pp128") | {"prompt_hash": f"{at}"}
        )
        for at, speed in enumerate((9.0, 10.0, 11.0), start=1)
    ]
    figure = drawn("speed", rows)
    assert whiskers(figure) == [pytest.approx((9.0, 11.0))]
    assert note_of(figure).startswith(
        "Bars: means over n = 3 simulated generations (3 texts); whiskers: one sample standard deviation over texts."
    )
    real = [RESULTS.as_read(make_row(repetition=at) | {"model_hash": "other"}) for at in (1, 2)]
    assert "of the same prompt, of what was simulated over texts" in note_of(drawn("speed", [*rows, *real]))


@pytest.mark.parametrize(("numerics", "pooled"), [("exact", "2 repetitions"), ("virtual", "2 seeds")])
def test_whiskers_of_loads_are_over_repetitions_of_the_load(numerics: str, pooled: str) -> None:
    rows = []
    for seed, speed in ((1, 9.0), (2, 11.0)):
        other = {"repetition": 1, "prompt_hash": f"{seed}"} if numerics == "virtual" else {"repetition": seed}
        rows.append(LOADS.as_read(make_load(numerics=numerics, speed=speed, seed=seed, **other)))
    figure = load_figures(rows)["load_curves"]
    assert f"({pooled}); whiskers: one sample standard deviation over repetitions of the load." in note_of(figure)
    assert whiskers(figure)[0] == pytest.approx((10 - 2**0.5, 10 + 2**0.5))


def load_figures(rows: list[Record]) -> dict[str, Figure]:
    return dict(draw(rows, has_loads=True))


def test_requests_that_come_at_once_are_drawn_where_their_number_is() -> None:
    simulated: Record = {"numerics": "virtual", "ttft_percentiles_s": [], "itl_percentiles_s": []}
    loads = [make_load(concurrency=0, speed=n + 1.0, n_requests=n, parallel=n, **simulated) for n in (8, 16)]
    figures = load_figures([LOADS.as_read(load) for load in loads])
    assert figures.keys() == {"load_curves", "load_utilisation"}
    for figure in figures.values():
        assert {axes.get_xlabel() for axes in figure.axes} == {"requests that come at once"}
        assert all(title.endswith("at once") for title in panel_titles(figure))
    assert "8 to 16 requests" in note_of(figures["load_curves"])
    (line,) = [line for line in figures["load_curves"].axes[0].lines if line.get_label() == "pipeinfer"]
    assert [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())] == [(8, 9), (16, 17)]


def test_what_was_paced_is_said_to_be() -> None:
    rows = [RESULTS.as_read(make_row(policy, pace="ethernet:qwen*8", pace_hash="1")) for policy in SPEEDS]
    for name, figure in draw(rows, has_loads=False):
        assert (
            "Paced: stages, drafts and links take the times of ethernet:qwen (8 real seconds count as one)."
            in note_of(figure)
        ), name
    for figure in load_figures([LOADS.as_read(make_load(pace="ethernet"))]).values():
        assert note_of(figure).endswith("Paced: stages, drafts and links take the times of ethernet.")
    late, load = rows[0] | {"late_s": [0.0, 0.03]}, make_load(pace="ethernet", late_s=[0.0, 0.0, 1.0])
    assert "as one). In 1 of 3 a rank was late by over 2%." in note_of(
        drawn("speed", [late | {"total_s": 1.0}, *rows[1:]])
    )
    assert "was late" not in note_of(drawn("speed", [late | {"total_s": 2.0}, *rows[1:]]))
    for figure in load_figures([LOADS.as_read(load)]).values():
        assert "of ethernet. In 1 of 1 a rank was late by over 2%." in note_of(figure)
    mixed = drawn("speed", [*rows, RESULTS.as_read(make_row())])
    assert "Paced where a title names a profile:" in note_of(mixed)
    assert any("on ethernet:qwen*8" in title for title in panel_titles(mixed))
    assert "aced" not in note_of(drawn("speed", [RESULTS.as_read(make_row())]))


def test_what_was_simulated_again_counts_once() -> None:
    rows = [RESULTS.as_read(make_row(numerics="virtual", speed=speed)) for speed in (9.0, 10.0)]
    assert heights(drawn("speed", rows)) == [10.0], "the newest"
    assert note_of(drawn("speed", rows)).startswith("Each bar is one simulated generation.")
    assert "n = 2 generations" in note_of(drawn("speed", [row | {"numerics": "exact"} for row in rows]))


def test_the_legend_has_what_any_panel_shows() -> None:
    """Also where many settings need many looks, none of which is another one's."""
    rows = [
        RESULTS.as_read(make_row(speed=10.0, model="one", model_hash="1") | {"settings": f"width {n}"})
        for n in range(9)
    ]
    rows.append(RESULTS.as_read(make_row("iterative", speed=5.0, model="two", model_hash="2")))
    figure = drawn("speed", rows)
    assert figure
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(texts) == 10 and "iterative" in texts
    looks = {(bar.get_facecolor(), bar.get_hatch()) for axes in figure.axes for bar in axes.patches}
    assert len(looks) == 10


def test_files_from_a_table(tmp_path: Path) -> None:
    for policy in SPEEDS:
        RESULTS.append(tmp_path / "results.csv", make_row(policy))
    done = plot(tmp_path / "results.csv", "-o", tmp_path / "figures")
    assert done.returncode == 0, done.stderr
    for name in ("speed", "ttft", "itl", "memory", "latencies", "time"):
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(PNG)
        assert "<svg" in (tmp_path / "figures" / f"{name}.svg").read_text()
        assert (tmp_path / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert not (tmp_path / "figures" / "ablation.png").exists(), "no data for it"


def test_the_original_table(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("12,3,0.3,1\n12,4,0.25,2\n12,5,0.2,1.1\n" * 2)
    done = plot(tmp_path / "results.csv")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["itl.png", "speed.png", "ttft.png"]
    rows = original_rows(tmp_path / "results.csv", list(lines_of(tmp_path / "results.csv")))[:3]
    assert [(row["policy"], row["predicted_per_second"]) for row in rows] == [
        ("iterative", 3.0),
        ("speculative", 4.0),
        ("pipeinfer", 5.0),
    ]
    for extra, words in (("1,2,3,4\n", "threes"), ("1,2,3\n", "line 4"), ("1,2,x,4\n", "line 4")):
        (tmp_path / "results.csv").write_text("1,2,3,4\n" * 3 + extra)
        done = plot(tmp_path / "results.csv")
        assert done.returncode == 2 and words in done.stderr, done.stderr


def test_a_bad_table_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    RESULTS.append(path, make_row())
    path.write_bytes(path.read_bytes() + b"1,2,3")
    for done, words in ((plot(path), "line 3"), (plot(tmp_path / "none.csv"), "none.csv")):
        assert done.returncode == 2 and words in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("option", ["--from", "--for"])
def test_times_are_numbers_and_of_traces(tmp_path: Path, option: str) -> None:
    RESULTS.append(tmp_path / "results.csv", make_row())
    bad = [plot(tmp_path / "trace.json", f"{option}={value}") for value in ("nan", "inf", "-1")]
    for done in [*bad, plot(tmp_path / "results.csv", f"{option}=1")]:
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "--from is 0 or more" in done.stderr or "are of traces" in done.stderr, done.stderr


@pytest.mark.parametrize("missing", ["matplotlib", "pandas"])
def test_what_is_missing_is_one_line(tmp_path: Path, missing: str) -> None:
    """Before anything is measured in experiments.sh."""
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{missing}'\")")
    results = tmp_path / "results.csv"
    RESULTS.append(results, make_row())
    plot = [sys.executable, str(ROOT / "plot.py")]
    commands = [[*plot, str(results)], [str(ROOT / "experiments.sh")]]
    if missing == "matplotlib":
        commands += [[*plot, str(tmp_path / "trace.json")]]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = environment() | {"PYTHONPATH": str(tmp_path), "PATH": path, "RESULTS": str(tmp_path / "new.csv")}
    for command in commands:
        done = subprocess.run(command, env=settings, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, (command, done.stderr)
        assert missing in done.stderr and "pipeinfer[plot]" in done.stderr
    assert not (tmp_path / "new.csv").exists() and not list(tmp_path.glob("*.png"))
