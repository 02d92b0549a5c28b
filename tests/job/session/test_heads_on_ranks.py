"""`-md head.gguf` and `-md mtp`, as a user does it: real ranks, a head with random weights for the shipped target, a
target with a head of its own; and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeinfer.cluster.hosts.host import this_host
from pipeinfer.errors import UserError
from pipeinfer.job.inspect.model_report import describe_file, file_lines
from pipeinfer.job.options.values import Backend
from pipeinfer.job.placement.checks import open_models
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.drafts.head_files import mtp_head, read_draft
from pipeinfer.models.gguf.model_info import OWN_HEAD, read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.policies import PipeInfer
from tests.job.run.test_run import PROMPT
from tests.support.cases import in_long
from tests.support.gguf_factory import Shape, write_model
from tests.support.heads import write_guessing, write_head
from tests.support.jobs import finish, plain_tokens_after, run_json
from tests.support.paces import pace_words, slow_target, with_refiner
from tests.support.planned import deploy, options_of

GREEDY = ["-p", PROMPT, "-n", "32", "--temp", "0", "--ignore-eos", "-t", "1"]
LAYERS = (2, 4, 6)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("heads") / "head.gguf", TARGET, LAYERS)


@pytest.fixture(scope="module")
def plain() -> list[int]:
    return plain_tokens_after(TARGET, run_json(1, ["-p", PROMPT, "-n", "1"]), 32)


@pytest.fixture
def paced(tmp_path: Path) -> dict[str, list[str]]:
    """By the policy: time for a guess, where that is made while a run is in flight or never. For 2 ranks, and 3."""
    found = {}
    for stages, policy in ((1, "pipeinfer"), (2, "pipedec")):
        (path := tmp_path / f"{policy}.toml").write_text(slow_target(10.0, draft_layers=1, stages=stages))
        found[policy] = ["--pace", str(path)]
    return found


@pytest.mark.parametrize(
    ("n_ranks", "policy"),
    [in_long(1, "auto"), (1, "speculative"), (2, "pipeinfer"), (3, "flowspec"), in_long(3, "pipedec")],
)
def test_the_text_is_that_of_the_target(
    n_ranks: int, policy: str, plain: list[int], head: Path, paced: dict[str, list[str]]
) -> None:
    # its guesses are not likely
    all_guesses = ["--accept-cutoff", "0"] if policy in ("pipeinfer", "speculative") else []
    words = ["-m", str(TARGET), "-md", str(head), *GREEDY, *all_guesses, "--policy", policy]
    result = run_json(n_ranks, [*words, *paced.get(policy, [])])
    assert result["tokens"] == plain
    assert result["speculation"]["draft_n"] > 0 or policy == "auto"


@pytest.fixture(scope="module")
def with_own_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_guessing(tmp_path_factory.mktemp("heads"), "glm4moe", with_vocab=True)


def test_the_text_of_a_target_with_a_head_of_its_own(with_own_head: Path, paced: dict[str, list[str]]) -> None:
    words = ["-m", str(with_own_head), "-md", "mtp", *GREEDY]
    expected = run_json(1, [*words[:2], *GREEDY])
    for n_ranks, policy in ((1, "speculative"), (2, "pipeinfer"), (3, "flowspec")):
        result = run_json(n_ranks, [*words, "--policy", policy, *paced.get(policy, [])])
        assert result["tokens"] == expected["tokens"]
        assert result["speculation"]["draft_n"] > 0 and result["model_draft"]["name"] == "mtp"
    found, none = (run_json(2, [*words[:2], *GREEDY, "--policy", "auto", *more]) for more in ((), ("-md", "none")))
    assert found["model_draft"]["name"] == "mtp" and not none["model_draft"]
    assert found["tokens"] == none["tokens"] == expected["tokens"]
    done = finish(1, ["plan", *words[:4]])
    assert done.returncode == 0 and "mtp" in done.stdout, done.stderr
    assert "-md mtp guesses with it" in "\n".join(file_lines(describe_file(with_own_head, 0, "exact")))


def test_the_head_in_a_file_beside_its_target(with_own_head: Path, tmp_path: Path) -> None:
    path = tmp_path / "mtp-model.gguf"
    with closing(open_slice(mtp_head(read_model_info(with_own_head)), 0, 1)) as own:
        path.write_bytes(own.path.read_bytes())
    words = ["-m", str(with_own_head), *GREEDY, "--policy", "speculative", "-md"]
    beside, inside = (run_json(2, [*words, draft]) for draft in (str(path), "mtp"))
    assert beside["tokens"] == inside["tokens"] and beside["speculation"]["draft_n"] > 0
    with pytest.raises(UserError, match=r"is of a model of architecture 'glm4moe': it is no head for .*'llama'"):
        plan((path,))


def test_a_target_without_a_head_of_its_own_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"-md mtp: .* has no head of its own; give another draft, or -md none"):
        plan((OWN_HEAD,))


@pytest.mark.parametrize("policy", ["auto", in_long("speculative"), "pipespec"])
def test_a_draft_refines_what_a_head_guesses(policy: str, plain: list[int], head: Path, tmp_path: Path) -> None:
    pace = pace_words(tmp_path, with_refiner(slow_target(4.0, draft_layers=1), 0.5, 2))
    words = ["-m", str(TARGET), "-md", str(DRAFT), "-md", str(head), *GREEDY, "--policy", policy]
    result = run_json(4, [*words, *pace])
    assert result["tokens"] == plain and result["speculation"]["draft_n_accepted"] > 0


def test_many_at_once_are_those_of_each_alone(head: Path, tmp_path: Path) -> None:
    """Sampled, with penalties and with a grammar, some with one beginning."""
    asked = [
        {"prompt": PROMPT * (1 + number % 2), "max_tokens": 16, "seed": number, "temperature": 0.8 * (number % 2)}
        | ({"grammar": 'root ::= [a-z ]+ "."'} if number == 3 else {})
        for number in range(6)
    ]
    path, texts = tmp_path / "asked.jsonl", []
    path.write_text("\n".join(map(json.dumps, asked)))
    for n_ranks, parallel, drafts in ((1, 1, ["-md", "none"]), (3, 4, ["-md", str(head), "--policy", "pipeinfer"])):
        answers = tmp_path / f"{parallel}.jsonl"
        words = ["batch", str(path), "-o", str(answers), "-m", str(TARGET), *drafts, "-c", "400", "-t", "1"]
        done = finish(n_ranks, [*words, "--parallel", str(parallel)])
        assert done.returncode == 0, done.stderr
        found = map(json.loads, answers.read_text().splitlines())
        texts.append({each["index"]: each["text"] for each in found})
    assert len(texts[0]) == 6 and texts[0] == texts[1]


def plan(drafts: tuple[Path, ...], **options: Any) -> JobPlan:
    chosen = options_of(model=TARGET, drafts=drafts, policy=PipeInfer(), **options)
    info, _, tokenizer = open_models(chosen)
    tokenizer.close()
    return deploy(chosen, [this_host("a")] * 3, info, 256, 1)


def test_a_plan_counts_the_head_and_what_it_reads(head: Path) -> None:
    found, without = plan((head,)), plan((DRAFT,))
    assert found.layers_read == (1, 3, 5) and not without.layers_read
    own, borrowed = read_draft(head).layer_bytes[0], 2 * read_model_info(TARGET).input_bytes  # table and output
    assert found.memory[0].weights + found.memory[0].mapped > own + borrowed
    assert found.memory[1].buffers > without.memory[1].buffers


def test_info_says_what_a_head_is(head: Path, tmp_path: Path) -> None:
    part = write_head(tmp_path / "part.gguf", TARGET, LAYERS, n_tokens=300, own_tables=True)
    lines = ["\n".join(file_lines(describe_file(path, 0, "exact"))) for path in (head, part)]
    assert "reads the inputs of layers 2, 4, 6 of a target that is 288 wide" in lines[0]
    assert "4096 tokens; token_embd.weight and output.weight are the target's" in lines[0]
    assert "guesses       300 tokens\n" in lines[1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"target_hidden_size": 64}, "reads states of 64 values; the target has 9 layers, 288 values"),
        ({"target_layers": [2, 4, 9]}, "reads the inputs of layers 2, 4 and 9, and layers 1 to 8"),
        ({"target_layers": [0, 4, 5]}, "reads the inputs of layers 0, 4 and 5"),
        ({"target_layers": [2, 4]}, r"target_layers is \(2, 4\), and three layers are wanted"),
        ({"block_count": 2}, "block_count is 2, 1 to 1 are possible"),
    ],
)
def test_a_head_for_another_model_is_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        plan((write_head(tmp_path / "head.gguf", TARGET, LAYERS, **changed),))


def test_a_head_with_other_tokens_is_refused(tmp_path: Path) -> None:
    other = write_model(tmp_path / "other.gguf", Shape(n_layer=9, n_embd=288, n_head=9))
    with pytest.raises(UserError, match=r"it has 320 tokens; the target has .* 4096 tokens"):
        plan((write_head(tmp_path / "head.gguf", other, LAYERS),))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (lambda head: {"drafts": (head, DRAFT, head)}, "is a head, and so are 1 of the other drafts; give one head"),
        (lambda head: {"drafts": (head,), "draft_rank": 1}, "--draft-rank 1: .* is a head, which drafts on rank 0"),
        (lambda head: {"drafts": (head,), "backend": (Backend("torch"),)}, "gives no features: .* layers 1, 3, 5"),
    ],
)
def test_a_head_elsewhere_or_beside_another_is_refused(
    options: Callable[[Path], dict[str, Any]], said: str, head: Path
) -> None:
    with pytest.raises(UserError, match=said):
        plan(**options(head))


def test_a_damaged_head_is_refused(tmp_path: Path) -> None:
    path = write_head(tmp_path / "head.gguf", TARGET, LAYERS, n_tokens=300)
    data = path.read_bytes()
    ids = np.arange(300, dtype=np.int64).tobytes()
    assert data.count(ids) == 1
    for token in (5000, -1, 7):  # beyond the vocabulary, below it, and twice
        path.write_bytes(data.replace(ids, np.array([token, *range(1, 300)], np.int64).tobytes()))
        with pytest.raises(UserError, match="d2t do not fit a vocabulary of 4096 tokens"):
            plan((path,))


def test_a_head_is_no_target(head: Path) -> None:
    with pytest.raises(UserError, match="give it as a draft, with -md"):
        read_model_info(head)
