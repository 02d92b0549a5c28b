"""A model's vocabulary without its weights: the file is held open until the vocabulary is needed."""

import os
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.header import metadata_spans
from pipeinfer.models.gguf.writer import encode_header
from pipeinfer.models.text.tokenizer import Tokenizer


class VocabularyFile:
    """`path`: a model, the first file of a split one, or a file with the same header. It may be removed meanwhile."""

    def __init__(self, path: Path) -> None:
        """Raises UserError when it cannot be read."""
        self.path = path
        self._tokenizer: Tokenizer | None = None
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None

    def open(self) -> Tokenizer:
        """The tokenizer, always the same. Raises UserError."""
        self._tokenizer = self._tokenizer or self._open()
        return self._tokenizer

    def _open(self) -> Tokenizer:
        fd = os.memfd_create("pipeinfer-vocabulary", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(metadata_only(Path(f"/proc/self/fd/{self._file.fileno()}")))
            return Tokenizer(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)

    def close(self) -> None:
        """May be called twice."""
        self._file.close()


def metadata_only(path: Path) -> bytes:
    """A model file's header without tensors, from which libllama can load the vocabulary."""
    entries = []
    with path.open("rb") as file:
        for key, (start, end) in metadata_spans(path).items():
            if key != "general.alignment" and not key.startswith("split."):
                file.seek(start)
                entries.append(file.read(end - start))
    return encode_header(entries, [])
