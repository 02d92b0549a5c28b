"""Text to tokens and back with a model's own vocabulary, and whether two models share one. Loads no weights."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.vocabulary import VocabularyCheck
from pipeinfer.models.llama import ggml

ATTR_UNKNOWN, ATTR_UNUSED, ATTR_BYTE = 1, 2, 32
NO_TOKEN_ID = -1
NO_VOCABULARY, SENTENCE_PIECE = 0, 1


class Tokenizer:
    """A vocabulary. bos and eos are -1 where the model has none."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        check = VocabularyCheck(self.path)
        self._lib = lib = ggml.load_library()
        options = lib.llama_model_default_params()
        options.vocab_only = True
        self._model = lib.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise UserError(f"the vocabulary of {path} cannot be loaded: {ggml.last_errors()}")
        self._vocab = lib.llama_model_get_vocab(self._model)
        if self.kind() == NO_VOCABULARY:
            self.close()
            raise UserError(f"{path} has no vocabulary; give a model with one")
        self._missing = check.missing_bytes() if self.kind() == SENTENCE_PIECE else frozenset()
        self._check = check if self._missing else None  # a sound vocabulary needs no second look
        self.n_vocab = int(lib.llama_vocab_n_tokens(self._vocab))
        self.bos, self.eos = int(lib.llama_vocab_bos(self._vocab)), int(lib.llama_vocab_eos(self._vocab))
        self.adds_bos = bool(lib.llama_vocab_get_add_bos(self._vocab))
        self.adds_eos = bool(lib.llama_vocab_get_add_eos(self._vocab))
        self._piece = ctypes.create_string_buffer(512)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text. add_special: bos/eos as the model wants them; parse_special: `<|…|>` are tokens.

        Raises UserError when the vocabulary has no tokens for it.
        """
        if self._check:
            self._check.check_encodable(text, self._missing)
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        tokens = (ctypes.c_int32 * room)()
        n = self._lib.llama_tokenize(self._vocab, data, len(data), tokens, room, add_special, parse_special)
        if n < 0:
            tokens = (ctypes.c_int32 * -n)()
            n = self._lib.llama_tokenize(self._vocab, data, len(data), tokens, -n, add_special, parse_special)
        if n < 0:
            raise UserError(f"a text of {len(data)} bytes cannot be tokenised by the vocabulary of {self.path}")
        return tokens[:n]

    def decode_piece(self, token: int, special: bool = False) -> bytes:
        """A token's bytes, maybe part of a character. Control tokens are empty unless `special`."""
        n = self._lib.llama_token_to_piece(self._vocab, token, self._piece, len(self._piece), 0, special)
        if n < 0:
            self._piece = ctypes.create_string_buffer(-n)
            n = self._lib.llama_token_to_piece(self._vocab, token, self._piece, len(self._piece), 0, special)
        return self._piece.raw[: max(n, 0)]

    def is_end(self, token: int) -> bool:
        """Whether generation ends with this token."""
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    def text_of(self, token: int) -> bytes:
        """A token as the vocabulary spells it."""
        text: bytes | None = self._lib.llama_vocab_get_text(self._vocab, token)
        return text or b""

    def attributes_of(self, token: int) -> int:
        return int(self._lib.llama_vocab_get_attr(self._vocab, token))

    def kind(self) -> int:
        """Which tokenizer: SPM, BPE, WPM, …"""
        return int(self._lib.llama_vocab_type(self._vocab))

    def close(self) -> None:
        """Free the vocabulary. May be called twice."""
        if self._model:
            self._lib.llama_model_free(self._model)
        self._model = None


class TextStream:
    """Tokens in, text out as soon as its characters are whole.

    `markers`: control tokens are spelled, such as those around reasoning and calls of tools; not those that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, markers: bool = False) -> None:
        self._tokenizer, self._markers = tokenizer, markers
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        special = self._markers and not self._tokenizer.is_end(token)
        return self._decoder.decode(self._tokenizer.decode_piece(token, special))

    def flush(self) -> str:
        """What is left: U+FFFD for a character that never became whole."""
        return self._decoder.decode(b"", final=True)


def check_draft(target: Tokenizer, path: Path) -> None:
    """UserError unless the model at `path` can be read and its token ids mean the same to the target."""
    draft = Tokenizer(path)
    try:
        check_same_vocabulary(target, draft)
    finally:
        draft.close()


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """UserError unless a draft's token ids mean the same to the target: at the first of `vocabulary_differences`."""
    for difference in vocabulary_differences(target, draft):
        raise UserError(f"{draft.path} cannot draft for {target.path}: {difference.what}; "
                        "take a draft of the same model family")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """Why a draft's tokens mean something else to the target. `token`: the id that does, if it is one."""

    what: str
    token: int | None = None


def vocabulary_differences(target: Tokenizer, draft: Tokenizer) -> Iterator[Difference]:
    """All that keeps a draft from guessing for the target; nothing if the ids mean the same.

    Every id that both have must have the same text and be a byte token in both or in neither. The larger vocabulary
    may go on with padding (tokens the model marks unused or unknown, or calls `[PAD…]`), as checkpoints of one family
    are padded differently; a draft must not propose those. bos and eos must be equal where a tokenizer adds them by
    itself, as in llama.cpp: which of its end tokens a model prefers does not matter, the target alone decides.
    """
    if target.kind() != draft.kind():
        yield Difference(f"tokenizer types {target.kind()} and {draft.kind()}")
    for name, adds, ids in (
        ("bos", (target.adds_bos, draft.adds_bos), (target.bos, draft.bos)),
        ("eos", (target.adds_eos, draft.adds_eos), (target.eos, draft.eos)),
    ):
        if adds[0] != adds[1] or (adds[0] and ids[0] != ids[1]):
            yield Difference(f"{name} is {ids[0]} (added: {adds[0]}) and {ids[1]} (added: {adds[1]})")
    shared = min(target.n_vocab, draft.n_vocab)
    for token in range(shared):
        if target.text_of(token) != draft.text_of(token) or (
            (target.attributes_of(token) ^ draft.attributes_of(token)) & ATTR_BYTE
        ):
            yield Difference(f"token {token} is {_show(target, token)} and {_show(draft, token)}", token)
    larger = target if target.n_vocab > draft.n_vocab else draft
    for token in range(shared, larger.n_vocab):
        if not _is_padding(larger, token):
            what = f"{target.n_vocab} and {draft.n_vocab} tokens, and token {token} ({_show(larger, token)})"
            yield Difference(f"{what} of the larger is no padding", token)


def _is_padding(tokenizer: Tokenizer, token: int) -> bool:
    unused = tokenizer.attributes_of(token) & (ATTR_UNKNOWN | ATTR_UNUSED)
    return bool(unused) or tokenizer.text_of(token).startswith(b"[PAD")


def _show(tokenizer: Tokenizer, token: int) -> str:
    return repr(tokenizer.text_of(token).decode("utf-8", "replace"))
