"""Let a target answer questions, many at once, and keep its text, its features and its likeliest tokens:
`python -m experiments.eagle3.record -m TARGET.gguf -o DIR`.

The target is cut where the features are, and our own stages compute it in this process: what a stage hands on is the
feature. Questions come from templates, from the target itself (it writes the user's turn), or from files. Goes on
where a directory ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

import click
import numpy as np
import numpy.typing as npt
import torch

from experiments.eagle3.questions import questions
from experiments.eagle3.recording import N_TAUGHT, Text, Words, read_texts, recorded, write_texts
from experiments.eagle3.stage_target import StageTarget
from experiments.eagle3.target_parts import feature_layers
from experiments.eagle3.torch_target import TorchTarget
from pipeinfer.core.samplers import largest
from pipeinfer.core.sampling import SamplingParams, choose
from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.text.chat_template import PLAIN_TEMPLATE, ChatTemplate, Rendered, encode_rendered, template_of
from pipeinfer.models.text.messages import ChatMessage
from pipeinfer.models.text.tokenizer import Tokenizer

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
N_BATCH = 256
N_QUESTION = 128
"""Tokens of a question that the target writes itself at most."""

LONGEST = 640
"""Tokens of a question; longer ones are left out."""

TEMPERATURES = (0.0, 0.8)
"""Of the answers to generated questions, in turn."""

MARK = "\N{REPLACEMENT CHARACTER}"  # in place of a question, to see what a template puts around it
TEXTS_A_FILE = 16


@dataclass
class Asked:
    """A text under way: `tokens` are known, those that `features` are of are computed.

    `question`: how many tokens the target may still write of the user's turn, which `turn` ends.
    """

    name: str
    tokens: list[int]
    sampling: SamplingParams
    turn: Sequence[int] = ()
    question: int = 0
    n_prompt: int = 0
    features: list[Words] = field(default_factory=list)
    taught: list[tuple[Words, npt.NDArray[np.float16]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.tokens)

    def extend(self, token: int, ends: frozenset[int]) -> None:
        """The target's next token is known."""
        if not self.question:
            self.tokens.append(token)
            return
        self.question -= 1
        if token not in ends:
            self.tokens.append(token)
        if token in ends or not self.question:
            self.tokens += self.turn
            self.question, self.n_prompt = 0, len(self.tokens)

    def finished(self) -> Text:
        n = len(self.features)
        taught, logits = (np.stack(each) for each in zip(*self.taught, strict=True))
        taught[: self.n_prompt - 1], logits[: self.n_prompt - 1] = 0, 0
        return Text(
            self.name, self.n_prompt, np.array(self.tokens[:n], np.int32), np.stack(self.features), taught, logits
        )


class Target(Protocol):
    """See StageTarget."""

    def evaluate(
        self, tokens: Sequence[int], positions: Sequence[int], seqs: Sequence[int], wanted: Sequence[bool]
    ) -> tuple[Words, FloatArray]: ...

    def forget(self, seq: int) -> None: ...


class Recorder:
    """`n_slots` texts at once; `n_predict` tokens of an answer at most; one of `ends` ends it."""

    def __init__(self, target: Target, ends: Sequence[int], n_slots: int, n_predict: int) -> None:
        self.target, self.n_slots, self.n_predict, self._ends = target, n_slots, n_predict, frozenset(ends)

    def record(self, asked: Iterator[Asked]) -> Iterator[Text]:
        """The texts in the order in which they end."""
        slots: dict[int, Asked] = {}
        while True:
            for seq in range(self.n_slots):
                if seq not in slots and (one := next(asked, None)):
                    slots[seq] = one
            if not slots:
                return
            self._step(slots)
            for seq in [seq for seq, one in slots.items() if self._is_over(one)]:
                self.target.forget(seq)
                yield slots.pop(seq).finished()

    def _is_over(self, one: Asked) -> bool:
        n_answer = len(one.tokens) - one.n_prompt
        return not one.question and n_answer > 0 and (one.tokens[-1] in self._ends or n_answer > self.n_predict)

    def _step(self, slots: dict[int, Asked]) -> None:
        """Evaluate what is known and not computed, N_BATCH rows at most; note what comes out."""
        seqs: list[int] = []
        positions: list[int] = []
        n_room = N_BATCH
        for seq, one in slots.items():
            at = range(len(one.features), len(one.tokens))[:n_room]
            seqs += [seq] * len(at)
            positions += at
            n_room -= len(at)
        tokens = [slots[seq].tokens[at] for seq, at in zip(seqs, positions, strict=True)]
        wanted = [at + 1 == len(slots[seq].tokens) for seq, at in zip(seqs, positions, strict=True)]
        features, found = self.target.evaluate(tokens, positions, seqs, wanted)
        logits = iter(found)
        for row, seq in enumerate(seqs):
            self._note(slots[seq], features[row], next(logits) if wanted[row] else None)

    def _note(self, one: Asked, features: Words, logits: FloatArray | None) -> None:
        one.features.append(features)
        if logits is None:
            one.taught.append((np.zeros(N_TAUGHT, np.uint16), np.zeros(N_TAUGHT, np.float16)))
            return
        ids = largest(logits, N_TAUGHT)
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        top = float(logits[ids[0]])
        total = top + float(np.log(np.exp(logits - top).sum(dtype=np.float64)))
        one.taught.append((ids.astype(np.uint16), (logits[ids] - total).astype(np.float16)))
        one.extend(choose(logits, one.sampling, len(one.tokens)), self._ends)


class Asker:
    """Makes texts to begin: questions in the target's chat template."""

    def __init__(self, target: Path) -> None:
        """Raises UserError for a file that is no model."""
        self.tokenizer = Tokenizer(target)
        self._template = ChatTemplate(template_of(read_model_info(target).metadata) or PLAIN_TEMPLATE, str(target))

    def from_files(self, paths: Sequence[Path], n_questions: int) -> Iterator[Asked]:
        """The first turns of the first questions of .jsonl files, answered greedily."""
        for path in paths:
            lines = path.read_text().splitlines()[: n_questions or None]
            asked = (self._tokens(json.loads(line)["turns"][0]) for line in lines)
            yield from (
                Asked(f"{path.stem}/{number}", tokens, SamplingParams(temp=0.0))
                for number, tokens in enumerate(asked)
                if len(tokens) <= LONGEST
            )

    def generated(self, seed: int) -> Iterator[Asked]:
        """For ever, one of templates and one of the target's own in turn."""
        before, turn = self._around_question()
        for number, text in enumerate(questions(seed)):
            sampling = SamplingParams(temp=TEMPERATURES[number % 2], seed=seed * 100_000 + number)
            yield Asked(f"template/{seed}/{number}", self._tokens(text), sampling)
            own = SamplingParams(temp=1.0, top_p=1.0, top_k=0, min_p=0.02, seed=sampling.seed)
            yield Asked(f"own/{seed}/{number}", list(before), own, turn, N_QUESTION)

    def _tokens(self, text: str) -> list[int]:
        return encode_rendered(self.tokenizer, self._template.render([ChatMessage("user", text)], self.tokenizer))

    def _around_question(self) -> tuple[list[int], list[int]]:
        """Tokens before and after a user's turn."""
        before, after = self._template.render([ChatMessage("user", MARK)], self.tokenizer).text.split(MARK)
        tokens = encode_rendered(self.tokenizer, Rendered(before))
        return tokens, self.tokenizer.encode(after, add_special=False, parse_special=True)


def _open(
    path: Path, layers: Sequence[int], n_slots: int, n_cells: int, n_threads: int, by_torch: bool
) -> StageTarget | TorchTarget:
    if not by_torch:
        return StageTarget(path, layers, n_slots, n_cells, N_BATCH, n_threads)
    torch.set_num_threads(n_threads)
    return TorchTarget(path, layers, n_slots, n_cells)


@click.command(help=__doc__)
@click.option("-m", "target", type=FILE, required=True, help="The target, a chat model.")
@click.option("-o", "output", type=click.Path(path_type=Path), required=True, help="The directory of recorded texts.")
@click.option("--prompts", type=FILE, multiple=True, help="JSON lines with `turns` in place of generated questions.")
@click.option("--questions", default=0, help="Of each file of --prompts. [default: all]")
@click.option("--tokens", default=300_000, show_default=True, help="Stop at so many in the directory.")
@click.option("--layers", type=int, nargs=3, help="Whose inputs are recorded. [default: 2, n/2 and n-3 of n]")
@click.option("--seed", default=0, show_default=True, help="Of generated questions and answers.")
@click.option("-np", "n_slots", default=16, show_default=True, help="Texts at once.")
@click.option("-n", "n_predict", default=256, show_default=True, help="Tokens of an answer at most.")
@click.option("-t", "n_threads", default=1, show_default=True, help="Threads.")
@click.option("--torch", "by_torch", is_flag=True, help="Compute by torch: many long texts in a fraction of the time.")
def main(
    target: Path,
    output: Path,
    prompts: Sequence[Path],
    questions: int,
    tokens: int,
    layers: tuple[int, int, int] | None,
    seed: int,
    n_slots: int,
    n_predict: int,
    n_threads: int,
    by_torch: bool,
) -> None:
    output.mkdir(parents=True, exist_ok=True)
    n_files = len(recorded(output))
    n_tokens = sum(len(text.tokens) for path in recorded(output) for text in read_texts(path))
    layers = layers or feature_layers(read_model_info(target).n_layer)
    with closing(_open(target, layers, n_slots, LONGEST + n_predict, n_threads, by_torch)) as model:
        asker = Asker(target)
        recorder = Recorder(model, asker.tokenizer.ends, n_slots, n_predict)
        asked = asker.from_files(prompts, questions) if prompts else asker.generated(seed + n_files)
        texts, began, n_new = recorder.record(asked), time.monotonic(), 0
        while n_tokens < tokens and (some := list(islice(texts, TEXTS_A_FILE))):
            write_texts(output / f"{n_files:05}.npz", some)
            n = sum(len(text.tokens) for text in some)
            n_files, n_tokens, n_new = n_files + 1, n_tokens + n, n_new + n
            speed = n_new / (time.monotonic() - began)
            print(f"{n_files} files, {n_tokens} tokens, {speed:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
