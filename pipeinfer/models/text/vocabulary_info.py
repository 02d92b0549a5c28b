"""A vocabulary's kind, size and special tokens. Compares nothing and encodes nothing."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.models.gguf.header import Value
from pipeinfer.models.text.tokenizer import Tokenizer

SPECIAL = re.compile(r"tokenizer\.ggml\.(\w+)_token_id")


@dataclass(frozen=True, slots=True)
class SpecialToken:
    id: int
    text: str


@dataclass(frozen=True, slots=True)
class VocabularyInfo:
    """kind, preset   the file's names of the tokenizer and of its pre-tokenizer
    special       use (bos, eos, …) -> token
    ends          tokens that end a generation
    """

    kind: str
    preset: str
    n_tokens: int
    adds_bos: bool
    adds_eos: bool
    special: dict[str, SpecialToken]
    ends: tuple[SpecialToken, ...]


def read_vocabulary_info(path: Path, metadata: Mapping[str, Value]) -> VocabularyInfo:
    """`metadata`: the model file's. Raises UserError when its vocabulary is missing or cannot be loaded."""
    tokenizer = Tokenizer(path)
    try:

        def token(id: int) -> SpecialToken:
            return SpecialToken(id, tokenizer.text_of(id).decode("utf-8", "replace"))

        ids: dict[str, object] = {
            match[1]: value.value for key, value in metadata.items() if (match := SPECIAL.fullmatch(key))
        }
        ids |= {"bos": tokenizer.bos, "eos": tokenizer.eos}  # also where the file leaves them to libllama
        named = {use: token(id) for use, id in ids.items() if isinstance(id, int) and 0 <= id < tokenizer.n_vocab}
        return VocabularyInfo(
            kind=_text(metadata, "tokenizer.ggml.model"),
            preset=_text(metadata, "tokenizer.ggml.pre"),
            n_tokens=tokenizer.n_vocab,
            adds_bos=tokenizer.adds_bos,
            adds_eos=tokenizer.adds_eos,
            special=dict(sorted(named.items())),
            ends=tuple(token(id) for id in range(tokenizer.n_vocab) if tokenizer.is_end(id)),
        )
    finally:
        tokenizer.close()


def _text(metadata: Mapping[str, Value], key: str) -> str:
    value = metadata[key].value if key in metadata else ""
    return value if isinstance(value, str) else ""
