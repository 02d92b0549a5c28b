"""A vocabulary's bytes, and what it lacks, read before libllama does, which on some damage ends the process instead of
refusing."""

import hashlib
from collections.abc import Collection
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.header import metadata_spans, read_texts

SPACE = "▁"
"""What SentencePiece has in the place of a space."""


VOCABULARY = "tokenizer.ggml."
"""What the keys of a vocabulary begin with."""


def vocabulary_digest(path: Path) -> str:
    """Equal of two files that hold the same vocabulary. Raises UserError for what is no model."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for key, (start, end) in sorted(metadata_spans(path).items()):
            if key.startswith(VOCABULARY):
                file.seek(start)
                digest.update(file.read(end - start))
    return digest.hexdigest()


class VocabularyCheck:
    """The tokens of a model file. Raises UserError when two are the same."""

    def __init__(self, path: Path) -> None:
        self._path = path
        texts = read_texts(path, "tokenizer.ggml.tokens")
        # libllama ends a text at a NUL and gives empty ones a name
        self._texts = frozenset(text.split(b"\0", 1)[0] or b"[EMPTY_%d]" % i for i, text in enumerate(texts))
        if len(self._texts) != len(texts):
            raise UserError(f"{path} is damaged: {len(texts) - len(self._texts)} tokens of its vocabulary come twice; "
                            "copy or download the file again")  # fmt: skip

    def missing_bytes(self) -> frozenset[int]:
        """Bytes that a SentencePiece vocabulary has no token for."""
        return frozenset(
            byte for byte in range(256) if b"<0x%02X>" % byte not in self._texts and bytes([byte]) not in self._texts
        )

    def check_encodable(self, text: str, missing: Collection[int]) -> None:
        """UserError when a character of `text` is no token and has one of the `missing` bytes, which libllama would
        look for."""
        for character in sorted({SPACE, *text.replace(" ", SPACE)}):
            data = character.encode("utf-8", "replace")
            if data not in self._texts and any(byte in missing for byte in data):
                raise UserError(f"the vocabulary of {self._path} has no token for {character!r}: neither it nor all of "
                                "its bytes; leave it out, or copy or download the model again")  # fmt: skip
