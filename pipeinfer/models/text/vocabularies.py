"""Compare two vocabularies: which token of a draft is which of the target's. Prints nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeinfer.core.types import IntArray
from pipeinfer.errors import UserError
from pipeinfer.models.text.tokenizer import NO_TOKEN_ID, Piece, Tokenizer

ATTR_UNKNOWN, ATTR_UNUSED = 1, 2
NONE = -1
LEAST_SHARED = 0.5
"""The least share of the larger vocabulary's tokens that both must have. With fewer, texts are tokenised differently,
and guesses are hardly ever right."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A reason why a draft's ids differ from the target's. `token`: the id, if it is about one."""

    what: str
    token: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Translation:
    """From a target's token ids to a draft's.

    heard  (n_target,) int32: the token that the draft reads for each of the target's
    said   (n_target,) int32: the draft's token that is a guess of each of the target's; NONE if there is none
    alike  whether only the padding differs
    """

    heard: IntArray
    said: IntArray
    alike: bool

    @property
    def n_shared(self) -> int:
        """Tokens of the target that the draft can guess."""
        return int(np.count_nonzero(self.said != NONE))


def find_translation(target: Tokenizer, draft: Tokenizer) -> Translation | None:
    """None if the ids are the same. Raises UserError when the vocabularies share too few tokens.

    Tokens match by their spelling; bos, eos and eot match in any case. For other tokens of the target the draft reads
    the longest suffix of the spelling that it has.
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
    """The number of tokens, of these or of all, that are not padding."""
    among = range(tokenizer.n_vocab) if tokens is None else tokens
    return sum(not _is_padding(tokenizer, token) for token in among)


def _heard(target: Tokenizer, draft: Tokenizer, ids: Mapping[Piece, int], said: IntArray) -> IntArray:
    heard = said.copy()
    for token in np.flatnonzero(said == NONE).tolist():
        is_end = target.is_end(token) and draft.eos != NO_TOKEN_ID
        heard[token] = draft.eos if is_end else _longest_end(target.text_of(token), ids)
    if target.bos != NO_TOKEN_ID and draft.bos != NO_TOKEN_ID:  # the draft's own bos
        heard[target.bos] = draft.bos
    return heard


def _longest_end(text: bytes, ids: Mapping[Piece, int]) -> int:
    ends = ((text[start:], False) for start in range(1, len(text)))
    return next((ids[end] for end in ends if end in ids), 0)


def vocabulary_differences(target: Tokenizer, draft: Tokenizer) -> Iterator[Difference]:
    """The differences between a draft's ids and the target's; none if they mean the same.

    Every id that both have must have the same text and be a byte token in both or in neither. The larger vocabulary may
    end with padding (tokens that are marked unused or unknown, or named `[PAD…]`), because checkpoints of one family
    are padded differently. As in llama.cpp, bos and eos must be equal if a tokenizer adds them: which end token a model
    prefers does not matter, because the target decides.
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
