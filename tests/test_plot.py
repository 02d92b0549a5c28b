"""plot.py as a user starts it, and what its figures show."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from pipeinfer.cli.figures import FIGURES, draw_all
from pipeinfer.results import Row, append_result, as_read
from tests.jobs import ROOT
from tests.rows import SPEEDS, make_row

PNG = b"\x89PNG"


def table(name: str = "big.gguf") -> list[Row]:
    rows = []
    for ranks in (3, 4, 8):
        for policy, speed in SPEEDS.items():
            for prompt in ("program", "tale", "gsm8k/1", "gsm8k/2"):
                for repetition in (1, 2):
                    rows.append(make_row(policy, prompt, repetition, ranks=ranks, speed=speed + repetition))
        for variant in ("no-cancel", "no-continuous"):
            rows += [make_row("pipeinfer", "tale", 1, ranks=ranks, speed=11.0, variant=variant)]
    return [as_read(row | {"model": name}) for row in rows]


def plot(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "plot.py"), *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


def texts(figure: Figure) -> Iterator[Text]:
    """What is drawn: of the ticks, those within the axes."""
    figure.canvas.draw()
    found = figure.findobj(Text)
    hidden = {
        id(tick.label1)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    figure.canvas.draw()  # asking for the ticks has moved them
    return (text for text in found if text.get_visible() and text.get_text().strip() and id(text) not in hidden)


@pytest.mark.parametrize("name", ["big.gguf", "$\\frac{1}{" + "long-name-" * 20 + "\x07"])
def test_every_figure_and_no_overlapping_text(name: str) -> None:
    drawn = {}
    for title, figure in draw_all(table(name)):
        drawn[title] = True
        boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
        for index, (first, box) in enumerate(boxes):
            clashes = [other for other, later in boxes[index + 1 :] if box.shrunk(0.98, 0.9).overlaps(later)]
            assert not clashes, f"{title}: {first!r} over {clashes}"
    assert list(drawn) == list(FIGURES)


def test_bars_are_the_means() -> None:
    figure = FIGURES["speed"]([row for row in table() if row["ranks"] == 3])
    assert figure is not None
    heights = [patch.get_height() for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    assert heights == pytest.approx([SPEEDS[policy] + 1.5 for policy in SPEEDS])
    assert "tokens/s" in figure.axes[0].get_ylabel()


def test_files_from_a_table(tmp_path: Path) -> None:
    for policy in SPEEDS:
        append_result(tmp_path / "results.csv", make_row(policy))
    done = plot(tmp_path / "results.csv", "-o", tmp_path / "figures")
    assert done.returncode == 0, done.stderr
    for name in ("speed", "ttft", "itl", "memory", "latencies", "time"):
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(PNG)
        assert "<svg" in (tmp_path / "figures" / f"{name}.svg").read_text()
    assert not (tmp_path / "figures" / "ablation.png").exists(), "no data for it"


def test_the_original_table(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("12,3,0.3,1\n12,4,0.25,2\n12,5,0.2,1.1\n" * 2)
    done = plot(tmp_path / "results.csv")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["itl.png", "speed.png", "ttft.png"]


def test_a_bad_table_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    append_result(path, make_row())
    path.write_bytes(path.read_bytes() + b"1,2,3")
    for done, words in ((plot(path), "line 3"), (plot(tmp_path / "none.csv"), "none.csv")):
        assert done.returncode != 0 and words in done.stderr
        assert len(done.stderr.splitlines()) == 1
