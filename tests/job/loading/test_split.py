"""`models split`: slices of a plan in a directory, which jobs take and do not write again."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeinfer.cli.models import models
from pipeinfer.cli.plan import plan_command
from pipeinfer.errors import UserError
from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import run_json


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("split") / "model.gguf", Shape(n_layer=5))


def split(*words: object) -> Result:
    return CliRunner().invoke(models, ["split", *map(str, words)], standalone_mode=False)


def slices(folder: Path) -> dict[str, int]:
    """Layers and inode of each file of layers."""
    return {path.stem.partition("-")[2]: path.stat().st_ino for path in folder.glob("*.gguf")}


def test_slices_are_written_once_and_taken_as_they_are(model: Path, tmp_path: Path) -> None:
    result = split(model, "--layer-split", "2,3", "-o", tmp_path / "new")
    assert result.exception is None and result.stdout.count(" MB, written") == 3
    before = slices(tmp_path / "new")
    assert set(before) == {"0-2", "2-5"}
    info = read_model_info(model)
    for first, last in ((0, 2), (2, 5)):
        plain = open_slice(info, first, last)
        part = open_slice(info, first, last, tmp_path / "new")
        assert part.path.read_bytes().startswith(plain.path.read_bytes())
        part.close()
        plain.close()
    assert split(model, "--stages", 2, "-o", tmp_path / "new").exception is None
    again = split(model, "--layer-split", "0.4,0.6", "-o", tmp_path / "new")
    assert again.stdout.count(" MB, is there") == 3 and before.items() <= slices(tmp_path / "new").items()


def test_a_manifest_tells_what_was_damaged_since(model: Path, tmp_path: Path) -> None:
    assert split(model, "--stages", 2, "-o", tmp_path).exception is None
    files = [path for path in sorted(tmp_path.iterdir()) if path.name != "SHA256SUMS"]
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path, capture_output=True).returncode == 0
    verify = ["verify", *map(str, files)]
    fine = CliRunner().invoke(models, verify, standalone_mode=False)
    assert fine.return_value == 0 and fine.stdout.count("\n") == len(files) == 3

    with open(files[0], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    damaged = CliRunner().invoke(models, verify, standalone_mode=False)
    assert damaged.return_value == 1
    assert [
        f"{path}: " in line and "SHA256SUMS beside it has" in line
        for path, line in zip(files, damaged.stdout.splitlines(), strict=False)
    ] == [True, False, False]

    files[1].unlink()
    assert split(model, "--stages", 2, "--only", 0, "-o", tmp_path).exception is None
    listed = [line.split("  ")[1] for line in (tmp_path / "SHA256SUMS").read_text().splitlines()]
    assert files[1].name not in listed and len(listed) == 2


def test_the_stages_of_a_plan(model: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1 memory=1G\nb slots=1 memory=1G\nc slots=1 memory=1G\n")
    words = ["--hosts", str(tmp_path / "hosts"), "-m", str(model), "--layer-split", "1,1,3", "--json"]
    planned = CliRunner().invoke(plan_command, words, standalone_mode=False)
    (tmp_path / "plan.json").write_text(planned.stdout)
    assert split(model, "--plan", tmp_path / "plan.json", "-o", tmp_path / "out").exception is None
    assert set(slices(tmp_path / "out")) == {"0-1", "1-2", "2-5"}


def test_slices_that_were_cut_on_another_host_are_taken_there(model: Path, tmp_path: Path) -> None:
    there = tmp_path / "model.gguf"
    there.write_bytes(model.read_bytes())
    os.utime(there, ns=(1, 1))
    split(there, "--layer-split", "2,3", "-o", tmp_path / "cache")
    before, here, states = slices(tmp_path / "cache"), read_model_info(model), read_model_info(there).states
    assert here.fingerprint == read_model_info(there).fingerprint
    open_slice(here, 0, 2, tmp_path / "cache", remote_states=states).close()
    assert slices(tmp_path / "cache") == before
    open_slice(here, 0, 2, tmp_path / "cache").close()
    assert slices(tmp_path / "cache")["0-2"] != before["0-2"], "of no file that anybody has"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of --layer-split, --plan and --stages"),
        (["--layer-split", "2,3", "--stages", "2"], "give one of"),
        (["--layer-split", "2,2"], "adds up to 4 layers; the model has 5"),
        (["--layer-split", "5"], "one stage has the whole model"),
        (["--stages", "6"], "6 stages for 5 layers"),
        (["--stages", "2", "--only", "1,2"], "--only 2: there are stages 0 to 1"),
        (["--plan", "no.json"], "--plan no.json cannot be read"),
        (["--plan", "setup.cfg"], "--plan setup.cfg is no plan; write one with: pipeinfer plan … --json > plan.json"),
    ],
)
def test_what_cannot_be_split(model: Path, tmp_path: Path, words: list[str], message: str) -> None:
    error = split(model, *words, "-o", tmp_path / "x").exception
    assert isinstance(error, UserError) and message in str(error), error


def test_a_place_that_is_no_directory(model: Path) -> None:
    error = split(model, "--stages", "2", "-o", model).exception
    assert isinstance(error, UserError) and str(error).endswith("File exists; name another one"), error
    assert str(error).startswith(f"--output {model} cannot be a directory")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """With room for one slice of two, not for both."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "pipeinfer-test", place], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be made here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of some 140 kB, so that four of them are more than the small disk has."""
    return write_model(tmp_path_factory.mktemp("large") / "model.gguf", Shape(n_layer=4, n_embd=128, n_ff=512))


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(large: Path, small_disk: Path) -> None:
    words = [large, "--stages", "2", "-o", small_disk]
    error = split(*words).exception
    assert isinstance(error, UserError) and not list(small_disk.iterdir())
    amounts = r"lacks [1-9][0-9]+ kB: 1\.[1-3] MB are to be written, 1\.0 MB are left; .* --only 0 fits$"
    assert re.search(amounts, str(error)), error
    assert split(*words, "--only", "0").exception is None
    assert set(slices(small_disk)) == {"0-2"} and len(list(small_disk.glob("*-tokens.bin"))) == 1
    error = split(*words).exception
    assert isinstance(error, UserError) and "--only 0 fits" in str(error), "what is there takes no more room"


def test_what_a_killed_writer_left_is_no_reason_to_refuse(large: Path, small_disk: Path) -> None:
    with tempfile.NamedTemporaryFile(
        prefix=".x.gguf.", suffix=f".{socket.gethostname()}.part", dir=small_disk, delete=False
    ) as left:
        left.write(bytes(800 << 10))
    assert split(large, "--stages", "2", "--only", "0", "-o", small_disk).exception is None


def test_a_slice_cache_without_room_says_how_much_is_lacking(large: Path, small_disk: Path) -> None:
    info = read_model_info(large)
    (small_disk / "other").write_bytes(bytes(800 << 10))
    lacking = r"no room in the slice cache .*/disk \(5[0-9]{2} kB are needed, 2[0-9]{2} kB left\)"
    with pytest.raises(UserError, match=lacking):
        open_slice(info, 0, 2, small_disk)
    assert [path.name for path in small_disk.iterdir()] == ["other"]


def test_a_job_reads_them(tmp_path: Path) -> None:
    split(TARGET, "--layer-split", "4,5", "-o", tmp_path)
    before = slices(tmp_path)
    common = ["-p", "def f(x):", "-n", "8", "--temp", "0", "-t", "1"]
    result = run_json(3, [*common, "--layer-split", "4,5", "--slice-cache", str(tmp_path)])
    assert result["tokens"] == run_json(1, common)["tokens"] and slices(tmp_path) == before


def test_a_plan_tells_its_split(model: Path) -> None:
    words = ["--profile", "pipeinfer-c", "-np", "3", "-m", str(model), "-md", "none", "--json"]
    found = json.loads(CliRunner().invoke(plan_command, words, standalone_mode=False).stdout)
    assert sum(found["layer_split"]) == 5 and len(found["layer_split"]) == 3
