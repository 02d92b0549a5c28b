"""`auto` beside every policy tuned with hindsight, on what real models choose: `python benchmarks/recorded.py`.

Records what targets write and drafts guess, then simulates the papers' clusters with it. Pairs: the shipped one; its
target grown with noise under the shipped draft; and the same with the ungrown target as its draft. Prompts: code, prose
and the question sets of a folder, where there is one. A cell is a cluster, a pair and a kind of prompt; each policy's
best setting is chosen for the cell after the fact.

Recording takes a minute and is kept in --folder, simulating some 20 minutes of one core. Prints a page
(docs/results/recorded.md); the exit code is 1 if `auto` is below 0.97 of the best other policy in a cell.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import click
from harness import grown
from policies import BOUND, TUNED, best_speed

from experiments.record import Prompt, record_pair
from pipeinfer.job.requests.bench_prompts import TEXTS
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.text import markdown_table
from pipeinfer.virtual.choices import RecordedChoices, read_choices, write_choices
from pipeinfer.virtual.profile import load_profile

CLUSTERS = (
    ("pipedec-7", "", 0),
    ("pipespec", "llama-70b-1b", 3),
    ("flowspec", "llama2-13b", 0),
    ("pipeinfer-c", "goliath-xwin7", 8),
)
QWEN = Path(__file__).parent.parent / "experiments" / "choices" / "qwen2.5-coder.jsonl"
N_LAYER_GROWN, NOISE = 18, 1.5
CODE, QUESTIONS = ("humaneval",), ("gsm8k", "mt_bench", "qa", "alpaca", "sum")
N_CHARACTERS = 500  # of a prompt
OF_THE_BEST = 0.97

PAGE = """# `auto` on what real models choose

What real targets wrote, token by token, and what real drafts guessed there, recorded and then simulated on published
clusters by `python benchmarks/recorded.py`: texts of {n_tokens} tokens, Qwen's of 128 at most, that go on from code,
prose and questions.
`acceptance` is how often the draft's best guess was the target's token. The pairs: the shipped one; its target grown by
layers with noise, which the shipped draft knows less well; and the same with the ungrown target as its draft. The best
other policy is the fastest of [those here](policies.md) in that very cell, its setting chosen after the fact; `auto`
has no settings.

`auto` reaches {geo:.3f} of it in the geometric mean of {n} cells, {least:.3f} in the worst; at least {wanted} in
{n_enough}.
"""


@dataclass(frozen=True, slots=True)
class Text:
    """A recorded text."""

    pair: str
    kind: str
    choices: RecordedChoices


@dataclass(frozen=True, slots=True)
class Cell:
    """Tokens a second of each policy at its best."""

    cluster: str
    pair: str
    kind: str
    acceptance: float
    speeds: dict[str, float]

    @property
    def best_other(self) -> str:
        return max((name for name in self.speeds if name != "auto"), key=self.speeds.__getitem__)

    @property
    def auto_of_best(self) -> float:
        return self.speeds["auto"] / self.speeds[self.best_other]


@click.command(help=__doc__)
@click.option("--questions", type=click.Path(path_type=Path), default=Path("../shared/prompts"), show_default=True)
@click.option("--tokens", default=160, show_default=True, help="Of a text.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep what is recorded here and use it again.")
@click.option("--jobs", default=1, show_default=True, help="Processes that share the work.")
def main(questions: Path, tokens: int, folder: Path | None, jobs: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        texts = list(recorded(folder or Path(scratch), questions, tokens))
        groups = sorted({(text.pair, text.kind) for text in texts})
        work = [
            (cluster, [text for text in texts if (text.pair, text.kind) == group])
            for cluster, group in product(CLUSTERS, groups)
        ]
        cells = []
        with ProcessPoolExecutor(jobs) as processes:
            for cell in processes.map(partial(measure, n_tokens=tokens), *zip(*work, strict=True)):
                cells.append(cell)
                print(cell.cluster, cell.pair, cell.kind, f"{cell.auto_of_best:.3f}", file=sys.stderr, flush=True)
    sys.exit(not report(cells, tokens))


def recorded(folder: Path, questions: Path, n_tokens: int) -> Iterator[Text]:
    folder.mkdir(parents=True, exist_ok=True)
    deeper = folder / "grown.gguf"
    if not deeper.exists():
        grown(deeper, N_LAYER_GROWN, NOISE)
    pairs = {"shipped": (TARGET, DRAFT), "grown": (deeper, DRAFT), "grown, ungrown drafts": (deeper, TARGET)}
    for (pair, models), (kind, asked) in product(pairs.items(), prompts(questions).items()):
        path = folder / f"{pair}-{kind}-{n_tokens}.jsonl".replace(" ", "")
        if not path.exists():
            write_choices(path, [record_pair(*models, prompt, n_tokens + 1, n_threads=1) for prompt in asked])
        yield from (Text(pair, kind, choices) for choices in read_choices(path))
    for choices in read_choices(QWEN):
        yield Text("Qwen2.5-Coder 1.5B, 0.5B", choices.name.partition("/")[0], choices)


def prompts(questions: Path) -> dict[str, list[Prompt]]:
    """By kind."""
    program, *prose = (path.read_text() for path in sorted(TEXTS, key=lambda path: path.stem != "program"))
    asked = {name: first_turns(questions / f"{name}.jsonl") for name in (*CODE, *QUESTIONS)}
    kinds = {
        "code": [program, *(turn for name in CODE for turn in asked[name][:2])],
        "prose": prose,
        "questions": [turn for name in QUESTIONS for turn in asked[name][:1]],
    }
    encode = Tokenizer(TARGET).encode
    return {
        kind: [Prompt(f"{kind}/{number}", encode(text[:N_CHARACTERS])) for number, text in enumerate(found)]
        for kind, found in kinds.items()
    }


def first_turns(path: Path) -> list[str]:
    return [json.loads(line)["turns"][0] for line in path.read_text().splitlines()] if path.exists() else []


def measure(cluster: tuple[str, str, int], texts: Sequence[Text], n_tokens: int) -> Cell:
    name, pair, nodes = cluster
    choices, speeds = [text.choices for text in texts], dict[str, float]()
    for policy, variants in TUNED.items():
        if policy != BOUND:
            profile = load_profile(name).lay_out(nodes, pair, variants[0].drafts)
            speeds[policy] = best_speed(variants, profile, choices, n_tokens)
    first = texts[0]
    return Cell(name, first.pair, first.kind, statistics.fmean(text.acceptance for text in choices), speeds)


def report(cells: Sequence[Cell], n_tokens: int) -> bool:
    columns = (
        "cluster",
        "pair",
        "kind",
        "acceptance",
        "iterative tokens/s",
        "best other",
        "over iterative",
        "auto",
        "auto / best other",
    )
    rows = (
        [
            cell.cluster,
            cell.pair,
            cell.kind,
            f"{cell.acceptance:.2f}",
            f"{cell.speeds['iterative']:.2f}",
            cell.best_other,
            *(f"{cell.speeds[name] / cell.speeds['iterative']:.2f}" for name in (cell.best_other, "auto")),
            f"{cell.auto_of_best:.3f}",
        ]
        for cell in cells
    )
    shares = [cell.auto_of_best for cell in cells]
    n_enough = sum(share >= OF_THE_BEST for share in shares)
    print(
        PAGE.format(
            n_tokens=n_tokens,
            geo=statistics.geometric_mean(shares),
            least=min(shares),
            n=len(shares),
            n_enough=n_enough,
            wanted=OF_THE_BEST,
        )
    )
    print("\n".join(markdown_table(columns, rows, columns[3:])))
    return n_enough == len(cells)


if __name__ == "__main__":
    main()
