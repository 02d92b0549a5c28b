"""--kv-disk in real jobs: a later job reads the cells of an earlier one, with the same text, also if it was killed. And
-cram: a text has cells again that had to make room for others."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeinfer.cluster.hosts.host import Host, free_memory
from pipeinfer.core.interfaces import Batch
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from tests.models.test_llama_stage import ARCHITECTURES, PARAMS, load
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.cases import in_long
from tests.support.gguf_factory import write_model
from tests.support.jobs import descendants, finish, run_json, start
from tests.support.planned import lay_out, options_of
from tests.support.serving import Served

PROMPT = " ".join(f"{word} {at}" for at, word in enumerate(["one", "two", "three", "five"] * 30))
ALONE = ["-m", str(TARGET), "-t", "1", "-n", "24", "-s", "4", "-p", PROMPT]
WORDS = ["-md", str(DRAFT), *ALONE]


def disk(folder: Path, size: str = "100M") -> list[str]:
    return ["--kv-disk", size, "--kv-dir", str(folder)]


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("exact", [True, False])
def test_cells_have_the_same_bits_in_another_stage(name: str, exact: bool, tmp_path: Path) -> None:
    """They are saved and loaded in pieces, and what follows sees them as it saw the first."""
    path, rng = tmp_path / "model.gguf", np.random.default_rng(3)
    write_model(path, ARCHITECTURES[name])
    first, second = (load(path, params=replace(PARAMS, exact=exact))[0] for _ in range(2))
    tokens = rng.integers(0, 64, 200).astype(np.int32)

    def rows(start: int, end: int) -> Batch:
        n = end - start
        positions = np.arange(start, end, dtype=np.int32)
        return Batch(tokens[start:end], positions, [(0,)] * n, None, np.ones(n, np.bool_))

    for at in range(0, 192, 64):
        first.evaluate(rows(at, at + 64), lambda: False)
    for at, end in ((0, 64), (64, 192)):
        second.load_cells(0, first.save_cells(0, at, end))
    assert second.next_position(0) == 192
    assert np.array_equal(first.save_cells(0, 0, 192), second.save_cells(0, 0, 192))
    for at in range(192, 200):
        one, other = (stage.evaluate(rows(at, at + 1), lambda: False) for stage in (first, second))
        assert one is not None and other is not None and np.array_equal(one, other)
    for stage in (first, second):
        stage.close()


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """By the temperature: what is said without a disk."""
    return {temp: run_json(1, [*WORDS, "--policy", "iterative", "--temp", temp]) for temp in ("0.8", "0")}


@pytest.mark.parametrize(
    ("n_ranks", "policy", "temp"),
    [
        in_long(1, "iterative", "0.8"),
        in_long(2, "iterative", "0"),
        in_long(3, "iterative", "0.8"),
        in_long(1, "pipeinfer", "0"),
        (2, "pipeinfer", "0.8"),
        (3, "auto", "0"),
    ],
)
def test_a_later_job_reads_the_prompt_from_disk(
    n_ranks: int, policy: str, temp: str, plain: dict[str, Any], tmp_path: Path
) -> None:
    words, alone = [*WORDS, "--policy", policy, "--temp", temp, *disk(tmp_path)], plain[temp]
    results = [run_json(n_ranks, words) for _ in range(2)]
    assert [result["text"] for result in results] == [alone["text"]] * 2
    assert [result["timings"]["cache_n"] for result in (alone, *results)] == [0, 0, alone["timings"]["prompt_n"] - 1]
    for path in tmp_path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_no_file_of_another_split_or_model_is_used(tmp_path: Path) -> None:
    text = run_json(2, [*ALONE, *disk(tmp_path)])["text"]
    n_files = len(files_of(tmp_path))
    assert n_files
    for more in (["--layer-split", "3,6"], ["--numerics", "fast"], ["-ctk", "q8_0", "--numerics", "fast"]):
        result = run_json(2, [*ALONE, *disk(tmp_path), *more])
        assert result["timings"]["cache_n"] == 0
        assert "fast" in more or result["text"] == text
    assert len(files_of(tmp_path)) == 4 * n_files
    again = run_json(2, [*ALONE, *disk(tmp_path)])
    assert again["text"] == text and again["timings"]["cache_n"] > 300


def test_files_take_no_more_than_the_size(tmp_path: Path) -> None:
    for seed in range(3):
        run_json(2, [*ALONE[:-1], f"{seed} {PROMPT}", *disk(tmp_path, "1M")])
        for rank in tmp_path.iterdir():
            assert 0 < sum(path.stat().st_size for path in files_of(rank)) <= 1_000_000


def test_of_a_text_that_does_not_fit_the_first_blocks_are_read_back(plain: dict[str, Any], tmp_path: Path) -> None:
    """As many tokens as a line says, on every rank, and the files take no more than the size."""
    for n_ranks, size in ((1, 1_500_000), (2, 800_000)):
        words = ["run", "--json", *WORDS, "--temp", "0", *disk(tmp_path / str(n_ranks), str(size))]
        done = [finish(n_ranks, words) for _ in range(2)]
        results = [json.loads(each.stdout) for each in done]
        assert [result["text"] for result in results] == [plain["0"]["text"]] * 2
        told = [re.findall(r"has room for the first (\d+) tokens of a text", each.stderr) for each in done]
        assert told[0] == told[1] and len(told[0]) == 1, done[0].stderr
        assert [result["timings"]["cache_n"] for result in results] == [0, int(told[0][0])]
        sizes = [sum(path.stat().st_size for path in files_of(rank)) for rank in (tmp_path / str(n_ranks)).iterdir()]
        largest = max(path.stat().st_size for path in files_of(tmp_path))
        assert size - 2 * largest < max(sizes) <= size


def test_a_folder_is_one_jobs(tmp_path: Path) -> None:
    with Served(1, ["-m", str(TARGET), *disk(tmp_path)]):
        done = finish(1, ["run", *WORDS, *disk(tmp_path)])
    assert done.returncode == 2 and "waiting for its end" in done.stderr
    assert "end it, or name another folder" in done.stderr


def test_a_folder_that_cannot_be_had_is_refused_before_anything_loads(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = finish(1, ["run", *ALONE, "-v", *disk(tmp_path / "file")])
    assert done.returncode == 2 and "name a folder of yours" in done.stderr and " loaded in " not in done.stderr


def test_models_whose_cells_are_not_kept_say_so(tmp_path: Path) -> None:
    for arguments, line in (
        (["--kv-read-only"], "--kv-read-only is without effect: neither --kv-disk nor --kv-dir is given"),
        (["--kv-disk", "1X"], "is no size"),
        (["--lora-init-without-apply"], "--lora-init-without-apply is without effect: there is no adapter"),
        (["--prompt-cache-ro", "--prompt-cache", str(tmp_path / "none")], "has nothing of these layers"),
    ):
        assert line in finish(1, ["run", *WORDS, "-n", "1", *arguments]).stderr


def test_llama_cpps_prompt_cache_is_a_folder(plain: dict[str, Any], tmp_path: Path) -> None:
    """And is only read by those who say so, as many as there are."""
    words, folder = [*WORDS, "--temp", "0"], tmp_path / "cache"
    assert run_json(2, [*words, "--prompt-cache", str(folder), "--prompt-cache-all"])["text"] == plain["0"]["text"]
    there = {path: path.stat().st_mtime_ns for path in files_of(folder)}
    read_only = ["--prompt-cache", str(folder), "--prompt-cache-ro"]
    with Served(2, ["-m", str(TARGET), *read_only]):
        result = run_json(2, [*words, *read_only, "-n", "90"])
        done = finish(2, ["run", *words, "--prompt-cache", str(folder)])
    assert result["text"].startswith(plain["0"]["text"]) and result["timings"]["cache_n"] > 300
    assert there == {path: path.stat().st_mtime_ns for path in files_of(folder)}
    assert done.returncode == 2 and "another job has" in done.stderr


def random_words(name: str, folder: Path, more: dict[str, Any]) -> list[str]:
    model = replace(MODELS[name], metadata={**MODELS[name].metadata, **more}, with_vocab=True)
    path = write_random_model(folder / f"{name}.gguf", model)
    return ["-m", str(path), "-md", "none", "-t", "1", "-n", "40", "--temp", "0", "--ignore-eos", "-c", "1500"]


@pytest.mark.parametrize("name", ["gemma3", "qwen3next", *(in_long(n) for n in ("gpt-oss", "lfm2", "jamba", "mamba"))])
def test_windows_and_states_are_read_back_with_the_same_bits(name: str, tmp_path: Path) -> None:
    window = {"attention.sliding_window": 128} if name in ("gemma3", "gpt-oss") else {}
    words, folder = random_words(name, tmp_path, window), disk(tmp_path / "kv")
    first, other = "the layer of the rank " * 60, "the layer of the rank " * 25 + "a token of the model " * 9
    for prompt, n_before in ((first, 0), (other, 64 if window else 0)):
        alone = run_json(1, [*words, "-p", prompt])
        results = [run_json(2, [*words, "-p", prompt, *folder]) for _ in range(2)]
        assert [result["tokens"] for result in results] == [alone["tokens"]] * 2
        n_most = len(alone["prompt_tokens"]) - 1
        n_cached = [result["timings"]["cache_n"] for result in results]
        assert n_cached[0] >= n_before and n_most >= n_cached[1] > n_most - (1 if window else 2 * 128)


@pytest.mark.parametrize(
    ("name", "window", "more", "line"),
    [
        ("gemma3", 200, ["--numerics", "fast"], "and numerics are not exact"),
        ("gemma3", 127, [], "have a sliding window of 127"),
        ("llama4", 8192, [], "see chunks of the text"),
    ],
)
def test_cells_that_may_be_lost_are_not_kept(
    name: str, window: int, more: list[str], line: str, tmp_path: Path
) -> None:
    words = random_words(name, tmp_path, {"attention.sliding_window": window})
    assert line in finish(1, ["run", *words, *more, "-n", "1", "-p", "a", *disk(tmp_path / "kv")]).stderr


def test_the_plan_has_room_for_blocks_on_their_way() -> None:
    info, hosts = read_model_info(TARGET), [Host("a", frozenset(), 0, free_memory())]
    plain, stored = (lay_out(options_of(TARGET, kv_disk=size), hosts, info, [], 4096, 1) for size in (0, 1 << 30))
    cell_bytes = sum(info.kv_bytes_per_cell)
    more = stored.ranks[0].memory.buffers - plain.ranks[0].memory.buffers
    assert more == (plain.capacity.n_cells + 4096) * cell_bytes


@pytest.mark.parametrize(("n_ranks", "n_turns"), [in_long(1, 3), (3, 2)])
def test_a_conversation_goes_on_after_a_restart(n_ranks: int, n_turns: int, tmp_path: Path) -> None:
    words, prompts = ["-m", str(TARGET), "-md", str(DRAFT), "-c", "2048"], [PROMPT]

    def ask(server: Served, prompt: str) -> tuple[str, int]:
        body = {"prompt": prompt, "max_tokens": 20, "seed": 7, "temperature": 0.8}
        answer = server.http.post("/v1/completions", json=body).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    found = list[tuple[str, int]]()
    for turn in range(n_turns):
        with Served(n_ranks, [*words, *disk(tmp_path)]) as server:
            found.append(ask(server, prompts[-1]))
        prompts.append(f"{prompts[-1]}{found[-1][0]} {turn} {PROMPT[:200]}")
    assert found[0][1] == 0 and min(n_cached for _, n_cached in found[1:]) > 400
    with Served(n_ranks, words) as server:
        assert [ask(server, prompt)[0] for prompt in prompts[:-1]] == [text for text, _ in found]


def test_cells_that_made_room_come_back_from_memory() -> None:
    """With -cram, and with the same text; without they are evaluated again."""
    words, other, found = ["-m", str(TARGET), "-md", "none", "-c", "640", "--parallel", "1"], f"other {PROMPT}", []
    for more in ([], ["-cram", "8"]):
        with Served(2, [*words, *more]) as server:
            bodies = [{"prompt": prompt[:900], "max_tokens": 12, "seed": 7} for prompt in (PROMPT, other, PROMPT)]
            answers = [server.http.post("/v1/completions", json=body).json() for body in bodies]
            found.append([answer["choices"][0]["text"] for answer in answers])
            n_cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
            assert n_cached[:2] == [0, 0] and (n_cached[2] > 300) is bool(more), answers
    assert found[0] == found[1]


def test_memory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for more, line in (
        (["-cram", str(10**9)], "it would fit with -cram "),
        (["-cram", "8", *disk(tmp_path)], "--kv-disk and -cram: cells are kept on disk"),
        (["-cram", "-1"], "-1"),
    ):
        done = finish(2, ["run", *ALONE, *more])
        assert done.returncode == 2 and line in done.stderr, done.stderr


@pytest.mark.parametrize("n_kills", [2, in_long(30)])
def test_a_kill_while_blocks_are_written_harms_no_text(n_kills: int, plain: dict[str, Any], tmp_path: Path) -> None:
    """Of any rank, at any moment: the next job says the same, and leaves no file that it does not use."""
    rng, words = random.Random(3), [*WORDS, "--temp", "0.8", *disk(tmp_path)]
    for _ in range(n_kills):
        job = start(2, ["run", "--json", *words], start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(timeout=rng.uniform(0.3, 2.5))
        for pid in descendants(job.pid)[-1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.communicate(timeout=60)
        assert run_json(2, words)["text"] == plain["0.8"]["text"]
        assert not list(tmp_path.rglob("*.new"))
