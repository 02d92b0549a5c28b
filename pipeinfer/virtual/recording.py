"""Record what a real target and a real draft choose, so that simulations can use it. Knows StageModels, no files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeinfer.core.drafting import guess_next
from pipeinfer.core.interfaces import Batch, FloatArray, StageModel
from pipeinfer.core.kv.blocks import Span, spans_of
from pipeinfer.core.runs import Guess, KvOp, OpKind
from pipeinfer.core.sampling import SamplingParams, choose
from pipeinfer.virtual.choices import MAX_WIDTH, RecordedChoices


class PathModel:
    """A whole model that is asked what follows any tokens; it evaluates only what differs from the question before.

    `blocks`: what it is asked first is a prompt, which is evaluated in blocks; see there.
    """

    def __init__(self, model: StageModel, n_batch: int, blocks: bool = False) -> None:
        self.model, self.n_batch, self.blocks = model, n_batch, blocks
        self._tokens: list[int] = []  # those whose cells the model holds

    def logits_after(self, tokens: Sequence[int]) -> FloatArray:
        """(n_vocab,), valid until the next call."""
        if self.blocks and not self._tokens:
            self._read_prompt(tokens)
        n_known = _common(self._tokens, tokens)
        n_known = min(n_known, len(tokens) - 1)  # the last one is always evaluated: its logits are wanted
        if n_known < len(self._tokens):
            self.model.apply([KvOp(OpKind.REMOVE, 0, first=n_known)])
        self._tokens = list(tokens)
        logits = None
        for start in range(n_known, len(tokens), self.n_batch):
            logits = self._evaluate(start, tokens[start : start + self.n_batch], len(tokens))
        assert logits is not None
        return logits[0]

    def _read_prompt(self, tokens: Sequence[int]) -> None:
        start = 0
        for span in spans_of(len(tokens)):
            while start < span.end:
                end = span.chunk_end(start, self.n_batch)
                self._evaluate(start, tokens[start:end], len(tokens), span)
                start = end
        self._tokens = list(tokens[:start])

    def _evaluate(self, start: int, tokens: Sequence[int], end: int, span: Span | None = None) -> FloatArray | None:
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        batch = Batch(np.array(tokens, np.int32), positions, [(0,)] * len(tokens), None, positions == end - 1, span)
        return self.model.evaluate(batch, lambda: False)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def draft_guesses(model: PathModel, params: SamplingParams, couple: bool) -> Callable[[list[int]], list[Guess]]:
    """What `ModelDrafter` would guess after some tokens, as many as choices hold."""

    def guesses(tokens: list[int]) -> list[Guess]:
        looks_back = params.looks_back
        history = tokens[-looks_back:] if looks_back else ()
        return guess_next(model.logits_after(tokens), params, len(tokens), history, MAX_WIDTH, couple)

    return guesses


def record(
    target: PathModel,
    draft: Callable[[list[int]], list[Guess]],
    prompt: Sequence[int],
    n_predict: int,
    params: SamplingParams,
    about: dict[str, Any],
) -> RecordedChoices:
    """The target's text and the draft's guesses after each of its tokens; wrong branches are asked of `draft` later."""
    path, looks_back = list(prompt), params.looks_back
    for _ in range(n_predict):
        logits = target.logits_after(path)
        path.append(choose(logits, params, len(path), path[-looks_back:] if looks_back else ()))
    choices = RecordedChoices(list(prompt), path[len(prompt) :], {}, about, draft)
    for start in range(len(prompt) - 1, len(path)):
        choices.guesses(start, (), 1)
    return choices
