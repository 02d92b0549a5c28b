"""Every policy at every rank count against plain llama-cpp-python: `python benchmarks/identity.py`.

Token for token, greedy, and the same sampled text everywhere, on the shipped pair and on random-weight models of
several quantisations, with prompts of 1, 40 and 700 tokens. Prints a line a case; the exit code is 1 if any differs.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent.parent))

from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.policies.factory import POLICIES
from tests.gguf_factory import Shape, write_model
from tests.jobs import plain_tokens, run_json


def text_of(n_tokens: int) -> str:
    """About as many tokens in any vocabulary; the run reports how many it was."""
    return (
        "def add(first, second):\n    return first + second\n"[: 4 * n_tokens]
        if n_tokens < 20
        else "x = [1, 2]\n" * (n_tokens // 8)
    )


@click.command(help=__doc__)
@click.option("--ranks", default="1,2,3,4,5")
@click.option("--tokens", default=256)
@click.option("--models", default="shipped,Q8_0,Q4_K_M,Q6_K")
def main(ranks: str, tokens: int, models: str) -> None:
    n_bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in models.split(","):
            target, draft = TARGET, DRAFT
            if name != "shipped":
                shape = Shape(n_layer=5, n_vocab=2048, peaky=12.0)
                target = write_model(Path(folder, f"{name}.gguf"), shape, name)
                draft = write_model(Path(folder, f"{name}-draft.gguf"), replace(shape, n_layer=2), "Q8_0")
            for n_prompt in (0, 40, 700):
                n_bad += check(name, target, draft, n_prompt, [int(n) for n in ranks.split(",")], tokens)
    print(f"{n_bad} differences")
    sys.exit(n_bad > 0)


def check(name: str, target: Path, draft: Path, n_prompt: int, ranks: list[int], n_predict: int) -> int:
    common = ["-m", str(target), "-md", str(draft), "-n", str(n_predict), "--ignore-eos", "--numerics", "exact"]
    common += ["-p", text_of(n_prompt)]
    expected: dict[str, list[int]] = {}
    n_bad = 0
    for n_ranks in ranks:
        for policy in POLICIES:
            for label, sampling in (("greedy", ["--temp", "0"]), ("sampled", ["--temp", "0.8", "--seed", "7"])):
                result = run_json(n_ranks, [*common, "--policy", policy, *sampling])
                if label not in expected:
                    prompt = result["prompt_tokens"]
                    expected[label] = plain_tokens(target, prompt, n_predict) if label == "greedy" else result["tokens"]
                same = result["tokens"] == expected[label]
                n_bad += not same
                acceptance = result["speculation"]["acceptance_rate"]
                n = len(result["prompt_tokens"])
                print(f"{name:8} prompt {n:4} {label:8} N={n_ranks} {policy:12} acceptance {acceptance:5.2f} "
                      f"{'same' if same else 'DIFFERENT'}", flush=True)  # fmt: skip
    return n_bad


if __name__ == "__main__":
    main()
