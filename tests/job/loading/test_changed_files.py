"""Models that go bad while a job runs: truncated, overwritten, replaced, or full of numbers that are none."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeinfer.errors import ModelFault, UserError
from pipeinfer.job.process.stop import describe, file_at
from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.contents import SourceFile, sample_digest
from pipeinfer.models.gguf.header import Tensor
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.llama.rows import check_result
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import finish, run_json, start

PROMPT = "def read_lines(path):\n"
LONG = ["-p", PROMPT, "-n", "6000", "-c", "7000", "--ignore-eos", "-t", "1"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copy(TARGET, tmp_path / "model.gguf"))


def truncate(model: Path) -> None:
    os.truncate(model, 4096)


def overwrite(model: Path) -> None:
    data = bytearray(model.read_bytes())
    with model.open("r+b") as file:
        file.write(data[:100_000] + bytes(len(data) - 100_000))


def replace_by_another(model: Path) -> None:
    write_model(model.with_name("other.gguf"), Shape(seed=5)).rename(model)


def faults(errors: str) -> list[str]:
    """What is said of ranks that cannot go on."""
    return [line for line in errors.splitlines() if line.startswith("pipeinfer: rank ")]


def wait_until_loaded(job: subprocess.Popen[str], n_ranks: int) -> None:
    assert job.stderr
    for _ in range(n_ranks):
        while " loaded in " not in (line := job.stderr.readline()):
            assert line


def start_and_change(n_ranks: int, arguments: list[str], change: Callable[[], None]) -> subprocess.Popen[str]:
    job = start(n_ranks, ["run", *LONG, *arguments])
    assert job.stdout
    assert os.read(job.stdout.fileno(), 1)
    change()
    return job


@pytest.mark.parametrize("change", [truncate, overwrite])
@pytest.mark.parametrize("n_ranks", [1, 3])
def test_the_fault_names_a_model_that_was_changed(model: Path, n_ranks: int, change: Callable[[Path], None]) -> None:
    job = start_and_change(n_ranks, ["-m", str(model)], lambda: change(model))
    _, errors = job.communicate(timeout=30)
    assert job.returncode not in (0, 2)
    (line,) = faults(errors)
    assert line.startswith("pipeinfer: rank 0 (host ") and "stage 0, layers 0-" in line
    assert f"{model} was truncated or overwritten" in line
    assert "Traceback" not in errors


def test_the_fault_names_a_cached_slice_that_was_changed(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def truncate_last() -> None:
        last = max(cache.glob("*.gguf"), key=lambda path: int(path.stem.split("-")[1]))
        os.truncate(last, 4096)

    job = start_and_change(2, ["-m", str(model), "--policy", "iterative", "--slice-cache", str(cache)], truncate_last)
    _, errors = job.communicate(timeout=30)
    assert job.returncode not in (0, 2)
    (line,) = faults(errors)
    assert line.startswith("pipeinfer: rank 1 (host ") and f"{cache}/" in line and "was truncated" in line


def test_a_model_that_was_replaced_by_renaming_is_finished_with(model: Path) -> None:
    common = ["-m", str(model), "-p", PROMPT, "-n", "64", "--temp", "0", "--ignore-eos", "-t", "1"]
    expected = run_json(1, common)["text"]
    job = start(2, ["run", "-v", *common])
    wait_until_loaded(job, 2)
    replace_by_another(model)
    text, errors = job.communicate(timeout=60)
    assert job.returncode == 0 and text == expected, errors


@pytest.mark.parametrize("change", [replace_by_another, Path.unlink])
def test_what_is_reported_is_the_model_that_was_computed_from(
    model: Path, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    common = ["-m", str(model), "-md", str(model), "-p", PROMPT, "-n", "64", "--ignore-eos", "-t", "1", "--json"]
    expected = run_json(1, common)
    results = tmp_path / "results.csv"
    job = start(2, ["run", "-v", *common, "--results", str(results)])
    wait_until_loaded(job, 2)
    change(model)
    text, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    found = json.loads(text)
    assert (found["model"], found["model_draft"]) == (expected["model"], expected["model_draft"])
    with results.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["model_hash"], row["model_bytes"]) == (expected["model"]["hash"], str(TARGET.stat().st_size))


def test_nonsense_is_blamed_on_a_write_that_is_not_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    source = SourceFile(path, lambda fd: sample_digest(fd, [(900, 100)]))
    source.blame()
    with path.open("r+b", buffering=0) as file:
        file.write(b"x" * 100)
        source.check()  # nothing of what is sampled was written yet
        slept_s: list[float] = []

        def sleep(seconds: float) -> None:
            slept_s.append(seconds)
            if sum(slept_s) >= 0.3:  # the write goes on, and gets there
                os.pwrite(file.fileno(), b"x", 950)

        monkeypatch.setattr("pipeinfer.models.gguf.contents.time.sleep", sleep)
        with pytest.raises(ModelFault, match="file was truncated or overwritten"):
            source.blame()
    source.close()


def test_a_disk_that_cannot_be_read_is_not_called_a_change(tmp_path: Path) -> None:
    def fail(fd: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (path := tmp_path / "file").touch()
    with pytest.raises(UserError, match="file cannot be read: Input/output error"):
        SourceFile(path, fail)


def test_a_model_that_was_touched_is_gone_on_with(model: Path) -> None:
    common = ["-m", str(model), "-p", PROMPT, "-n", "64", "--temp", "0", "--ignore-eos", "-t", "1"]
    job = start(1, ["run", *common])
    assert job.stdout
    assert os.read(job.stdout.fileno(), 1)
    os.utime(model, (1, 1))
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors


# -- values that are none


def poison(model: Path, name: str, value: float) -> None:
    """Make every scale of a Q8_0 tensor, or every item of an F32 one, this value."""
    tensor = read_model_info(model).tensor(name)
    assert tensor is not None
    data = bytearray(model.read_bytes())
    where, step = _scales(tensor)
    for at in range(where, tensor.offset + tensor.n_bytes, step):
        data[at : at + (4 if step == 4 else 2)] = struct.pack("<f" if step == 4 else "<e", value)
    model.write_bytes(data)


def _scales(tensor: Tensor) -> tuple[int, int]:
    return (tensor.offset, 4) if tensor.type == 0 else (tensor.offset, 34)


@pytest.mark.parametrize(
    ("tensor", "value", "words"),
    [
        ("blk.2.ffn_up.weight", float("nan"), "rank 1 ({host}stage 1, layers 2-3): ModelFault: layers 2-3 of {model}"),
        (
            "blk.1.attn_norm.weight",
            float("inf"),
            "rank 0 ({host}stage 0, layers 0-1): ModelFault: layers 0-1 of {model}",
        ),
        ("output_norm.weight", 0.0, "rank 2 ({host}stage 2, layers 4-5): ModelFault: layers 4-5 of {model}"),
    ],
)
def test_values_that_are_no_numbers_are_a_fault_of_the_stage_that_made_them(
    tmp_path: Path, tensor: str, value: float, words: str
) -> None:
    model = write_model(tmp_path / "bad.gguf", Shape(n_layer=6))
    poison(model, tensor, value)
    done = finish(3, ["run", "-m", str(model), "-p", "the rank", "-n", "8", "--layer-split", "2,2,2", "-t", "1"], 60)
    assert done.returncode not in (0, 2)
    (line,) = faults(done.stderr)
    host = line.partition("(")[2].partition("stage")[0]
    assert line.startswith(f"pipeinfer: {words.format(host=host, model=model)} computed "), done.stderr
    assert "Traceback" not in done.stderr


def test_which_results_are_sound() -> None:
    rows = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    check_result(rows, False, "x")
    check_result(rows * np.float32(1e38), False, "x")  # its sum overflows
    check_result(np.zeros((2, 64), np.float32), False, "x")
    check_result(np.empty((0, 64), np.float32), True, "x")
    ruled_out = rows.copy()
    ruled_out[1, :5] = -np.inf
    check_result(ruled_out, True, "x")
    with pytest.raises(ModelFault, match=r"x computed a value that is no number \(-inf\) in row 1 of 3"):
        check_result(ruled_out, False, "x")
    for value in (np.nan, np.inf):
        bad = rows.copy()
        bad[2, 7] = value
        for are_logits in (False, True):
            with pytest.raises(ModelFault, match=rf"no number \({value}\) in row 2 of 3"):
                check_result(bad, are_logits, "x")
    equal = rows.copy()
    equal[1] = 2.5
    check_result(equal, False, "x")
    with pytest.raises(ModelFault, match=r"the same logit \(2.5\) for every token in row 1"):
        check_result(equal, True, "x")


def test_a_bus_error_is_described() -> None:
    maps = [
        "7f00-7f10 r--p 00000000 fe:00 12 /models/a b.gguf",
        "7f10-7f20 rw-p 00000000 00:00 0",
        "7f20-7f30 r--s 00000000 00:01 7 /memfd:pipeinfer-0-1 (deleted)",
    ]
    assert describe(file_at(0x7F0F, maps)).startswith("/models/a b.gguf was truncated")
    assert describe(file_at(0x7F10, maps)).startswith("out of memory for a mapped file")
    assert describe(file_at(0x7F20, maps)).startswith("out of memory for /memfd:pipeinfer-0-1")
    assert file_at(0x8000, maps) == ""
