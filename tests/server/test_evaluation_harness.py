"""lm-evaluation-harness against a real server: its figures follow from the log-probabilities and the text of plain
llama-cpp-python. It has a Python of its own, since it wants older packages than the tests do."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from pipeinfer.models.demo import TARGET
from tests.server.test_scoring import plain_scores
from tests.support.jobs import plain_tokens
from tests.support.serving import Served

HARNESS = Path(sys.prefix) / "lm-eval" / "bin" / "python"
N_ANSWER = 4  # tokens

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""

TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: right
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "text": """
output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
    "answer": """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["never"], max_gen_toks: 4, temperature: 0, ignore_eos: true}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}

EVALUATE = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
folder, url, tasks, *ways = sys.argv[1:]
evaluations = [
    simple_evaluate(
        model="local-completions",
        model_args=f"base_url={url}/v1/completions,model=any,{way}",
        tasks=tasks.split(),
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        bootstrap_iters=0,
    )
    for way in ways
]
print(json.dumps([{name: each[name] for name in ("results", "samples")} for each in evaluations], default=str))
"""

QUESTIONS = ["def add(a, b):\n    return a", "import os\n\n\nclass Reader:\n    def __init__(self", "for line in"]
CHOICES = [["+ b", "(", "in"], [", path):", "]", "self"], ["lines:", "self.lines:", "def"]]


def asked_for(server: Served, path: str, name: str, **fields: Any) -> Any:
    return server.http.post(path, json=fields).json()[name]


def write_tasks(folder: Path, answers: list[str]) -> None:
    rows = [
        {"question": question, "choices": choices, "right": at, "answer": answer}
        for at, (question, choices, answer) in enumerate(zip(QUESTIONS, CHOICES, answers, strict=True))
    ]
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + task)


def evaluate(server: Served, folder: Path, ways: list[str]) -> list[dict[str, Any]]:
    """Of each way to ask, the harness's figures and samples."""
    done = subprocess.run(
        [HARNESS, "-c", EVALUATE, folder, server.url, " ".join(TASKS), *ways],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"HF_HOME": str(folder), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    evaluations: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return evaluations


def values_of(evaluation: dict[str, Any], task: str) -> list[Any]:
    """What was answered to each request of a task, in the order of its documents."""
    samples = sorted(evaluation["samples"][task], key=lambda sample: sample["doc_id"])
    return [value for sample in samples for (value,) in sample["resps"]]


@pytest.mark.skipif(not HARNESS.exists(), reason="`make .venv/stamp-lm-eval` installs lm-evaluation-harness")
def test_its_figures_are_those_of_plain_llama(tmp_path: Path) -> None:
    # as the reference; repacked weights round otherwise
    with Served(2, ["-m", str(TARGET), "--parallel", "3", "--no-repack"]) as server:

        def tokens(text: str) -> list[int]:
            return asked_for(server, "/tokenize", "tokens", prompt=text, add_special_tokens=False)

        begin = tokens(server.http.get("/tokenizer_info").json()["bos_token"])
        questions = [*map(tokens, QUESTIONS)]
        texts = [
            asked_for(server, "/detokenize", "content", tokens=plain_tokens(TARGET, question, N_ANSWER))
            for question in questions
        ]
        write_tasks(tmp_path, [*texts[:2], "another answer"])
        lone, many = evaluate(server, tmp_path, ["batch_size=1", "batch_size=3,num_concurrent=3"])
        prompts = [
            tokens(f"{text} {each}") for text, choices in zip(QUESTIONS, CHOICES, strict=True) for each in choices
        ]

    assert lone["results"] == many["results"]
    assert all(values_of(lone, task) == values_of(many, task) for task in TASKS), "the same bits"

    scores = plain_scores(TARGET, [*prompts, *(begin + question for question in questions)])
    sums, are_likeliest = [], []
    for question, (chosen, best) in zip([each for each in questions for _ in "abc"], scores, strict=False):
        first = len(question) - 1
        sums.append(math.fsum(chosen[first:]))
        are_likeliest.append(chosen[first:] == best[first:])
    choices = values_of(lone, "choice")
    assert [value for value, _ in choices] == pytest.approx(sums, abs=1e-4)
    assert [is_greedy for _, is_greedy in choices] == are_likeliest
    n_right = sum(max(range(3), key=lambda at: sums[3 * row + at]) == row for row in range(3))
    assert lone["results"]["choice"]["acc,none"] == pytest.approx(n_right / 3)

    wholes = [math.fsum(chosen) for chosen, _ in scores[len(prompts) :]]
    assert values_of(lone, "text") == pytest.approx(wholes, abs=1e-4)
    n_bytes = sum(len(text.encode()) for text in QUESTIONS)
    perplexity = math.exp(-math.fsum(wholes) / n_bytes)
    assert lone["results"]["text"]["byte_perplexity,none"] == pytest.approx(perplexity)

    assert values_of(lone, "answer") == texts
    assert lone["results"]["answer"]["exact_match,none"] == pytest.approx(2 / 3)
