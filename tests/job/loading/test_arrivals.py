"""Ranks without the model's file: their layers come from rank 0, once, and compute what those of the file do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.cluster.hosts.host import Host, this_host
from pipeinfer.cluster.hosts.resources import Memory
from pipeinfer.errors import UserError
from pipeinfer.job.loading.arrivals import ModelPart, _pieces
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.job_plan import TARGET as TARGET_MODEL
from pipeinfer.job.placement.job_plan import ModelFile
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.remote import RemoteModel, contents
from pipeinfer.policies import PipeInfer
from tests.support.adapters import write_adapter
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import COMMAND, ROOT, environment, launcher, run_json
from tests.support.planned import lay_out, options_of

ONLY_RANK_0 = """
case "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" in 0) cd "$0/here";; *) cd "$0/elsewhere";; esac
exec "$@"
"""
"""Names of models are relative to the folder a rank is in: only rank 0's has them."""

GREEDY = ["-p", "def read_lines(path):\n", "-n", "24", "--temp", "0", "-t", "1", "--ignore-eos", "--json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(TARGET, tmp_path / "here" / "target.gguf")
    shutil.copy(DRAFT, tmp_path / "here" / "draft.gguf")
    return tmp_path


def job(folder: Path, n_ranks: int, *words: str, greedy: Sequence[str] = GREEDY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher(n_ranks), "sh", "-c", ONLY_RANK_0, str(folder), *COMMAND, "run", *greedy, *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )


def tokens(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["tokens"]


@pytest.fixture(scope="module")
def plain() -> Any:
    return run_json(1, GREEDY)["tokens"]


def sent(done: subprocess.CompletedProcess[str]) -> Sequence[str]:
    return re.findall(r"rank (\d+) \(\S+\) has no \S+: \S+ [MGk]?B go there", done.stderr)


def test_slices_come_once_into_the_cache_of_each_rank(folder: Path, plain: Any) -> None:
    words = ["-m", "target.gguf", "-md", "draft.gguf", "--slice-cache", str(folder / "cache")]
    first = job(folder, 3, *words)
    assert tokens(first) == plain and sent(first) == ["1", "2"], first.stderr
    files = {path.name: path.stat().st_ino for path in (folder / "cache").iterdir()}
    assert sorted(name.partition("-")[2] for name in files) == ["0-5.gguf", "5-9.gguf", "tokens.bin"], files
    again = job(folder, 3, *words)
    assert tokens(again) == plain and sent(again) == []
    assert files == {path.name: path.stat().st_ino for path in (folder / "cache").iterdir()}


def test_hosts_without_the_model_take_slices_that_were_copied_there(folder: Path, plain: Any) -> None:
    done = subprocess.run(
        [*COMMAND, "models", "split", "target.gguf", "--layer-split", "5,4", "-o", str(folder / "cache")],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=folder / "here",
    )
    assert done.returncode == 0, done.stderr
    words = ["-m", "target.gguf", "-md", "draft.gguf", "--layer-split", "5,4", "--slice-cache", str(folder / "cache")]
    taken = job(folder, 3, *words)
    assert tokens(taken) == plain and sent(taken) == []


def test_whole_models_and_slices_live_in_memory_without_a_cache(folder: Path, plain: Any) -> None:
    words = ["-m", "target.gguf", "-md", "draft.gguf", "-md", "./target.gguf"]
    done = job(folder, 4, *words)
    assert tokens(done) == plain and sent(done) == ["1", "2", "3"]
    assert "--slice-cache DIR keeps it there" in done.stderr
    assert list((folder / "elsewhere").iterdir()) == []


def test_the_vocabulary_comes_too_for_who_follows_a_grammar(folder: Path) -> None:
    greedy = [word for word in GREEDY if word != "--ignore-eos"]
    words = ["--grammar", 'root ::= [a-z]+ " = " [0-9]+ "\\n"']
    done = job(folder, 3, "-m", "target.gguf", "-md", "draft.gguf", *words, greedy=greedy)
    assert tokens(done) == run_json(1, [*greedy, *words])["tokens"] and sent(done) == ["1", "2"]


def test_what_is_sent_into_memory_is_planned() -> None:
    info, small = read_model_info(TARGET), read_model_info(DRAFT)
    here = this_host("a")
    without = replace(here, lacks=frozenset({str(TARGET), str(DRAFT)}))
    options = options_of(model=TARGET, drafts=(DRAFT, TARGET), policy=PipeInfer())

    def memory(options: RunOptions, hosts: Sequence[Host]) -> Sequence[Memory]:
        return lay_out(options, hosts, info, [small, info], 256, 1).memory  # a draft, a whole one, two stages

    plain, sent = (memory(options, hosts) for hosts in ([here] * 4, [here, *[without] * 3]))
    assert sent[0] == plain[0] and sent[3] == plain[3]
    assert sent[2].weights == plain[2].weights + info.input_bytes, "the tokens of the first stage"
    assert sent[1].loading == info.n_bytes > plain[1].loading == 0, "drafts are laid out anew"
    cached = options.changed(slice_cache=Path("cache"))
    assert memory(cached, [here, *[without] * 3]) == memory(cached, [here] * 4)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_cache_that_cannot_be_made_is_told(folder: Path, has_adapter: bool) -> None:
    """Adapters come after layers, to all ranks: also to those that have none."""
    (folder / "file").touch()
    adapter = write_adapter(folder / "here" / "a.gguf", TARGET, rank=16, kind="F32").name
    words = ["-m", "target.gguf", "-md", "draft.gguf", "--slice-cache", str(folder / "file" / "cache")]
    done = job(folder, 3, *words, *(["--lora", adapter] if has_adapter else []))
    assert done.returncode == 2 and re.search(r"rank [12] .*/file/cache", done.stderr), done.stderr


def test_a_split_model_that_is_whole_on_a_rank_needs_a_cache(folder: Path) -> None:
    write_model(folder / "here" / "m.gguf", Shape(n_layer=2), part_tensors=10)
    words = ["-m", "m-00001-of-00003.gguf", "-md", "m-00001-of-00003.gguf"]
    done = job(folder, 2, *words)
    assert done.returncode == 2 and "is of 3 files, which memory cannot hold as such" in done.stderr, done.stderr
    cached = job(folder, 2, *words, "--slice-cache", str(folder / "cache"))
    assert tokens(cached) and sent(cached) == ["1"]
    assert len(list((folder / "cache").rglob("m-*.gguf"))) == 3


def test_who_does_not_want_it_is_told_which_file_is_missing(folder: Path) -> None:
    done = job(folder, 3, "-m", "target.gguf", "-md", "draft.gguf", "--no-send-layers")
    assert done.returncode == 2 and "model file target.gguf does not exist" in done.stderr, done.stderr


def test_a_file_that_is_not_the_one_planned_with_is_not_sent(tmp_path: Path) -> None:
    """Whoever waits for its pieces is told, as getting the first one raises."""
    path = tmp_path / "m.gguf"
    write_model(path, Shape(n_layer=2))
    info = read_model_info(path)
    file, part = ModelFile.of(info), ModelPart(TARGET_MODEL, "file", 0, 2, info.n_bytes)
    assert b"".join(map(bytes, _pieces(file, part))) == path.read_bytes()
    write_model(tmp_path / "other.gguf", Shape(n_layer=2, seed=2))
    (tmp_path / "other.gguf").rename(path)
    for said in ("was changed while the job started", "does not exist"):
        pieces = _pieces(file, part)
        with pytest.raises(UserError, match=said):
            next(pieces)
        path.unlink(missing_ok=True)


STREAMS = """
from types import SimpleNamespace
from zlib import crc32

from pipeinfer.job.loading import arrivals
from pipeinfer.cluster.transport import Link
from pipeinfer.errors import UserError

arrivals.CHUNK_BYTES = 1000
link = Link()


def pieces(n, fails=False):
    for start in range(0, n, 300):
        yield bytes(at % 251 for at in range(start, min(n, start + 300)))
    if fails:
        raise UserError("the file is gone")


for n in (0, 1, 999, 1000, 1001, 5000):
    if link.rank == 0:
        counts = []
        arrivals.send_chunks(link, 1, pieces(n), counts.append)
        assert sum(counts) == n
    else:
        got = b"".join(map(bytes, arrivals.receive_chunks(link, 0, n)))
        assert got == bytes(at % 251 for at in range(n)), n
    failed = ""
    try:
        if link.rank == 0:
            arrivals.send_chunks(link, 1, pieces(n, fails=True), lambda n: None)
        else:
            for piece in arrivals.receive_chunks(link, 0, n + 700):
                pass
    except UserError as error:
        failed = str(error)
    assert failed.startswith(["the file is gone", "what rank 0 sends of the model is not whole"][link.rank]), failed
    if link.rank == 0:
        arrivals.send_chunks(link, 1, pieces(n), lambda n: None)
    else:
        stream = arrivals.receive_chunks(link, 0, n)
        for piece in stream:
            break
        stream.close()  # who gives up leaves nothing behind
if link.rank:
    arrivals.zlib = SimpleNamespace(crc32=lambda data: crc32(data) ^ 1)  # a bit is wrong
try:
    if link.rank == 0:
        arrivals.send_chunks(link, 1, pieces(1700), lambda n: None)
    else:
        b"".join(map(bytes, arrivals.receive_chunks(link, 0, 1700)))
        raise SystemExit("nobody noticed")
except UserError as error:
    assert link.rank == 1 and "not whole" in str(error)
assert link.broadcast("end" if link.rank == 0 else None) == "end"
link.finalize()
"""


def test_streams_of_any_length_and_who_gives_up() -> None:
    done = subprocess.run(
        [*launcher(2), sys.executable, "-c", STREAMS],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


def test_what_is_rescaled_in_a_slice_is_read_by_who_has_the_file(tmp_path: Path) -> None:
    """gemma3 of 62 layers: libllama takes another scale for a model of as many layers as a slice."""
    heads = {"attention.key_length": 32, "attention.value_length": 32}
    model = replace(MODELS["gemma3"], n_layer=62, metadata={**MODELS["gemma3"].metadata, **heads})
    info = read_model_info(write_random_model(tmp_path / "m.gguf", model))
    assert info.layers.query_scale != 1
    headers = info.read_headers()
    info.path.rename(tmp_path / "elsewhere.gguf")
    remote = RemoteModel(headers, 31, 62, None, print)
    assert remote.missing() and contents(remote.info, "layers", remote.first, remote.last)[0]
