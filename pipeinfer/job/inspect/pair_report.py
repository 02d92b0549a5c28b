"""The report of `models check`: whether vocabularies match, and how often a draft guesses a target's greedy choice."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeinfer.core.interfaces import Batch, LoadedModel
from pipeinfer.errors import UserError
from pipeinfer.job.placement.checks import check_alone
from pipeinfer.job.requests.request import check_trained
from pipeinfer.models.drafts.head_files import read_draft
from pipeinfer.models.drafts.translation import TranslatedStage, Translation, find_translation, vocabulary_differences
from pipeinfer.models.gguf.model_info import OWN_HEAD, read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.text.tokenizer import Tokenizer

N_ROWS = 32  # tokens a batch
N_DIFFERENCES = 20  # in the text; --json has all


def check_pair(target: Path, draft: Path, text: str | None, n_predict: int, n_threads: int) -> dict[str, Any]:
    """Plain data. `translated_n`: how many of the target's tokens the draft can guess; None if the ids agree.
    `acceptance_rate`: of the draft's first guesses for `n_predict` greedy tokens after `text`; None: after TEXTS.
    Raises UserError if a file is no model, the draft keeps states, or the text is empty or too long."""
    if draft == OWN_HEAD:
        raise UserError(f"{draft} is the head in a target's own file; `models info` says whether {target} has one")
    drafting = read_draft(draft)
    drafting.check_rewinds("it cannot be a draft: take another one")
    if drafting.head:
        head = f"{draft} is a head, which guesses from what the target computes"
        raise UserError(f"{head}: run a text with -md, and see how many guesses were right")
    vocabularies = Tokenizer(target), Tokenizer(draft)
    translation, reason = None, ""
    try:
        try:
            translation = find_translation(*vocabularies)
        except UserError as error:
            reason = str(error)
        differences = list(vocabulary_differences(*vocabularies))
        encoded = [vocabularies[0].encode(each) for each in (TEXTS if text is None else (text,))]
        sizes = [vocabulary.n_vocab for vocabulary in vocabularies]
    finally:
        for vocabulary in vocabularies:
            vocabulary.close()
    prompts = [tokens for tokens in encoded if tokens]
    rate = None
    if n_predict and not reason:
        if not prompts:
            raise UserError("the text has no tokens; give some text with -p or -f")
        infos = read_model_info(target), drafting
        n_prompt = max(map(len, prompts))
        check_trained(infos[0], n_prompt, n_predict)
        for info in infos:  # they are loaded one after the other
            check_alone(info, n_prompt + n_predict, N_ROWS)
        rate = acceptance(target, draft, prompts, n_predict, n_threads, translation)
    return {
        "target": str(target),
        "draft": str(draft),
        "n_vocab": sizes,
        "vocabularies_match": not differences,
        "can_draft": not reason,
        "reason": reason,
        "translated_n": translation.n_shared if translation else None,
        "differences": [{"token": token, "what": reason} for token, reason in differences],
        "texts": len(prompts),
        "predicted_n": n_predict * len(prompts) if rate is not None else 0,
        "acceptance_rate": rate,
    }


def check_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `check_pair`'s report."""
    target, draft, n = report["target"], report["draft"], len(report["differences"])
    if not n:
        yield f"vocabularies  match: {draft} can draft for {target}"
    else:
        result = "can draft, its tokens translated," if report["can_draft"] else "cannot draft"
        yield f"vocabularies  differ in {n} point{'s' if n > 1 else ''}: {draft} {result} for {target}"
        yield from (f"  {each['what']}" for each in report["differences"][:N_DIFFERENCES])
        if n > N_DIFFERENCES:
            yield f"  and {n - N_DIFFERENCES} more, which --json lists"
        if report["can_draft"]:
            yield f"translated    {report['translated_n']} of {report['n_vocab'][0]} tokens can be guessed"
        else:
            yield f"refused       {report['reason']}"
    if report["acceptance_rate"] is not None:
        texts = f"{report['texts']} texts" if report["texts"] > 1 else "the text"
        yield f"acceptance    {report['acceptance_rate']:.3f} of {report['predicted_n']} greedy tokens after {texts}"


TEXTS = (
    "def fibonacci(n):\n",
    "Once upon a time there was a warrior",
    "import os\n\n\nclass Reader:\n    def __init__(self, path):\n",
)
"""Prompts of a measurement without a text."""


def greedy(model: LoadedModel, prompt: Sequence[int], n_predict: int) -> list[int]:
    """The prompt and the model's greedy continuation, end tokens included."""
    model.clear()
    tokens = list(prompt)
    n_evaluated = 0
    while len(tokens) < len(prompt) + n_predict:
        choices = _first_choices(model, tokens, n_evaluated)
        n_evaluated = len(tokens)
        tokens.append(int(choices[-1]))
    return tokens


def agreement(model: LoadedModel, tokens: Sequence[int], n_prompt: int) -> tuple[int, int]:
    """(right, guesses) of the model's first choice at every position after the prompt, with the tokens before it."""
    model.clear()
    choices = _first_choices(model, tokens[:-1], 0)[n_prompt - 1 :]
    return int(np.sum(choices == np.array(tokens[n_prompt:]))), len(choices)


def acceptance(
    target: Path,
    draft: Path,
    prompts: Sequence[Sequence[int]],
    n_predict: int,
    n_threads: int = 1,
    translation: Translation | None = None,
) -> float:
    """The share of greedy tokens that equal the draft's first guess. `translation`: if ids differ. Raises UserError."""
    n_cells = max(map(len, prompts)) + n_predict
    model = _load(target, n_cells, n_threads)
    texts = [greedy(model, prompt, n_predict) for prompt in prompts]
    model.close()
    model = _load(draft, n_cells, n_threads)
    model = TranslatedStage(model, translation) if translation else model
    counts = [agreement(model, text, len(prompt)) for text, prompt in zip(texts, prompts, strict=True)]
    model.close()
    return sum(right for right, _ in counts) / sum(n for _, n in counts)


def _load(path: Path, n_cells: int, n_threads: int) -> LoadedModel:
    info = read_model_info(path)
    params = LlamaParams(n_cells, n_seq_max=2, n_batch=N_ROWS, n_outputs_max=N_ROWS, n_threads=n_threads)
    return LlamaStage(open_slice(info, 0, info.n_layer), params)


def _first_choices(model: LoadedModel, tokens: Sequence[int], start: int) -> npt.NDArray[np.int64]:
    """(n,) the likeliest token after each of tokens[start:], whose predecessors the model has evaluated."""
    parts = []
    for first in range(start, len(tokens), N_ROWS):
        chunk = np.array(tokens[first : first + N_ROWS], np.int32)
        positions = np.arange(first, first + len(chunk), dtype=np.int32)
        batch = Batch(chunk, positions, [(0,)] * len(chunk), None, np.ones(len(chunk), np.bool_))
        logits = model.evaluate(batch, lambda: False)
        assert logits is not None
        parts.append(np.argmax(logits, axis=1))
    return np.concatenate(parts)
