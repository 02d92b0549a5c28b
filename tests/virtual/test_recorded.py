"""What real models chose, in a file, and simulated."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.record import N_OFF_PATH, Prompt, read_prompts, record_pair
from pipeinfer.core.runs import Guess
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.virtual.choices import RecordedChoices, read_choices, write_choices
from tests.support.jobs import finish, run_json

TEXT = RecordedChoices("set/0", 2, [3, 4], [[(3, 0.9), (8, 0.1)], [(7, 0.5), (4, 0.25)], [(5, 1.0)]])


def test_recorded_choices_survive_a_file(tmp_path: Path) -> None:
    assert TEXT.guesses(1, (), 2) == [Guess(3, 0.9), Guess(8, 0.1)] and TEXT.acceptance == 0.5
    assert [TEXT.target(position) for position in range(6)] == [*TEXT.prompt, 3, 4, 0, 0]
    write_choices(tmp_path / "c.jsonl", [TEXT, TEXT])
    _, loaded = read_choices(tmp_path / "c.jsonl")
    assert loaded.guesses(2, (), 1) == [Guess(7, 0.5)] and loaded.prompt == TEXT.prompt
    assert loaded.guesses(3, (9, 9), 1), "a wrong branch gets some recorded guesses"


def test_a_wrong_branch_has_the_guesses_that_were_recorded_there() -> None:
    after_wrong = [[(5, 0.9)], [(6, 0.8)]]
    text = replace(TEXT, off_path=[[], after_wrong])
    assert text.guesses(2, (7,), 1) == [Guess(5, 0.9)] and text.guesses(2, (7, 5), 1) == [Guess(6, 0.8)]
    assert text.guesses(2, (7, 5, 6, 6), 1) == [Guess(6, 0.8)], "the last ones go on"
    assert text.guesses(1, (8,), 1) == [Guess(5, 0.9)], "a branch that was not recorded has those of one that was"


def test_as_many_guesses_as_are_wanted_come_after_the_recorded_ones() -> None:
    """A tree of a given width is as wide as a real draft makes it."""
    guesses = TEXT.guesses(1, (), 5)
    assert guesses[:2] == TEXT.guesses(1, (), 2) and len({guess.token for guess in guesses}) == 5
    assert not {3, 4} & {guess.token for guess in guesses[2:]} and guesses[1].probability > guesses[2].probability > 0


@pytest.mark.parametrize("content", ["", "{}", "[1]", "x", '{"name":"a","n_prompt":1,"tokens":[],"known":[[]]}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match="holds no recorded texts"):
        read_choices(path)
    with pytest.raises(UserError, match="No such file"):
        read_choices(tmp_path / "none")


def test_a_set_of_questions_is_recorded_by_name_and_in_the_models_template(tmp_path: Path) -> None:
    questions = tmp_path / "set.jsonl"
    questions.write_text("".join(json.dumps({"turns": [text, "more"]}) + "\n" for text in ("def f", "def g", "x")))
    first, second = read_prompts(questions, 2, TARGET, chat=False)
    assert (first.name, second.name) == ("set/0", "set/1")
    (asked, *_), tokenizer = read_prompts(questions, 0, TARGET, chat=True), Tokenizer(TARGET)
    assert b"User: def f" in b"".join(map(tokenizer.decode_piece, asked.tokens))
    text = record_pair(TARGET, DRAFT, first, 12, n_threads=1)
    assert len(text.tokens) == 12 and len(text.known) == 13 and 0 < text.acceptance <= 1
    assert [len(chain) for chain in text.off_path] == [0 if hit else N_OFF_PATH for hit in text.hits]
    ended = record_pair(TARGET, DRAFT, first, 12, n_threads=1, ends=text.tokens[4:5])
    assert ended.tokens == text.tokens[: text.tokens.index(text.tokens[4]) + 1]
    assert record_pair(TARGET, DRAFT, Prompt("", first.tokens), 1, n_threads=1).tokens == text.tokens[:1]


def test_a_sampled_text_is_recorded_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("def f")
    (prompt,) = read_prompts(tmp_path / "p.txt", 0, TARGET, chat=False)
    sampling = SamplingParams(seed=3, temp=1.0, top_k=0, top_p=1.0, min_p=0.0)
    text = record_pair(TARGET, DRAFT, prompt, 16, n_threads=1, sampling=sampling)
    words = ["-p", "def f", "-n", "16", "--temp", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed", "3"]
    assert text.tokens == run_json(1, [*words, "--ignore-eos"])["tokens"]
    assert text.tokens != record_pair(TARGET, DRAFT, prompt, 16, n_threads=1).tokens
    assert text.acceptance > 0.2, "the draft shares the noise"


def test_the_command_simulates_each_text(tmp_path: Path) -> None:
    choices, results, loads = tmp_path / "pair.jsonl", tmp_path / "results.csv", tmp_path / "loads.csv"
    longer = RecordedChoices("set/1", 5, [3] * 40, [[(3, 0.9)]] * 41)
    write_choices(choices, [TEXT, longer])
    common = ["simulate", "--profile", "pipedec-7", "--choices", str(choices), "--policy", "iterative,auto"]
    done = finish(1, [*common, "-n", "30", "--results", str(results)])
    assert done.returncode == 0 and " ± " in done.stdout, done.stderr
    rows = list(csv.DictReader(results.open()))
    assert [(row["policy"], row["prompt"], row["prompt_n"], row["predicted_n"], row["choices"]) for row in rows] == [
        ("iterative", "set/0", "2", "2", "pair"),
        ("auto", "set/0", "2", "2", "pair"),
        ("iterative", "set/1", "5", "30", "pair"),
        ("auto", "set/1", "5", "30", "pair"),
    ]
    done = finish(1, [*common, "--requests", "3", "--results", str(loads)])
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(loads.open()))
    assert [(row["policy"], row["prompt"], row["prompt_n"], row["choices"]) for row in rows] == [
        ("iterative", "pair", "9", "pair"),
        ("auto", "pair", "9", "pair"),
    ]
    for others in (["--acceptance", "0.5"], ["--ranks", "0.5,0.1"]):
        assert "give one of" in finish(1, [*common, *others]).stderr
    done = finish(
        1,
        [
            "simulate",
            "--profile",
            "pipespec",
            "--pair",
            "llama-70b-8b-1b",
            "--choices",
            str(choices),
            "--policy",
            "auto",
        ],
    )
    assert done.returncode == 2 and "recorded texts are of one" in done.stderr
