"""`perplexity --kl-divergence`: llama-perplexity's file, and its figures on any number of ranks."""

from __future__ import annotations

import json
import math
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from pipeinfer.cluster.stages.log_prob_file import LogProbFile, check_compared, chunk_text, create
from pipeinfer.errors import UserError
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.unfinished import beside
from tests.support.jobs import finish

SIZE, N_CHUNKS = 64, 4
N_ROWS, N_VOCAB = SIZE // 2 - 1, 4096
BASE = "--kl-divergence-base"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's log-probabilities, written by the last of two ranks."""
    path = tmp_path_factory.mktemp("base") / "target.base"
    words = ["-f", __file__, "-c", str(SIZE), "--chunks", str(N_CHUNKS), BASE, str(path)]
    done = finish(2, ["perplexity", "-m", str(TARGET), *words])
    assert done.returncode == 0 and "Final estimate: PPL" in done.stdout, done.stderr
    assert list(path.parent.iterdir()) == [path]
    return path


def read(path: Path) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The numbers at the beginning, the chunks, and the log-probabilities (n_chunks, n_rows, n_vocab), as
    llama-perplexity reads them."""
    data = path.read_bytes()
    assert data[:8] == b"_logits_"
    tokens = np.frombuffer(data, "<i4", N_CHUNKS * SIZE, 20).reshape(N_CHUNKS, SIZE)
    rows = np.frombuffer(data, "<u2", -1, 20 + tokens.nbytes).reshape(N_CHUNKS, N_ROWS, N_VOCAB + 4)
    steps = rows[:, :, :4].copy().view("<f4")
    return np.frombuffer(data, "<i4", 3, 8).tolist(), tokens, steps[:, :, :1] * rows[:, :, 4:] + steps[:, :, 1:]


def plain_logprobs(model: Path, chunks: np.ndarray) -> np.ndarray:
    """(n_chunks, n_rows, n_vocab), by libllama alone."""
    plain = llama_cpp.Llama(str(model), n_ctx=SIZE, n_batch=SIZE, logits_all=True, verbose=False, n_threads=1)
    logits = []
    for chunk in chunks.tolist():
        plain.reset()
        plain.eval([plain.token_bos(), *chunk[1:]])
        logits.append(np.array(plain.scores[SIZE // 2 : SIZE - 1], np.float64))
    plain.close()
    return np.array(logits) - np.log(np.exp(logits).sum(axis=2, keepdims=True))


def compare(n_ranks: int, model: Path, base: Path) -> dict[str, float]:
    done = finish(n_ranks, ["perplexity", "-m", str(model), "--kl-divergence", BASE, str(base), "--json"])
    assert done.returncode == 0, done.stderr
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def test_the_file_is_llama_perplexity_s(base: Path) -> None:
    head, chunks, logprobs = read(base)
    assert head == [SIZE, N_VOCAB, N_CHUNKS]
    plain = plain_logprobs(TARGET, chunks)
    assert (np.exp(plain) * np.abs(logprobs - plain)).sum(axis=2).mean() < 0.05
    assert logprobs.min() > logprobs.max() - 40, "what is 16 below the likeliest is written as that"


def test_the_figures_follow_from_both_models_on_any_number_of_ranks(base: Path) -> None:
    found = compare(1, DRAFT, base)
    other = compare(2, DRAFT, base)
    assert {**other, "ranks": 1} == found
    _, chunks, expected = read(base)
    ours = plain_logprobs(DRAFT, chunks)
    chosen = chunks[:, SIZE // 2 + 1 :, None]
    losses, base_losses = (-np.take_along_axis(each, chosen, 2).ravel() for each in (ours, expected))
    divergences = (np.exp(expected) * (expected - ours)).sum(axis=2).ravel()
    assert found["divergence"] == pytest.approx(divergences.mean(), rel=0.01)
    assert found["divergence_error"] == pytest.approx(divergences.std() / math.sqrt(divergences.size - 1), rel=0.05)
    assert found["divergence_median"] == pytest.approx(np.median(divergences), rel=0.05)
    assert found["base_perplexity"] == pytest.approx(math.exp(base_losses.mean()), rel=1e-4)
    assert found["ratio"] == pytest.approx(math.exp((losses - base_losses).mean()), rel=0.02)
    same_top = (ours.argmax(axis=2) == expected.argmax(axis=2)).mean()
    assert found["same_top"] == pytest.approx(same_top, abs=0.02)


def test_a_model_does_not_diverge_from_itself(base: Path) -> None:
    found = compare(3, TARGET, base)
    assert abs(found["divergence"]) < 1e-5 and found["same_top"] == 1
    assert found["ratio"] == pytest.approx(1, abs=1e-4) and found["ratio_error"] < 1e-4


@pytest.mark.parametrize(
    ("n_bytes", "words", "why"),
    [
        (9999, ["--kl-divergence"], "has 9999 bytes of"),
        (5, ["--kl-divergence"], "does not begin with _logits_"),
        (-1, ["--kl-divergence"], "No such file"),
        (-1, ["--kl-divergence", "-f", __file__], "and no --file"),
        (-1, [], "there is no text; give --file FILE"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    base: Path, tmp_path: Path, n_bytes: int, words: list[str], why: str
) -> None:
    path = tmp_path / "some.base"
    if n_bytes >= 0:
        path.write_bytes(base.read_bytes()[:n_bytes])
    done = finish(1, ["perplexity", "-m", str(DRAFT), BASE, str(path), *words])
    assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("at", "data", "why"),
    [
        (8, [2], "4 chunks of 2 tokens"),
        (8, [-5], "tokens"),
        (16, [0], "0 chunks"),
        (20 + 4 * 40, [9999], "to 9999, of a"),
    ],
)
def test_a_damaged_base_is_refused(base: Path, tmp_path: Path, at: int, data: list[int], why: str) -> None:
    damaged = bytearray(base.read_bytes())
    damaged[at : at + 4] = np.array(data, "<i4").tobytes()
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(UserError, match=f"is damaged: .*{why}"):
        _ = LogProbFile(tmp_path / "damaged").tokens


ROWS_AT = 20 + 4 * N_CHUNKS * SIZE
HEADS = [b"\xff" * 9, np.array([3e38, 0], "<f4").tobytes(), np.array([-0.0, 0], "<f4").tobytes(), None]


@pytest.mark.parametrize("head", HEADS, ids=["nan", "huge", "no probabilities", "cut"])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_rows_without_numbers_are_named(base: Path, tmp_path: Path, head: bytes | None) -> None:
    (path := tmp_path / "damaged").write_bytes(base.read_bytes())
    file, at = LogProbFile(path), ROWS_AT
    logits = np.zeros(N_VOCAB, np.float32)
    assert math.isfinite(file.compare(0, SIZE // 2 + 1, logits, 5).divergence)
    with path.open("r+b") as rows:
        rows.truncate(at + 99) if head is None else os.pwrite(rows.fileno(), head, at)
    comparison = file.compare(0, SIZE // 2 + 1, logits, 5)
    with pytest.raises(UserError, match=f"{path} is damaged: chunk 1 has no numbers"):
        check_compared(chunk_text(path, 0, False), [comparison])


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_damaged_base_ends_the_job_in_order(base: Path, tmp_path: Path, n_ranks: int) -> None:
    data = bytearray(base.read_bytes())
    data[ROWS_AT : ROWS_AT + 8] = bytes(8)
    (path := tmp_path / "damaged").write_bytes(data)
    done = finish(n_ranks, ["perplexity", "-m", str(DRAFT), "--kl-divergence", BASE, str(path)])
    assert done.returncode == 2 and "chunk 1 has no numbers" in done.stderr, done.stderr
    assert "rank 0 (" not in done.stderr and "rank 1 (" not in done.stderr


def test_what_the_job_reads_and_devices_are_not_replaced(tmp_path: Path) -> None:
    text, model, pipe = tmp_path / "text", tmp_path / "model.gguf", tmp_path / "pipe"
    text.write_bytes(Path(__file__).read_bytes())
    model.symlink_to(TARGET)
    os.mkfifo(pipe)
    for path, why in (
        (text, "is the file that --file reads"),
        (model, "is the file that --model reads"),
        (pipe, "is a device or a pipe"),
    ):
        done = finish(1, ["perplexity", "-m", str(TARGET), "-f", str(text), "-c", "64", BASE, str(path)])
        assert done.returncode == 2 and why in done.stderr, done.stderr
    assert text.read_bytes() == Path(__file__).read_bytes() and pipe.is_fifo()


def test_the_file_that_a_link_names_is_written(tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(made := tmp_path / "made")
    beside(made).touch()  # what a killed job has left
    done = finish(1, ["perplexity", "-m", str(DRAFT), "-f", __file__, "-c", "64", "--chunks", "1", BASE, str(link)])
    assert done.returncode == 0 and link.is_symlink() and LogProbFile(made).n_chunks == 1, done.stderr
    assert sorted(tmp_path.iterdir()) == [link, made]


def test_two_jobs_in_one_folder_write_their_own_files(tmp_path: Path) -> None:
    paths = [tmp_path / f"{'a' * 50}{each}.base" for each in (1, 2)]  # names that begin alike
    texts = [Path(__file__), Path(__file__).with_name("test_perplexity.py")]

    def write(path: Path, text: Path) -> tuple[int, list[list[int]]]:
        words = ["-m", str(DRAFT), "-f", str(text), "-c", "64", "--chunks", "8", "-t", "1", BASE, str(path)]
        return finish(1, ["perplexity", *words]).returncode, LogProbFile(path).tokens

    with ThreadPoolExecutor() as pool:
        (first, one), (second, other) = pool.map(write, paths, texts)
    assert first == second == 0 and one != other and sorted(tmp_path.iterdir()) == paths


def test_a_file_without_room_is_not_begun(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))
    try:
        with pytest.raises(UserError, match="name a file where there is room"):
            create(tmp_path / "new", N_VOCAB, [[1] * SIZE])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_file_without_room_is_removed(tmp_path: Path) -> None:
    create(path := tmp_path / "new", N_VOCAB, [[1] * SIZE])
    file, limits = LogProbFile(path, is_new=True), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * N_VOCAB, limits[1]))
    try:
        with pytest.raises(UserError, match="name a file where there is room"):
            file.note(0, SIZE // 2 + 1, np.arange(N_VOCAB, dtype=np.float32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not path.exists()
