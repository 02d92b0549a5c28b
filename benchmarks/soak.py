"""Generate for long on real ranks; look for wrong tokens, leaks and hangs: `python benchmarks/soak.py`.

One job loads the shipped pair once: random prompts, lengths, policies, options, seeds, temperatures and penalties, each
text compared with plain llama-cpp-python's by token ids, and after each what every rank holds: sequences, cells,
memory, open files. Case K of seed S is always the same one: `--seed S --first K` begins with it.

The exit code is 1 if anything is off.
"""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

import click
import llama_cpp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from soaking import AuditedEngine, Memory, finish, random_policy, random_sampling, some

from pipeinfer.cluster.launch import rank_from_environment
from pipeinfer.core.blocks import BLOCK
from pipeinfer.core.interfaces import FloatArray
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Finish
from pipeinfer.core.sampling import SamplingParams, choose
from pipeinfer.models.demo import TARGET
from pipeinfer.models.tokenizer import Tokenizer
from pipeinfer.policies import PipeInfer
from pipeinfer.policies.registry import POLICIES
from tests.delayed import Pauses, pause_everywhere
from tests.jobs import ROOT, environment, launcher
from tests.plain_llama import BF16, FEW, decode, make_context, read_blocks

N_CTX, N_PROMPT_MAX, N_PREDICT_MAX = 1000, 700, 300
N_SEQ_MAX, N_BATCH_MAX = 63, 128
HANG_S = 120.0  # so long without a word from the job, and it hangs
RANK_PART = "as-a-rank"


@click.command(help=__doc__)
@click.option("--minutes", default=10.0, show_default=True)
@click.option("--ranks", default=5, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--first", default=0, show_default=True, help="The case to begin with.")
@click.option("--extra", default="", help="Further options of the job, as in '--layer-split 1,2,3,3'.")
@click.option("--delays", is_flag=True, help="Ranks pause at random; see tests/delayed.py.")
def main(minutes: float, ranks: int, seed: int, first: int, extra: str, delays: bool) -> None:
    finish(soak(ranks, minutes, seed, first, extra.split(), delays))


# -- cases


@dataclass(frozen=True, slots=True)
class Case:
    """One generation on real ranks."""

    prompt: list[int]
    n_predict: int
    n_ctx: int
    n_cells: int
    n_seq: int
    n_batch: int
    policy: Policy
    sampling: SamplingParams
    end_tokens: frozenset[int]
    cancel: bool
    couple: bool
    stop_after: int | None  # tokens after which the user stops it

    def __str__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)} | {
            "prompt": len(self.prompt),
            "end_tokens": len(self.end_tokens),
        }
        return str(shown)


def random_case(seed: int, index: int, tokenizer: Tokenizer) -> Case:
    rng = random.Random(f"{seed}/{index}")
    prompt = random_prompt(rng, tokenizer)
    n_predict = some(rng, 1, 2, 17, 60, 100, 200, N_PREDICT_MAX)
    # now and then the context ends before the text does
    n_ctx = len(prompt) + (n_predict if rng.random() < 0.9 else rng.randint(1, n_predict))
    return Case(
        prompt=prompt,
        n_predict=n_predict,
        n_ctx=n_ctx,
        n_cells=n_ctx + some(rng, 0, 1, 8, 40, 512, 512),
        n_seq=some(rng, 1, 2, 3, 8, 31, 31, 31, N_SEQ_MAX),
        n_batch=some(rng, 1, 7, 32, N_BATCH_MAX, N_BATCH_MAX),
        policy=random_policy(rng),
        sampling=random_sampling(rng),
        end_tokens=frozenset(filter(tokenizer.is_end, range(tokenizer.n_vocab))) if rng.random() < 0.3 else frozenset(),
        cancel=rng.random() < 0.85,
        couple=rng.random() < 0.8,
        stop_after=rng.randint(0, n_predict) if rng.random() < 0.05 else None,
    )


def largest_case() -> Case:
    return Case(
        prompt=[7] * N_PROMPT_MAX, n_predict=N_PREDICT_MAX, n_ctx=N_CTX, n_cells=N_CTX + 512, n_seq=N_SEQ_MAX,
        n_batch=N_BATCH_MAX, policy=PipeInfer(width=16, split_cutoff=0.0),
        sampling=SamplingParams(), end_tokens=frozenset(), cancel=True, couple=True, stop_after=None,
    )  # fmt: skip


def random_prompt(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Part of a source file, any tokens, one token over and over, or a single one."""
    kind, n = rng.random(), rng.randint(1, some(rng, 40, 40, 200, N_PROMPT_MAX))
    if kind < 0.6:
        text = rng.choice(sorted((ROOT / "pipeinfer").glob("*.py"))).read_text()
        start = rng.randrange(len(text))
        return tokenizer.encode(text[start : start + 8 * n] or "x")[:n]
    if kind < 0.8:
        return [rng.randrange(3, tokenizer.n_vocab) for _ in range(n)]
    return [rng.randrange(3, tokenizer.n_vocab)] * (n if kind < 0.9 else 1)


# -- rank 0's part


class SoakHead:
    """In the place of `pipeinfer.job.head.Head`: one generation after another; a line of JSON tells of each."""

    def __init__(self, context: Any, job: Any, tokenizer: Tokenizer) -> None:
        self.context, self.job, self.tokenizer = context, job, tokenizer

    def run(self) -> int:
        from pipeinfer.job.session import Session

        end_s = time.monotonic() + 60 * float(os.environ["SOAK_MINUTES"])
        session = Session(self.context, self.job)
        session.open()
        self._generate(session, largest_case())  # touches the memory that later ones need
        for index in count(int(os.environ["SOAK_FIRST"])):
            if time.monotonic() > end_s or self.context.flag.reason:
                break
            case = random_case(int(os.environ["SOAK_SEED"]), index, self.tokenizer)
            print(json.dumps({"index": index} | self._generate(session, case)), flush=True)
        session.close()
        return int(self.context.flag.exit_code)

    def _generate(self, session: Any, case: Case) -> dict[str, Any]:
        def stop_in_time(tokens: Sequence[int]) -> None:
            engine = AuditedEngine.newest
            if case.stop_after is not None and engine.request.n_generated >= case.stop_after:
                engine.stop(engine.request)

        options = replace(self.context.options, policy=case.policy, couple=case.couple)
        job = replace(
            self.job, prompt=tuple(case.prompt), n_predict=case.n_predict, n_ctx=case.n_ctx, n_cells=case.n_cells,
            n_seq=case.n_seq, n_batch=case.n_batch, sampling=case.sampling, end_tokens=case.end_tokens,
        )  # fmt: skip
        generation = session.generate(job, options, case.policy, stop_in_time, cancel=case.cancel)
        request, figures = generation.request, generation.figures
        return {
            "tokens": request.tokens[len(case.prompt) :],
            "finish": request.finish.value,
            "n_cancelled": generation.metrics.n_cancelled,
            "n_matched": generation.metrics.n_matched,
            "leaks": AuditedEngine.newest.leaks(),
            "ranks": {rank: [figures[rank]["rss_bytes"], figures[rank]["open_files"]] for rank in sorted(figures)},
        }


def run_as_rank(arguments: Sequence[str]) -> None:
    """What every rank of the job runs: `pipeinfer run` with another part for rank 0."""
    from pipeinfer.cli import main
    from pipeinfer.job import head, session

    if os.environ["SOAK_DELAYS"]:
        pause_everywhere(Pauses(f"{os.environ['SOAK_SEED']}/{rank_from_environment()}", 1e-3))
    head.Head = SoakHead  # type: ignore[assignment, misc]
    session.Engine = AuditedEngine  # type: ignore[misc]
    main.main(["run", *arguments])


# -- the one who checks


def soak(n_ranks: int, minutes: float, seed: int, first: int, extra: Sequence[str], delays: bool) -> list[str]:
    """Start the job, compare what it says, and print the figures. Returns what is wrong."""
    tokenizer, plain, tally = Tokenizer(TARGET), PlainLlama(TARGET), Tally()
    start_s = time.monotonic()
    settings = {"MINUTES": str(minutes), "SEED": str(seed), "FIRST": str(first), "DELAYS": "yes" if delays else ""}
    job = _start_ranks(n_ranks, {f"SOAK_{name}": value for name, value in settings.items()}, extra)
    try:
        for line in _lines(job):
            if not line.startswith("{"):
                continue
            record = json.loads(line)
            case = random_case(seed, record["index"], tokenizer)
            tally.take(record, case, plain.generate(case))
        if job.wait(timeout=30):
            tally.faults.append(f"the job ended with exit code {job.returncode}")
    except (queue.Empty, subprocess.TimeoutExpired):
        tally.faults.append(f"no word from the job for {HANG_S:.0f} s, after case {tally.last}")
    finally:
        job.kill()
    tally.show(n_ranks, time.monotonic() - start_s)
    return tally.verdict()


def _start_ranks(n_ranks: int, settings: dict[str, str], extra: Sequence[str]) -> subprocess.Popen[str]:
    sizes = ["-n", "1", "-c", str(N_CTX), "--sequences", str(N_SEQ_MAX), "-b", str(N_BATCH_MAX)]
    return subprocess.Popen(
        [*launcher(n_ranks), sys.executable, __file__, RANK_PART, "-p", "x", "-v", *sizes, *extra],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment() | settings,
    )  # fmt: skip


def _lines(job: subprocess.Popen[str]) -> Iterator[str]:
    """What the job prints, line by line. Raises queue.Empty when it says nothing for too long."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert job.stdout
        for line in job.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (line := lines.get(timeout=HANG_S)) is not None:
        yield line


@dataclass(slots=True)
class Tally:
    """What a job gave so far."""

    faults: list[str] = field(default_factory=list)
    last: int = -1
    n_tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    memory: dict[str, Memory] = field(default_factory=dict)
    files: dict[str, list[int]] = field(default_factory=dict)

    def take(self, record: dict[str, Any], case: Case, expected: tuple[list[int], Finish]) -> None:
        """One generation and what it should have been."""
        tokens, self.last = record["tokens"], record["index"]
        wanted, finish = expected
        if record["finish"] == Finish.STOPPED.value and case.stop_after is not None:
            wanted, finish = wanted[: len(tokens)], Finish.STOPPED
            if len(tokens) < case.stop_after:
                self.faults.append(f"case {self.last} was stopped early; {case}")
        if tokens != wanted or record["finish"] != finish.value:
            same = [ours == theirs for ours, theirs in zip(tokens, wanted, strict=False)]
            at = same.index(False) if False in same else len(same)
            self.faults.append(
                f"case {self.last}: {len(tokens)} tokens, {record['finish']}, for {len(wanted)}, {finish.value}; "
                f"they part at {at}; {case}"
            )
        self.faults += [f"case {self.last} keeps {leak}; {case}" for leak in record["leaks"]]
        self.n_tokens += len(tokens)
        self.counts.update([case.policy.name, record["finish"]])
        self.counts.update({name: record[name] for name in ("n_cancelled", "n_matched")})
        for rank, (rss_bytes, open_files) in record["ranks"].items():
            self.memory.setdefault(rank, Memory()).samples.append(rss_bytes)
            self.files.setdefault(rank, []).append(open_files)

    @property
    def n_generations(self) -> int:
        return sum(self.counts[name] for name in POLICIES)

    def verdict(self) -> list[str]:
        """All that is wrong."""
        faults = list(self.faults)
        if not self.n_generations:
            faults.append("not one generation")
        faults += [f"rank {rank}: memory grows: {memory}" for rank, memory in self.memory.items() if memory.grows]
        faults += [
            f"rank {rank}: {files[0]} open files at first, {files[-1]} at last"
            for rank, files in self.files.items()
            if files[-1] > files[0]
        ]
        return faults

    def show(self, n_ranks: int, seconds: float) -> None:
        counts = ", ".join(f"{name} {n}" for name, n in sorted(self.counts.items()))
        print(f"{n_ranks} ranks, {seconds / 60:.1f} minutes: {self.n_generations} generations, {self.n_tokens} tokens")
        print(f"  {counts}")
        print(f"  {sum('they part' in fault for fault in self.faults)} mismatches, "
              f"{sum('keeps' in fault for fault in self.faults)} leaks")  # fmt: skip
        for rank, memory in self.memory.items():
            files = self.files[rank]
            print(f"  rank {rank}: open files {files[0]} at first, {files[-1]} at last; memory at {memory}")


class PlainLlama:
    """Plain llama-cpp-python, the whole model, one token at a time, as `tests.plain_llama` has it."""

    def __init__(self, path: Path) -> None:
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)  # kept: libllama calls it for as long as it lives
        llama_cpp.llama_log_set(self._silent, None)
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = False
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        self._context = make_context(self._model, N_CTX + 24, FEW, BF16, 1)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def generate(self, case: Case) -> tuple[list[int], Finish]:
        """The tokens of a case that nobody stops, and why they end."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        tokens, params = list(case.prompt), case.sampling
        if len(tokens) > BLOCK:
            read_blocks(self._model, self._context, tokens[:-1], 1)
        logits = self._decode(tokens[-1:] if len(tokens) > BLOCK else tokens)
        while True:
            history = tokens[max(0, len(tokens) - params.looks_back) :] if params.looks_back else ()
            tokens.append(choose(logits, params, len(tokens), history))
            if finish := _finish(case, tokens):
                return tokens[len(case.prompt) :], finish
            logits = self._decode(tokens[-1:])

    def _decode(self, tokens: Sequence[int]) -> FloatArray:
        """Logits after these further tokens."""
        decode(self._context, tokens, [*range(0, len(tokens), FEW), len(tokens)])
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, -1), (self._n_vocab,))


def _finish(case: Case, tokens: Sequence[int]) -> Finish | None:
    if tokens[-1] in case.end_tokens:
        return Finish.END
    if len(tokens) - len(case.prompt) >= case.n_predict:
        return Finish.LENGTH
    return Finish.CONTEXT if len(tokens) >= case.n_ctx else None


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK_PART]:
        run_as_rank(sys.argv[2:])
    main()
