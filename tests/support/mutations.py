"""Damaged copies of a model, taken as a user's file is: `python -m tests.support.mutations MODEL FIRST LAST`.

Prints a line a copy: its number, and `loads` or the error. Whatever ends the process is the copy after the last line.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from pipeinfer.core.interfaces import Batch
from pipeinfer.errors import ModelFault, UserError
from pipeinfer.models.gguf.header import read_header
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.text.tokenizer import TextStream, Tokenizer

TEXT = "the model of <s> a rank\n  is Ä日🎉\x00 in 12 tokens</s>"
PARAMS = LlamaParams(n_cells=256, n_seq_max=4, n_batch=16, n_outputs_max=16)


class Mutator:
    """Copies of one model, each damaged in a way that its number decides."""

    def __init__(self, source: Path) -> None:
        self.data = source.read_bytes()
        spans = read_header(source).spans
        end = min(tensor.offset for tensor in read_header(source).tensors)
        vocabulary = [span for key, span in spans.items() if key.startswith("tokenizer.")]
        values = [(stop - 4, stop) for start, stop in spans.values() if stop - start < 200]
        self._regions = [vocabulary, values, [(max(stop for _, stop in spans.values()), end)], [(0, end)]]

    def copy(self, number: int) -> bytes:
        rng = random.Random(number)
        data = bytearray(self.data)
        spans = self._regions[number % len(self._regions)]
        for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
            at = rng.randrange(*rng.choices(spans, [stop - start for start, stop in spans])[0])
            data[at] = rng.choice((0, 1, 2, 127, 128, 255, data[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
        return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)


def take(path: Path) -> None:
    """Everything that a job does with a model, in short."""
    info = read_model_info(path)
    tokenizer = Tokenizer(path)
    tokens = tokenizer.encode(TEXT)
    stream = TextStream(tokenizer)
    for token in range(tokenizer.n_vocab):
        stream.push(token)
        tokenizer.is_end(token)
    tokenizer.close()
    for cuts in ([0, info.n_layer], [0, 1, info.n_layer]) if info.n_layer > 1 else ([0, 1],):
        run_chain([LlamaStage(open_slice(info, a, b), PARAMS) for a, b in pairwise(cuts)], tokens[:12])


def run_chain(stages: Sequence[LlamaStage], tokens: Sequence[int]) -> None:
    ids = np.array(tokens, np.int32)
    batch = Batch(ids, np.arange(len(ids), dtype=np.int32), [(0,)] * len(ids), None, np.ones(len(ids), np.bool_))
    try:
        for stage in stages:
            batch.hidden = stage.evaluate(batch, lambda: False)
    finally:
        for stage in stages:
            stage.close()


def main(source: str, first: int, last: int) -> None:
    mutator = Mutator(Path(source))
    path = Path(source).with_name(f"mutated-{first}.gguf")
    for number in range(first, last):
        path.write_bytes(mutator.copy(number))
        try:
            take(path)
            outcome = "loads"
        except (UserError, ModelFault) as error:
            outcome = f"{type(error).__name__} {error!s:.300}"
            assert outcome.isprintable(), repr(outcome)
        print(number, outcome, flush=True)
    path.unlink()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
