"""Drafts whose token ids differ from the target's: find out whether and how, translate, and refuse those that cannot
guess for it. Encodes no text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from pipeinfer.core.interfaces import Batch, LoadedModel
from pipeinfer.core.types import FloatArray, IntArray
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.gguf.validation import vocabulary_digest
from pipeinfer.models.text.tokenizer import ATTR_UNKNOWN, NO_TOKEN_ID, Piece, Tokenizer

ATTR_UNUSED = 2  # libllama's, as ATTR_UNKNOWN
NONE = -1
LEAST_SHARED = 0.5
"""The least share of the larger vocabulary's tokens that both must have. With fewer, texts are tokenised differently,
and guesses are hardly ever right."""


@dataclass(frozen=True, slots=True, eq=False)
class Translation:
    """From a target's token ids to a draft's. `outputs`: for each of the target's tokens the one that the draft guesses
    in its place; NONE: it cannot guess it."""

    inputs: IntArray  # (n_target,) int32: the token that the draft reads for each of the target's
    outputs: IntArray  # (n_target,) int32
    padding_only: bool  # whether the vocabularies differ in padding alone

    @property
    def n_shared(self) -> int:
        """Tokens of the target that the draft can guess."""
        return int(np.count_nonzero(self.outputs != NONE))


def check_drafts(drafts: Sequence[ModelInfo], target: ModelInfo) -> None:
    """Raises UserError for a draft that keeps states, or cannot guess for the target."""
    for draft in drafts:
        draft.check_rewinds("it cannot be a draft: take another one, or -md none")
        translation = None if draft.head and draft.head.is_mtp else draft_translation(target.path, draft.path)
        if draft.head and translation and not translation.padding_only:
            shared = f"they share {translation.n_shared} of {len(translation.outputs)} tokens"
            way_out = "give the head that was trained for it, another draft, or -md none"
            raise UserError(f"{draft.path} is a head for another model than {target.path}: {shared}; {way_out}")


def draft_translation(target: Path, draft: Path) -> Translation | None:
    """None where the models' token ids mean the same. Raises UserError where the draft cannot guess for the target."""
    digests = vocabulary_digest(target), vocabulary_digest(draft)
    return None if digests[0] == digests[1] else _compare(target, draft, digests)


@lru_cache(maxsize=8)
def _compare(target: Path, draft: Path, digests: tuple[str, str]) -> Translation | None:
    """`digests`: of both vocabularies, as a key that changes with the files."""
    with closing(Tokenizer(target)) as one, closing(Tokenizer(draft)) as other:
        return find_translation(one, other)


def translation_note(draft: Path, translation: Translation | None) -> str:
    """A note on the translation; empty where no token differs but padding."""
    if translation is None or translation.padding_only:
        return ""
    return (
        f"{draft} has other tokens than the target: they are translated, {translation.n_shared} of "
        f"{len(translation.outputs)} can be guessed"
    )


def find_translation(target: Tokenizer, draft: Tokenizer) -> Translation | None:
    """None if the ids are the same. Raises UserError when the vocabularies share too few tokens. Tokens match by their
    spelling; bos, eos and eot match in any case. For other tokens of the target the draft reads the longest suffix of
    the spelling that it has."""
    padding_only = next(vocabulary_differences(target, draft), None) is None
    if padding_only and target.n_vocab == draft.n_vocab:
        return None
    if target.kind() != draft.kind():
        raise _mismatch(target, draft, f"tokenizer types {target.kind()} and {draft.kind()}")
    ids = {piece: token for token, piece in enumerate(draft.pieces)}
    outputs = np.array([ids.get(piece, NONE) for piece in target.pieces], np.int32)
    n_words = max(_n_words(target, range(target.n_vocab)), _n_words(draft, range(draft.n_vocab)))
    n_shared = _n_words(target, np.flatnonzero(outputs != NONE).tolist())
    if n_shared < LEAST_SHARED * n_words:
        raise _mismatch(target, draft, f"of {n_words} tokens they share {n_shared}, fewer than {LEAST_SHARED:.0%}")
    for one, other in ((target.eos, draft.eos), (target.eot, draft.eot)):
        if one != NO_TOKEN_ID and other != NO_TOKEN_ID and outputs[one] == NONE and other not in outputs:
            outputs[one] = other
    return Translation(_inputs(target, draft, ids, outputs), outputs, padding_only)


def _mismatch(target: Tokenizer, draft: Tokenizer, reason: str) -> UserError:
    return UserError(f"{draft.path} cannot draft for {target.path}: {reason}; take a draft of the same model family")


def _n_words(tokenizer: Tokenizer, tokens: Sequence[int]) -> int:
    """The number of these tokens that are not padding."""
    return sum(not _is_padding(tokenizer, token) for token in tokens)


def _inputs(target: Tokenizer, draft: Tokenizer, ids: Mapping[Piece, int], outputs: IntArray) -> IntArray:
    inputs = outputs.copy()
    for token in np.flatnonzero(outputs == NONE).tolist():
        is_end = target.is_end(token) and draft.eos != NO_TOKEN_ID
        text = target.text_of(token)
        suffixes = ((text[start:], False) for start in range(1, len(text)))
        longest = next((ids[suffix] for suffix in suffixes if suffix in ids), 0)
        inputs[token] = draft.eos if is_end else longest
    if target.bos != NO_TOKEN_ID and draft.bos != NO_TOKEN_ID:
        inputs[target.bos] = draft.bos
    return inputs


def vocabulary_differences(target: Tokenizer, draft: Tokenizer) -> Iterator[tuple[int | None, str]]:
    """(token or None, reason) of each difference between a draft's ids and the target's; none if they mean the same.

    Every id that both have must have the same text and be a byte token in both or in neither. The larger vocabulary may
    end with padding (tokens that are marked unused or unknown, or named `[PAD…]`), because checkpoints of one family
    are padded differently. As in llama.cpp, bos and eos must be equal if a tokenizer adds them: which end token a model
    prefers does not matter, because the target decides."""
    if target.kind() != draft.kind():
        yield None, f"tokenizer types {target.kind()} and {draft.kind()}"
    for name, adds, ids in (
        ("bos", (target.adds_bos, draft.adds_bos), (target.bos, draft.bos)),
        ("eos", (target.adds_eos, draft.adds_eos), (target.eos, draft.eos)),
    ):
        if adds[0] != adds[1] or (adds[0] and ids[0] != ids[1]):
            yield None, f"{name} is {ids[0]} (added: {adds[0]}) and {ids[1]} (added: {adds[1]})"
    for token, (one, other) in enumerate(zip(target.pieces, draft.pieces, strict=False)):
        if one != other:
            yield token, f"token {token} is {_show(target, token)} and {_show(draft, token)}"
    larger = target if target.n_vocab > draft.n_vocab else draft
    for token in range(min(target.n_vocab, draft.n_vocab), larger.n_vocab):
        if not _is_padding(larger, token):
            sizes = f"{target.n_vocab} and {draft.n_vocab} tokens, and token {token} ({_show(larger, token)})"
            yield token, f"{sizes} of the larger is no padding"


def _is_padding(tokenizer: Tokenizer, token: int) -> bool:
    is_unused = tokenizer.attributes_of(token) & (ATTR_UNKNOWN | ATTR_UNUSED)
    return bool(is_unused) or tokenizer.text_of(token).startswith(b"[PAD")


def _show(tokenizer: Tokenizer, token: int) -> str:
    return repr(tokenizer.spelled_out(token))


class TranslatedStage:
    """A draft's LoadedModel, or a slice, with the target's vocabulary. Tokens that it lacks have a logit of -inf."""

    def __init__(self, model: LoadedModel, translation: Translation) -> None:
        self.model, self._inputs = model, translation.inputs
        self.n_embd, self.is_last, self.n_vocab = model.n_embd, model.is_last, len(translation.outputs)
        self.apply, self.next_position = model.apply, model.next_position
        self.clear, self.close = model.clear, model.close
        self._missing = np.flatnonzero(translation.outputs == NONE)
        self._outputs = np.maximum(translation.outputs, 0).astype(np.intp)
        self._buffer = np.empty((0, self.n_vocab), np.float32)

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        output = self.model.evaluate(replace(batch, tokens=self._inputs[batch.tokens]), stop)
        return output if output is None or not self.is_last else self._translated(output)

    def _translated(self, logits: FloatArray) -> FloatArray:
        """(n_rows, n_vocab) from the draft's, in a buffer of the most rows so far."""
        if len(logits) > len(self._buffer):
            self._buffer = np.empty((len(logits), self.n_vocab), np.float32)
        translated = self._buffer[: len(logits)]
        np.take(logits, self._outputs, axis=1, out=translated, mode="clip")
        translated[:, self._missing] = -np.inf
        return translated
