"""Every policy at every rank count against plain llama-cpp-python: `python benchmarks/identity.py`.

Token for token, greedy, and the same sampled text everywhere, on the shipped pair and on random-weight models of
several quantisations, with prompts of about 1, 40 and 700 tokens. Prints a line a case; the exit code is 1 if any
differs. What is hard on a pipeline comes by option: `--prompts 1900`, `--ablate all`, `--delays`, and, of
`--policies pipeinfer`, `--flags '--width 8 -ps 0'`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent.parent))

from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.policies.registry import POLICIES
from tests.delayed import run_delayed
from tests.gguf_factory import Shape, write_model
from tests.jobs import plain_tokens, run_json

ABLATIONS = ("no-cancel", "no-continuous", "no-async", "no-partitions")
LONG = 500  # from here on prompt and text may need more context than the shipped target was trained for


@dataclass(frozen=True, slots=True)
class Matrix:
    """What to combine. `variants`: flags of the runs under policy pipeinfer, each a run."""

    ranks: Sequence[int]
    policies: Sequence[str]
    variants: Sequence[str]
    n_predict: int
    temps: Sequence[str]
    flags: Sequence[str]
    delays: bool

    def cases(self) -> Iterator[tuple[int, str, str, str]]:
        for n_ranks in self.ranks:
            for policy in self.policies:
                for variant in self.variants if policy == "pipeinfer" else ("",):
                    for temp in self.temps:
                        yield n_ranks, policy, variant, temp

    def run(self, n_ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
        return run_delayed(n_ranks, arguments, n_ranks, 300) if self.delays else run_json(n_ranks, arguments)


@click.command(help=__doc__)
@click.option("--ranks", default="1,2,3,4,5", show_default=True)
@click.option("--tokens", default=256, show_default=True)
@click.option("--models", default="shipped,Q8_0,Q4_K_M,Q6_K", show_default=True)
@click.option("--prompts", default="0,40,700", show_default=True, help="Their lengths in tokens, roughly.")
@click.option("--policies", default=",".join(POLICIES), show_default=True)
@click.option("--temps", default="0,0.8", show_default=True)
@click.option("--ablate", default="", help=f"Run pipeinfer also with each of these, or all: {','.join(ABLATIONS)}.")
@click.option("--flags", default="", help="Further options of every run, as in '--width 8 -ps 0'.")
@click.option("--delays", is_flag=True, help="Ranks pause at random; see tests/delayed.py.")
def main(
    ranks: str, tokens: int, models: str, prompts: str, policies: str, temps: str, ablate: str, flags: str, delays: bool
) -> None:
    variants = ABLATIONS if ablate == "all" else [name for name in ablate.split(",") if name]
    matrix = Matrix(
        [int(n) for n in ranks.split(",")], policies.split(","), ["", *variants], tokens, temps.split(","),
        flags.split(), delays,
    )  # fmt: skip
    n_cases = n_bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in models.split(","):
            target, draft = TARGET, DRAFT
            if name != "shipped":
                shape = Shape(n_layer=5, n_vocab=2048, peaky=12.0)
                target = write_model(Path(folder, f"{name}.gguf"), shape, name)
                draft = write_model(Path(folder, f"{name}-draft.gguf"), replace(shape, n_layer=2), "Q8_0")
            for n_prompt in map(int, prompts.split(",")):
                for same in check(name, target, draft, n_prompt, matrix):
                    n_cases, n_bad = n_cases + 1, n_bad + (not same)
    print(f"{n_cases} cases, {n_bad} differences")
    sys.exit(n_bad > 0)


def text_of(n_tokens: int) -> str:
    """About as many tokens in any vocabulary; the run reports how many it was."""
    return (
        "def add(first, second):\n    return first + second\n"[: 4 * n_tokens]
        if n_tokens < 20
        else "x = [1, 2]\n" * (n_tokens // 8)
    )


def check(name: str, target: Path, draft: Path, n_prompt: int, matrix: Matrix) -> Iterator[bool]:
    """Run the matrix for one prompt; whether each text is the expected one."""
    common = ["-m", str(target), "-md", str(draft), "-n", str(matrix.n_predict), "--ignore-eos", "--numerics", "exact"]
    common += ["-p", text_of(n_prompt), "--seed", "7"]
    if n_prompt > LONG:
        common += ["-c", str(2 * n_prompt + matrix.n_predict)]
    expected = {temp: expected_tokens(target, [*common, "--temp", temp], matrix.n_predict) for temp in matrix.temps}
    for n_ranks, policy, variant, temp in matrix.cases():
        flags = [*matrix.flags, *([f"--{variant}"] if variant else [])]
        result = matrix.run(n_ranks, [*common, "--policy", policy, "--temp", temp, *flags])
        same = result["tokens"] == expected[temp]
        acceptance, n = result["speculation"]["acceptance_rate"], len(result["prompt_tokens"])
        print(f"{name:8} prompt {n:4} temp {temp:4} N={n_ranks} {policy:12} {variant:14} acceptance {acceptance:5.2f} "
              f"{'same' if same else 'DIFFERENT'}", flush=True)  # fmt: skip
        yield same


def expected_tokens(target: Path, arguments: Sequence[str], n_predict: int) -> list[int]:
    """Greedy, those of plain llama-cpp-python; sampled, those of one process that does not speculate."""
    alone = run_json(1, [*arguments, "--policy", "iterative", "-t", "1"])  # one thread waits for no other
    if alone["temp"] > 0:
        return list(alone["tokens"])
    return plain_tokens(target, alone["prompt_tokens"], n_predict)


if __name__ == "__main__":
    main()
