"""Real models on this machine: `python benchmarks/real.py -m TARGET -md DRAFT -m TARGET … --prompts FOLDER`.

Of each target, with its draft or without one, runs policies on each question set of a folder (.jsonl with `turns`), on
1 and 2 ranks, with exact and fast numerics, beside libllama alone: one token at a time, the whole model in one process,
repacked weights. With other numerics than the first ones only `auto` and no guesses. With --programs also beside
llama.cpp's own programs of the same version, and with 16 texts and streams at a time. Rounds take turns. Prints a page
(docs/results/real.md with -o). Hosts of their own are measured by `benchmarks/cluster.py`.
"""

import csv
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product, zip_longest
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import TextIO

import click
import llama_cpp
import llama_programs
import numpy as np
from harness import in_turns, job
from streams import throughput

from pipeinfer.cluster.hosts.host import this_host
from pipeinfer.text import count_text, markdown_table
from tests.support.plain_llama import SILENT
from tests.support.serving import Served

COLUMNS = ("ranks", "numerics", "policy", "n", "tokens/s", "of libllama", "of iterative", "acceptance")

OTHERS = ("llama.cpp's programs of the same version", "n", "tokens/s")
Trials = dict[str, Callable[[], float]]

RPC = "llama-completion over RPC, 2 servers"
DRAFT_AND_LOOKUP, LOOKUP = "auto, draft and lookup", "auto, lookup"

N_TEXTS = 16
"""At a time, where llama.cpp's programs are compared."""

PROMPTS = [f"Here are {2 + number} reasons why people build computers" for number in range(N_TEXTS)]

N_CUT = 128
"""Tokens of a question at most: what is measured is decoding."""

N_PROMPT = 32
"""Tokens that libllama has before it decodes, as if it were a prompt: what they are costs nothing."""

PAGE = """# Real models

What a job on one machine gives beside llama.cpp: one rank, and two ranks that share its cores, each on half of them. A
rank of two waits while the other computes, so that more ranks make nothing faster here: see [the hosts of a
cluster](cluster.md).

Measured by `python benchmarks/real.py` on {machine}, {n_threads} threads: {rounds} rounds in turns,
{n_questions} of each set ({sets}), {n_predict} tokens each, greedy. Speeds are of
decoding, without the prompt: medians, and the least and the most.

* `of libllama`: beside libllama alone (llama-cpp-python {version}, {n_threads} threads).
* `of iterative`: beside no guesses on the same ranks, with the same numerics; the mean of the sets, and the worst.
* `auto, lookup`: without the draft."""

SECTION = """
## {name}

{shown}
libllama alone: {plain} tokens/s.
"""


@dataclass
class Found:
    """Tokens a second of each policy, by question set."""

    speeds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    acceptance: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def ratios(self, policy: str, base: str) -> list[float]:
        """One a set: medians over rounds and questions."""
        sets = {name for _, name in self.speeds}
        return [median(self.speeds[policy, name]) / median(self.speeds[base, name]) for name in sets]


def plain(path: Path, n_threads: int, n_predict: int) -> float:
    """Tokens a second of libllama: decode, take the likeliest, again."""
    llama_cpp.llama_log_set(SILENT, None)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = N_PROMPT + n_predict, n_threads, n_threads
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    context = llama_cpp.llama_init_from_model(model, params)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    tokens, begin_s = [1] * N_PROMPT, 0.0
    for _ in range(n_predict + 1):
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        assert not llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens)))
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (n_vocab,))
        tokens = [int(logits.argmax())]
        begin_s = begin_s or time.perf_counter()
    return n_predict / (time.perf_counter() - begin_s)


def apart(path: Path, n_threads: int, n_predict: int) -> float:
    """The same in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(plain, path, n_threads, n_predict).result()


def bench(found: Found, n_ranks: int, sets: Sequence[Path], words: Sequence[str], auto: str) -> None:
    """One round on so many ranks. `auto`: what that policy is called, by what it guesses with."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.csv"
        prompts = [word for path in sets for word in ("-p", str(path))]
        job(n_ranks, ["bench", "-r", "1", "--results", str(results), *prompts, *words])
        for row in csv.DictReader(results.open()):
            kind = auto if row["policy"] == "auto" else row["policy"]
            found.speeds[kind, row["prompt"].split("/")[0]].append(float(row["predicted_per_second"]))
            if row["acceptance_rate"]:
                found.acceptance[kind].append(float(row["acceptance_rate"]))


def together(target: Path, n_predict: int, numerics: str) -> float:
    """Tokens a second of N_TEXTS texts at a time on one rank: of the steps in which none waits for a prompt."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "load.csv"
        job(
            1,
            [
                "bench",
                "-m",
                str(target),
                "--policy",
                "iterative",
                "--concurrency",
                str(N_TEXTS),
                "--requests",
                str(N_TEXTS),
                "-p",
                str(N_PROMPT),
                "-n",
                str(n_predict),
                "--numerics",
                numerics,
                "--warm-up",
                "0",
                "--results",
                str(results),
            ],
        )
        (row,) = csv.DictReader(results.open())
        return N_TEXTS / float(row["itl_p50_s"])


def streamed(target: Path, n_predict: int, n_threads: int, numerics: str) -> float:
    """Tokens a second of N_TEXTS streams of `pipeinfer serve` on one rank."""
    words = [
        "-m",
        str(target),
        "-md",
        "none",
        "-t",
        str(n_threads),
        "--parallel",
        str(N_TEXTS),
        "-c",
        str(512 * N_TEXTS),
        "--numerics",
        numerics,
    ]
    with Served(1, words, timeout_s=300) as server:
        return throughput(server.port, PROMPTS, n_predict)


def programs(folder: Path, target: Path, draft: Path | None, n_predict: int, n_threads: int) -> Trials:
    """What llama.cpp's programs are asked, and the same of pipeinfer where no other table has it."""
    run = partial(llama_programs.completion, folder, target, n_predict)
    trials: Trials = {f"llama-completion, {n} threads": partial(run, n) for n in sorted({1, n_threads})}
    trials[RPC] = partial(llama_programs.remote, folder, target, n_predict, 2)
    if draft:
        own = partial(llama_programs.speculative, folder, target, draft, n_predict, n_threads)
        trials[f"llama-speculative-simple, {n_threads} threads"] = own
    own = partial(llama_programs.batched, folder, target, n_predict, n_threads, N_TEXTS)
    trials[f"llama-batched-bench, {N_TEXTS} texts, {n_threads} threads"] = own
    for numerics in ("exact", "fast"):
        trials[f"pipeinfer, {N_TEXTS} texts, 1 rank, {numerics}"] = partial(together, target, n_predict, numerics)
    own = partial(llama_programs.served, folder, target, n_threads, PROMPTS, n_predict)
    trials[f"llama-server, {N_TEXTS} streams, {n_threads} threads"] = own
    for numerics in ("exact", "fast"):
        own = partial(streamed, target, n_predict, n_threads, numerics)
        trials[f"pipeinfer serve, {N_TEXTS} streams, 1 rank, {numerics}"] = own
    return trials


def program_rows(speeds: dict[str, list[float]]) -> Iterator[list[str]]:
    for name, values in speeds.items():
        yield [name, str(len(values)), spread(values)]


def figures(own: Found) -> Iterator[tuple[str, list[float], str, str]]:
    """Of each policy its speeds, its ratio to no guesses, mean and worst of the sets, and its acceptance."""
    for policy in sorted({policy for policy, _ in own.speeds}, key=lambda name: (name != "iterative", name)):
        speeds = [speed for (of, _), values in own.speeds.items() if of == policy for speed in values]
        ratios, acceptance = own.ratios(policy, "iterative"), own.acceptance[policy]
        yield (
            policy,
            speeds,
            f"{fmean(ratios):.2f}, {min(ratios):.2f}",
            f"{fmean(acceptance):.2f}" if acceptance else "-",
        )


def spread(speeds: list[float]) -> str:
    return f"{median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"


def rows(found: dict[tuple[int, str], Found], plain_speed: float) -> Iterator[list[str]]:
    for (n_ranks, numerics), own in found.items():
        for policy, speeds, ratios, acceptance in figures(own):
            of_plain = f"{median(speeds) / plain_speed:.2f}"
            yield [str(n_ranks), numerics, policy, str(len(speeds)), spread(speeds), of_plain, ratios, acceptance]


def shown(found: dict[tuple[int, str], Found], plain_speed: float, rpc: Sequence[float]) -> str:
    """What a target's tables show, in a sentence for each number of ranks, with the first numerics."""
    lines, (_, first) = list[str](), next(iter(found))
    for (n_ranks, numerics), own in found.items():
        if numerics != first:
            continue
        policies = {policy: (speeds, ratios) for policy, speeds, ratios, _ in figures(own)}
        base = median(policies["iterative"][0])
        beside = f"{base / plain_speed:.2f} of libllama"
        if n_ranks == 2 and rpc:
            beside = f"{base / median(rpc):.2f} of llama.cpp's RPC with two servers"
        guessing = [f"`{name}` {ratios}" for name, (_, ratios) in policies.items() if name.startswith("auto")]
        lines.append(f"{n_ranks} rank{'s' * (n_ranks > 1)}, {numerics}: {beside}; of iterative {'; '.join(guessing)}.")
    return "\n".join(lines)


@dataclass(frozen=True)
class Asked:
    sets: Sequence[Path]
    ranks: Sequence[int]
    numerics: Sequence[str]
    policies: str
    rounds: int
    n_questions: int
    n_predict: int
    n_threads: int
    programs: Path | None

    def section(self, target: Path, draft: Path | None) -> Iterator[str]:
        """The lines of one target's tables."""
        common = [
            "-m",
            str(target),
            "-n",
            str(self.n_predict),
            "--questions",
            str(self.n_questions),
            "--turns",
            "1",
            "--cut",
            str(N_CUT),
        ]
        found = {key: Found() for key in product(self.ranks, self.numerics)}

        def trial(n_ranks: int, kind: str) -> float:
            def of(auto: str, policies: str, *words: str) -> None:
                words = *common, "--numerics", kind, "--policy", policies, *words
                bench(found[n_ranks, kind], n_ranks, self.sets, words, auto)

            if draft:
                policies = self.policies if kind == self.numerics[0] else "iterative,auto"
                of(DRAFT_AND_LOOKUP, policies, "-md", str(draft))
            of(LOOKUP, "auto" if draft else "iterative,auto", "-md", "none", "--lookup")
            return 0.0

        others = programs(self.programs, target, draft, self.n_predict, self.n_threads) if self.programs else {}
        own = {f"{n_ranks} ranks, {kind}": partial(trial, n_ranks, kind) for n_ranks, kind in found}
        plain: Trials = {"libllama": partial(apart, target, self.n_threads, self.n_predict)}
        timed = in_turns(plain | others | own, self.rounds)
        speeds = timed["libllama"]
        name = target.stem + (f", with the draft {draft.stem}" if draft else "")
        told = shown(found, median(speeds), timed.get(RPC, ()))
        yield SECTION.format(name=name, shown=told, plain=spread(speeds))
        yield from markdown_table(COLUMNS, rows(found, median(speeds)), COLUMNS[3:])
        if others:
            yield ""
            yield from markdown_table(OTHERS, program_rows({name: timed[name] for name in others}), OTHERS[1:])


@click.command(help=__doc__)
@click.option("-m", "--model", "targets", type=click.Path(exists=True, path_type=Path), required=True, multiple=True)
@click.option(
    "-md",
    "--model-draft",
    "drafts",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    help="Of the first targets, in their order.",
)
@click.option(
    "--prompts", type=click.Path(exists=True, path_type=Path), required=True, help="A folder of question sets."
)
@click.option("--ranks", default="1,2", show_default=True)
@click.option("--numerics", default="exact,fast", show_default=True)
@click.option("--policies", default="iterative,speculative,pipeinfer,auto", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--questions", default=1, show_default=True, help="Of each set.")
@click.option("-n", "--predict", "n_predict", default=64, show_default=True)
@click.option("-t", "--threads", "n_threads", default=2, show_default=True, help="Of libllama and of one rank.")
@click.option("--programs", "folder", type=click.Path(exists=True, path_type=Path), help="llama.cpp's, built.")
@click.option("-o", "--output", type=click.File("w"), default="-")
def main(
    targets: Sequence[Path],
    drafts: Sequence[Path],
    prompts: Path,
    ranks: str,
    numerics: str,
    policies: str,
    rounds: int,
    questions: int,
    n_predict: int,
    n_threads: int,
    folder: Path | None,
    output: TextIO,
) -> None:
    asked = Asked(
        sorted(prompts.glob("*.jsonl")),
        [*map(int, ranks.split(","))],
        numerics.split(","),
        policies,
        rounds,
        questions,
        n_predict,
        n_threads,
        folder,
    )
    page = PAGE.format(
        machine=this_host("").processor,
        rounds=rounds,
        n_questions=count_text(questions, "question"),
        n_predict=n_predict,
        sets=", ".join(path.stem for path in asked.sets),
        n_threads=n_threads,
        version=llama_cpp.__version__,
    )
    print(page, file=output)
    for target, draft in zip_longest(targets, drafts[: len(targets)]):
        for line in asked.section(target, draft):
            print(line, file=output, flush=True)


if __name__ == "__main__":
    sys.exit(main())
