"""results.csv: what is written, who may write, what is refused."""

from __future__ import annotations

import csv
import math
import multiprocessing
from dataclasses import fields
from pathlib import Path

import pytest

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.observe.columns import COLUMNS, KEY, NAMES
from pipeinfer.observe.table import LOADS, RESULTS
from tests.support.jobs import finish
from tests.support.paces import pace_words, slow_target
from tests.support.rows import make_row


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    for policy in ("iterative", "pipeinfer"):
        RESULTS.append(path, make_row(policy))
    header, *lines = path.read_text().splitlines()
    assert header.split(",")[:4] == ["prompt_per_second", "predicted_per_second", "itl_mean_s", "ttft_s"]
    assert lines[0].startswith("100,10,0.1,1.28,iterative,")
    first, second = RESULTS.read(path)
    assert second == RESULTS.as_read(make_row("pipeinfer")) | {"date": second["date"]}
    assert math.isnan(first["acceptance_rate"]) and second["acceptance_rate"] == 0.8
    assert (second["model"], second["model_draft"], first["model_draft"]) == ("big.gguf", "small.gguf", "")
    assert (second["ranks"], second["layers"], second["threads"]) == (3, (4, 4), (2, 2, 2))
    assert second["rss_bytes"] == (2e9, 2e9, 2e9) and second["messages"] == 160
    assert all(isinstance(value, int) for value in (second["ranks"], *second["layers"], *second["rss_bytes"]))
    assert len(second["itl_percentiles_s"]) == 101 and second["hosts"] == "node,1,node,1,node,1"


def test_every_sampling_option_is_in_the_keys_of_both_tables() -> None:
    """Else rows of other texts would pass for the same experiment."""
    others = {
        "n_logprobs",
        "n_prompt_logprobs",
        "base_chunk",
        "dry_breakers",
        "ends",
        "ends_from",
        "reasoning",
    }  # options has it
    options = {field.name for field in fields(SamplingParams)} - others
    assert options <= set(KEY) and options <= set(LOADS.key)


def test_every_column_is_filled(tmp_path: Path) -> None:
    """But those of what was not asked for, and of what a machine may not have."""
    path = tmp_path / "results.csv"
    pace = pace_words(tmp_path, slow_target(5.0))  # some guesses are in time
    words = ["run", "-p", "def f", "-n", "8", "--policy", "pipeinfer", "-t", "1", *pace]
    done = finish(3, [*words, "--results", str(path)])
    assert done.returncode == 0, done.stderr
    (row,) = csv.DictReader(path.open())
    asked = {"variant", "options", "prompt", "dry_sequence_breakers", "sampler_order", "logit_bias", "grammar"}
    asked |= {"choices"}
    assert {name for name, cell in row.items() if not cell} - {"joules_per_token"} == asked


def _append_many(path: Path, policy: str) -> None:
    for repetition in range(40):
        RESULTS.append(path, make_row(policy, "x" * 500, repetition))


def test_writers_at_once_lose_and_mix_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_append_many, args=(path, policy)) for policy in ("iterative", "pipeinfer") * 2]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    rows = RESULTS.read(path)
    assert len(rows) == 160
    assert sorted((row["policy"], row["repetition"]) for row in rows) == sorted(
        (policy, repetition) for policy in ("iterative", "pipeinfer") * 2 for repetition in range(40)
    )


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "12.5,3,0.3,1\n", ",".join(NAMES[:-1]) + "\n", "\n", "\0\xff"])
def test_a_file_with_other_columns_stays_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.csv"
    path.write_text(content)
    for attempt in (lambda: RESULTS.check(path), lambda: RESULTS.append(path, make_row())):
        with pytest.raises(UserError, match="other columns"):
            attempt()
    assert path.read_text() == content


def test_nothing_is_appended_to_a_cut_off_row(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    for _ in range(2):
        RESULTS.append(path, make_row())
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(UserError, match="line 3 is cut off"):
        RESULTS.append(path, make_row())
    with pytest.raises(UserError, match="line 3"):
        RESULTS.read(path)
    assert path.read_bytes() == whole[:-20]


@pytest.mark.parametrize(
    ("old", "new"), [(",", ";"), (",tale,", ",tale,extra,"), (",tale,", ',"tale,'), ("a", "\udcff")]
)
def test_no_job_begins_that_would_add_to_a_damaged_table(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "results.csv"
    for _ in range(4):
        RESULTS.append(path, make_row())
    RESULTS.check(path)
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace(old, new, 1)
    path.write_text("\n".join(lines) + "\n", errors="surrogateescape")
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"results\.csv, line 3[: ]"):
        RESULTS.check(path)
    assert path.read_bytes() == before


def test_a_damaged_table_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    RESULTS.append(path, make_row())
    path.write_text(path.read_text().replace("\n100,", "\n100;"))
    before = path.read_bytes()
    for words in (["bench", "-p", "9"], ["simulate", "--profile", "pipeinfer-c"]):
        done = finish(1, [*words, "-n", "4", "--results", str(path)])
        assert done.returncode == 2 and f"line 2 has {len(NAMES) - 1} of {len(NAMES)} columns" in done.stderr, done
        assert len(done.stderr.splitlines()) == 1 and path.read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("100,", "-100,"),
        ("100,", "inf,"),
        ("100,", "1_0,"),
        ("100,", "=HYPERLINK(1),"),
        ("100,", "NaN,"),
        (",pipeinfer,", ",,"),
        (",big.gguf,", ",,"),
        (",tale,", ",tale,extra,"),
        (",tale,", ',"tale,'),
        (",tale,", ',"tale\n",'),
        ('"2,2,2"', '"2,two,2"'),
        ('"2,2,2"', '"2,2.5,2"'),
        (",big.gguf,", ",\udcff,"),
        (",tale,", f",{'x' * 200_000},"),
    ],
)
def test_a_hostile_row_is_named_by_its_line(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "results.csv"
    for _ in range(4):
        RESULTS.append(path, make_row())
    lines = path.read_text().splitlines()
    assert old in lines[3]
    lines[3] = lines[3].replace(old, new, 1)
    path.write_text("\n".join(lines) + "\n", errors="surrogateescape")
    with pytest.raises(UserError, match="line 4") as caught:
        RESULTS.read(path)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_names_cannot_break_a_row(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    RESULTS.append(path, make_row(prompt='a "tale",\nof\r\x00two lines'))
    (row,) = RESULTS.read(path)
    assert row["prompt"] == 'a "tale", of  two lines'


def test_rows_that_were_asked_otherwise_have_other_keys() -> None:
    keys = {RESULTS.key_of(RESULTS.as_read(make_row()))}
    for column in COLUMNS:
        if column.is_key:
            value = {"text": "other", "integer": 99, "number": 0.5, "integers": [9], "numbers": [9.0]}[column.kind]
            keys.add(RESULTS.key_of(RESULTS.as_read(make_row() | {column.name: value})))
    assert len(keys) == 1 + len(KEY)
    assert RESULTS.key_of(RESULTS.as_read(make_row() | {"ttft_s": 9.0, "hosts": "elsewhere"})) in keys


def test_no_file_and_no_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.csv"):
        RESULTS.read(tmp_path / "none.csv")
    (tmp_path / "empty.csv").touch()
    with pytest.raises(UserError, match="empty"):
        RESULTS.read(tmp_path / "empty.csv")
    with pytest.raises(UserError, match="none"):
        RESULTS.append(tmp_path / "none" / "results.csv", make_row())
