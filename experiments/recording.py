"""Record what a real target writes and what a real draft guesses there, as choices for the virtual pipeline.

One process, no MPI. Knows no cluster and no policy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pipeinfer.core.drafting import guess_next
from pipeinfer.core.interfaces import Batch, FloatArray, StageModel
from pipeinfer.core.kv.blocks import Span, spans_of
from pipeinfer.core.runs import Guess, KvOp, OpKind
from pipeinfer.core.sampling import SamplingParams, choose
from pipeinfer.models.gguf.slice import open_slice, read_model_info
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.outputs import write_file
from pipeinfer.policies.limits import MAX_WIDTH
from pipeinfer.virtual.choices import Branch

N_BATCH = 128
GREEDY = SamplingParams(temp=0.0)


@dataclass(frozen=True)
class RecordedChoices:
    """The target's text after a prompt, and the draft's guesses, (token, probability), before each of its tokens.

    A wrong branch gets the guesses of some right context: no token of them is accepted, only their distribution counts.
    """

    prompt: list[int]
    tokens: list[int]
    known: list[list[tuple[int, float]]]

    @property
    def n_tokens(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def acceptance(self) -> float:
        """The share of tokens for which the draft's best guess is right."""
        right = sum(found[0][0] == token for found, token in zip(self.known, self.tokens, strict=False))
        return right / len(self.tokens)

    def target(self, position: int) -> int:
        index = position - len(self.prompt)
        if index >= len(self.tokens):
            return 0  # beyond the end of the text
        return self.tokens[index] if index >= 0 else self.prompt[position]

    def guesses(self, start: int, branch: Branch, width: int) -> list[Guess]:
        index = start - len(self.prompt) + 1
        if branch:
            index = hash((start, branch)) % max(1, len(self.tokens))
        found = self.known[index] if 0 <= index < len(self.known) else self.known[0]
        return [Guess(token, probability) for token, probability in found[:width]]

    def save(self, path: Path) -> None:
        """Raises UserError when the file cannot be written."""
        write_file(path, "choices", json.dumps(asdict(self), separators=(",", ":")).encode())

    @staticmethod
    def load(path: Path) -> RecordedChoices:
        return RecordedChoices(**json.loads(path.read_text()))


class PathModel:
    """A whole model that is asked what follows any tokens; it evaluates only what differs from the question before.

    `blocks`: the first question is a prompt, which is evaluated in blocks.
    """

    def __init__(self, model: StageModel, blocks: bool) -> None:
        self.model, self.blocks = model, blocks
        self._tokens: list[int] = []  # those whose cells the model holds

    def logits_after(self, tokens: Sequence[int]) -> FloatArray:
        """(n_vocab,), valid until the next call."""
        if self.blocks and not self._tokens:
            self._read_prompt(tokens)
        pairs = zip(self._tokens, tokens, strict=False)
        n_known = next((index for index, (one, other) in enumerate(pairs) if one != other), len(self._tokens))
        n_known = min(n_known, len(tokens) - 1)  # the last one is always evaluated: its logits are wanted
        if n_known < len(self._tokens):
            self.model.apply([KvOp(OpKind.REMOVE, 0, first=n_known)])
        self._tokens = list(tokens)
        logits = None
        for start in range(n_known, len(tokens), N_BATCH):
            logits = self._evaluate(start, tokens[start : start + N_BATCH], len(tokens))
        assert logits is not None
        return logits[0]

    def _read_prompt(self, tokens: Sequence[int]) -> None:
        start = 0
        for span in spans_of(len(tokens)):
            while start < span.end:
                end = span.chunk_end(start, N_BATCH)
                self._evaluate(start, tokens[start:end], len(tokens), span)
                start = end
        self._tokens = list(tokens[:start])

    def _evaluate(self, start: int, tokens: Sequence[int], end: int, span: Span | None = None) -> FloatArray | None:
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        batch = Batch(np.array(tokens, np.int32), positions, [(0,)] * len(tokens), None, positions == end - 1, span)
        return self.model.evaluate(batch, lambda: False)


def record_pair(target: Path, draft: Path, prompt: str, n_predict: int, n_threads: int = 0) -> RecordedChoices:
    """The target's greedy text and the draft's guesses; both must have one vocabulary. Raises UserError for files that
    are no models."""
    tokens = Tokenizer(target).encode(prompt)
    n_cells = len(tokens) + n_predict + N_BATCH
    models = [_open_whole(path, n_cells, n_threads, exact) for path, exact in ((target, True), (draft, False))]
    path, known = list(tokens), []
    for _ in range(n_predict):
        path.append(choose(models[0].logits_after(path), GREEDY, len(path)))
    for end in range(len(tokens), len(path) + 1):
        found = guess_next(models[1].logits_after(path[:end]), GREEDY, end, (), MAX_WIDTH, couple=True)
        known.append([(guess.token, guess.probability) for guess in found])
    return RecordedChoices(tokens, path[len(tokens) :], known)


def _open_whole(path: Path, n_cells: int, n_threads: int, exact: bool) -> PathModel:
    info = read_model_info(path)
    params = LlamaParams(
        n_cells=n_cells, n_seq_max=2, n_batch=N_BATCH, n_outputs_max=2,
        n_threads=n_threads or len(os.sched_getaffinity(0)), exact=exact,
    )  # fmt: skip
    return PathModel(LlamaStage(open_slice(info, 0, info.n_layer, None), params), exact and info.layers.known.flash)
