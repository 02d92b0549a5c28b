"""A head for the shipped target: recorded texts, a training that goes on, its figures, the same guesses in libllama.

Needs torch; a few steps of training, so nothing is said of how good it is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from experiments.eagle3 import check, export, measure, record, train  # noqa: E402
from experiments.eagle3.measure import ageing, chains  # noqa: E402
from experiments.eagle3.net import load_head  # noqa: E402
from experiments.eagle3.recording import read_texts, recorded  # noqa: E402
from experiments.eagle3.target_parts import read_weights  # noqa: E402
from experiments.eagle3.window import window_of  # noqa: E402
from pipeinfer.cluster.wire import rounded  # noqa: E402
from pipeinfer.models.demo import TARGET  # noqa: E402


def run(command: object, *words: object) -> str:
    result = CliRunner().invoke(command, [str(word) for word in words])  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of our own stages."""
    folder = tmp_path_factory.mktemp("texts")
    run(record.main, "-m", TARGET, "-o", folder, "-np", 4, "-n", 16, "--tokens", 200)
    return folder


@pytest.fixture(scope="module")
def head(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("head") / "head.pt"
    for steps in (2, 3):
        run(train.main, "-m", TARGET, "--texts", texts, "-o", path, "--guessed", 300, "--steps", steps, "--batch", 300)
    return path


def test_texts_are_kept_as_they_were_computed(texts: Path, tmp_path: Path) -> None:
    known = [text for path in recorded(texts) for text in read_texts(path)]
    run(record.main, "-m", TARGET, "-o", tmp_path, "-np", 4, "-n", 16, "--tokens", 200, "--torch")
    other = {text.name: text for path in recorded(tmp_path) for text in read_texts(path)}
    greedy = [text for text in known if text.name.startswith("template") and int(text.name.split("/")[-1]) % 2 == 0]
    assert greedy and len(known) >= 16
    for text in greedy:
        answer = slice(text.n_prompt, None)
        assert (text.taught[text.n_prompt - 1 : -1, 0] == text.tokens[answer]).all()
        n = text.n_prompt
        ours, theirs = (
            torch.from_numpy(each.features[:n].view(np.int16)).view(torch.bfloat16).float()
            for each in (text, other[text.name])
        )
        assert (ours - theirs).norm() < 0.02 * ours.norm()


def test_a_head_is_trained_goes_on_and_is_measured(texts: Path, head: Path) -> None:
    vectors = read_weights(TARGET)["token_embd.weight"]
    net, saved = load_head(head, vectors)
    assert saved["step"] == 3 and len(net.guessed) == 300
    said = run(measure.main, "-m", TARGET, "--texts", texts, "--plain", head, "--ages", 3, head)
    assert "| age" in said and "| all" in said and said.count("±") > 10


def test_an_own_feature_sees_what_a_pipeline_holds(texts: Path, head: Path) -> None:
    """Later true features, which a pipeline does not have yet, change nothing."""
    net, _ = load_head(head, read_weights(TARGET)["token_embd.weight"])
    (text, *_) = read_texts(recorded(texts)[0])
    window, at, age = window_of([text]), 20, 2
    with torch.no_grad():
        *_, before = net.unroll(window.tokens, window.features, age + 1)
        window.features[:, at - age + 1 :] += 1.0
        *_, after = net.unroll(window.tokens, window.features, age + 1)
    assert torch.equal(before[0, at], after[0, at]) and not torch.equal(before[0, at + 1], after[0, at + 1])


def test_libllama_makes_the_same_guesses(texts: Path, head: Path, tmp_path: Path) -> None:
    path = tmp_path / "head.gguf"
    run(export.main, "-m", TARGET, head, path, "--matrices", "F32", "--rows", "F32")
    rows = [line for line in run(check.main, "-m", TARGET, "--texts", texts, head, path).splitlines()[2:]]
    same = [float(row.split("|")[3].split("±")[0]) for row in rows]
    assert len(same) == 4 and min(same) > 0.95
    run(export.main, "-m", TARGET, head, path)
    assert path.stat().st_size < 3_000_000


def test_chains_end_where_a_guess_is_wrong() -> None:
    hits = np.array([[1, 0, 1], [1, 1, 0], [0, 0, 1]], np.bool_)
    tried, right = chains(hits)
    assert tried.tolist() == [3, 1, 1] and right.tolist() == [2, 1, 1]


def test_ageing_is_what_the_simulator_takes() -> None:
    assert ageing(0.6 * 0.8 ** np.arange(9.0)) == pytest.approx(0.8)


def test_bfloat16_is_rounded_to_nearest() -> None:
    values = np.array([1.0, -2.5, 1.00390625, 1.01171875, 3e38], np.float32)
    assert (rounded(values).view(np.int16) == torch.from_numpy(values).bfloat16().view(torch.int16).numpy()).all()
