"""What two vocabularies have in common: which token of a draft is which of the target's. Says nothing to anybody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeinfer.core.interfaces import IntArray
from pipeinfer.errors import UserError
from pipeinfer.models.text.tokenizer import NO_TOKEN_ID, Piece, Tokenizer

ATTR_UNKNOWN, ATTR_UNUSED = 1, 2
NONE = -1
LEAST_SHARED = 0.5
"""Of the larger vocabulary's tokens so many must be the draft's and the target's: with fewer, texts fall into tokens at
other places, and a draft is hardly ever right."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Why a draft's tokens mean something else to the target. `token`: the id that does, if it is one."""

    what: str
    token: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Translation:
    """From a target's token ids to a draft's.

    heard  (n_target,) int32: what the draft reads in the place of each of the target's tokens
    said   (n_target,) int32: which of the draft's tokens is a guess of each of the target's; NONE: none is
    alike  whether it is the padding alone that differs
    """

    heard: IntArray
    said: IntArray
    alike: bool

    @property
    def n_shared(self) -> int:
        """Tokens of the target that the draft can guess."""
        return int(np.count_nonzero(self.said != NONE))


def find_translation(target: Tokenizer, draft: Tokenizer) -> Translation | None:
    """None where the ids mean the same. Raises UserError where too few of the draft's tokens are the target's.

    Tokens are the same that are spelled alike, and the beginning of a text, its end and that of a turn whatever they
    are called. What else the target has is heard by the draft as the longest end of its spelling that the draft has.
    """
    alike = next(vocabulary_differences(target, draft), None) is None
    if alike and target.n_vocab == draft.n_vocab:
        return None
    if target.kind() != draft.kind():
        raise _cannot(target, draft, f"tokenizer types {target.kind()} and {draft.kind()}")
    ids = {piece: token for token, piece in enumerate(draft.pieces)}
    said = np.array([ids.get(piece, NONE) for piece in target.pieces], np.int32)
    n_words, n_shared = max(_n_words(target), _n_words(draft)), _n_words(target, np.flatnonzero(said != NONE).tolist())
    if n_shared < LEAST_SHARED * n_words:
        raise _cannot(target, draft, f"of {n_words} tokens they share {n_shared}, fewer than {LEAST_SHARED:.0%}")
    for one, other in ((target.eos, draft.eos), (target.eot, draft.eot)):
        if one != NO_TOKEN_ID and other != NO_TOKEN_ID and said[one] == NONE and other not in said:
            said[one] = other
    return Translation(_heard(target, draft, ids, said), said, alike)


def _cannot(target: Tokenizer, draft: Tokenizer, why: str) -> UserError:
    return UserError(f"{draft.path} cannot draft for {target.path}: {why}; take a draft of the same model family")


def _n_words(tokenizer: Tokenizer, tokens: Sequence[int] | None = None) -> int:
    """How many tokens, of these or of all, are no padding."""
    among = range(tokenizer.n_vocab) if tokens is None else tokens
    return sum(not _is_padding(tokenizer, token) for token in among)


def _heard(target: Tokenizer, draft: Tokenizer, ids: Mapping[Piece, int], said: IntArray) -> IntArray:
    heard = said.copy()
    for token in np.flatnonzero(said == NONE).tolist():
        is_end = target.is_end(token) and draft.eos != NO_TOKEN_ID
        heard[token] = draft.eos if is_end else _longest_end(target.text_of(token), ids)
    if target.bos != NO_TOKEN_ID and draft.bos != NO_TOKEN_ID:  # a text begins as the draft knows it
        heard[target.bos] = draft.bos
    return heard


def _longest_end(text: bytes, ids: Mapping[Piece, int]) -> int:
    ends = ((text[start:], False) for start in range(1, len(text)))
    return next((ids[end] for end in ends if end in ids), 0)


def vocabulary_differences(target: Tokenizer, draft: Tokenizer) -> Iterator[Difference]:
    """All for which a draft's ids do not mean to the target what they mean to the draft; nothing if they do.

    Every id that both have must have the same text and be a byte token in both or in neither. The larger vocabulary
    may go on with padding (tokens the model marks unused or unknown, or calls `[PAD…]`), as checkpoints of one family
    are padded differently. bos and eos must be equal where a tokenizer adds them by itself, as in llama.cpp: which of
    its end tokens a model prefers does not matter, the target alone decides.
    """
    if target.kind() != draft.kind():
        yield Difference(f"tokenizer types {target.kind()} and {draft.kind()}")
    for name, adds, ids in (
        ("bos", (target.adds_bos, draft.adds_bos), (target.bos, draft.bos)),
        ("eos", (target.adds_eos, draft.adds_eos), (target.eos, draft.eos)),
    ):
        if adds[0] != adds[1] or (adds[0] and ids[0] != ids[1]):
            yield Difference(f"{name} is {ids[0]} (added: {adds[0]}) and {ids[1]} (added: {adds[1]})")
    for token, (one, other) in enumerate(zip(target.pieces, draft.pieces, strict=False)):
        if one != other:
            yield Difference(f"token {token} is {_show(target, token)} and {_show(draft, token)}", token)
    larger = target if target.n_vocab > draft.n_vocab else draft
    for token in range(min(target.n_vocab, draft.n_vocab), larger.n_vocab):
        if not _is_padding(larger, token):
            what = f"{target.n_vocab} and {draft.n_vocab} tokens, and token {token} ({_show(larger, token)})"
            yield Difference(f"{what} of the larger is no padding", token)


def _is_padding(tokenizer: Tokenizer, token: int) -> bool:
    unused = tokenizer.attributes_of(token) & (ATTR_UNKNOWN | ATTR_UNUSED)
    return bool(unused) or tokenizer.text_of(token).startswith(b"[PAD")


def _show(tokenizer: Tokenizer, token: int) -> str:
    return repr(tokenizer.text_of(token).decode("utf-8", "replace"))
