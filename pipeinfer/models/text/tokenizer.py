"""Text to tokens and back with a model's vocabulary, read without its weights; its kind, size and special tokens."""

import codecs
import ctypes
import io
import json
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from pipeinfer.core.samplers import breakers_text
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.header import FileHead, Value, read_header, value_of
from pipeinfer.models.gguf.validation import VocabularyCheck
from pipeinfer.models.gguf.writer import encode_header, memory_file
from pipeinfer.models.llama import ggml

ATTR_UNKNOWN, ATTR_CONTROL, ATTR_USER_DEFINED, ATTR_BYTE, ATTR_LSTRIP, ATTR_RSTRIP = 1, 8, 16, 32, 128, 256
NO_TOKEN_ID = -1
NO_VOCABULARY, SENTENCE_PIECE = 0, 1

PART_CHARACTERS = 1 << 14
"""About the number of characters of a text with markers that are tokenised at a time: llama.cpp searches for every
marker from each one to the end of the text."""

MARKER = re.compile(r"<[^<>]+>")

SPACE = " \t\n\v\f\r"

Span = tuple[int, int]  # a part of a text: its first character, and the one behind its last

Piece = tuple[bytes, bool]  # a token's spelling, and whether it is a byte token, whose spelling is not its text


class Tokenizer:
    """A vocabulary. bos, eos and eot (end of turn) are -1 if the model has none."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        check = VocabularyCheck(self.path)
        self._lib = lib = ggml.load_library()
        options = lib.llama_model_default_params()
        options.vocab_only = True
        self._model = lib.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            read_header(self.path)  # has a better message for a truncated file
            raise UserError(f"the vocabulary of {path} cannot be loaded: {ggml.last_errors()}")
        self._vocab = lib.llama_model_get_vocab(self._model)
        if self.kind() == NO_VOCABULARY:
            self.close()
            raise UserError(f"{path} has no vocabulary; give a model with one")
        self._missing = check.missing_bytes() if self.kind() == SENTENCE_PIECE else frozenset()
        self._check = check if self._missing else None  # a sound vocabulary needs no second look
        self.n_vocab = int(lib.llama_vocab_n_tokens(self._vocab))
        self.bos, self.eos = int(lib.llama_vocab_bos(self._vocab)), int(lib.llama_vocab_eos(self._vocab))
        self.eot = int(lib.llama_vocab_eot(self._vocab))
        self.adds_bos = bool(lib.llama_vocab_get_add_bos(self._vocab))
        self.adds_eos = bool(lib.llama_vocab_get_add_eos(self._vocab))

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text. `add_special`: add bos and eos as the model expects; `parse_special`: `<|…|>` are
        tokens. Raises UserError when the vocabulary has no tokens for it."""
        if self._check:
            self._check.check_encodable(text, self._missing)
        if parse_special and len(text) > PART_CHARACTERS:
            tokens = [token for part in self._parts(text) for token in self._encode(part, False, True)]
            ends = self.adds_bos and add_special, self.adds_eos and add_special
            return [*[self.bos] * ends[0], *tokens, *[self.eos] * ends[1]]
        return self._encode(text, add_special, parse_special)

    def encode_with_literals(self, text: str, literals: Sequence[Span]) -> list[int]:
        """Token ids with `parse_special`, without bos and eos. `literals`: where names of control tokens are text, in
        order. The text is cut as in llama.cpp: at longer tokens first."""
        if self._check:
            self._check.check_encodable(text, self._missing)
        fragments: list[Span | int] = [(0, len(text))]
        for token, name in self.controls:
            if name in text:
                before, fragments = fragments, []
                for each in before:
                    fragments += [each] if isinstance(each, int) else self._cut(text, each, token, name, literals)
        tokens = list[int]()
        for each in fragments:
            tokens += [each] if isinstance(each, int) else self._encode(text[slice(*each)], False, False)
        return tokens

    def _cut(self, text: str, fragment: Span, token: int, name: str, literals: Sequence[Span]) -> Iterator[Span | int]:
        """A fragment, cut at each name of a control token that overlaps no literal."""
        start, end = fragment
        kind, at = self.attributes_of(token), start
        while (at := text.find(name, at, end)) >= 0:
            behind = at + len(name)
            following = bisect_right(literals, at, key=lambda literal: literal[1])
            if following < len(literals) and literals[following][0] < behind:
                at += 1
                continue
            cut = start + len(text[start:at].rstrip(SPACE)) if kind & ATTR_LSTRIP else at
            if cut > start:
                yield start, cut
            yield token
            start = at = end - len(text[behind:end].lstrip(SPACE)) if kind & ATTR_RSTRIP else behind
        if start < end:
            yield start, end

    @cached_property
    def controls(self) -> tuple[tuple[int, str], ...]:
        """(token, name) of the tokens that a text has only where special ones are parsed, the longest name first."""
        names = self._names(ATTR_CONTROL | ATTR_UNKNOWN).items()
        return tuple(sorted(((token, text) for token, text in names if text), key=lambda each: -len(each[1].encode())))

    def _names(self, kinds: int) -> dict[int, str]:
        """Token -> its text, of tokens with one of these attributes."""
        tokens = (token for token in range(self.n_vocab) if self.attributes_of(token) & kinds)
        return {token: self.spelled_out(token) for token in tokens}

    @cached_property
    def control_names(self) -> re.Pattern[str] | None:
        """Matches the names of `controls`; None if there are none."""
        return re.compile("|".join(re.escape(name) for _, name in self.controls)) if self.controls else None

    def _parts(self, text: str) -> Iterator[str]:
        """The text, cut before markers: their two sides are tokenised separately anyway."""
        start = 0
        for match in MARKER.finditer(text) if self._cuts else ():
            if match.start() - start >= PART_CHARACTERS and match[0] in self._cuts:
                yield text[start : match.start()]
                start = match.start()
        yield text[start:]

    @cached_property
    def _cuts(self) -> frozenset[str]:
        """Markers that no other one can overlap, and that leave the spaces before them."""
        markers = self._names(ATTR_UNKNOWN | ATTR_CONTROL | ATTR_USER_DEFINED)
        if any(("<" in text or ">" in text) and not MARKER.fullmatch(text) for text in markers.values()):
            return frozenset()
        cuts = (token for token, text in markers.items() if MARKER.fullmatch(text))
        return frozenset(markers[token] for token in cuts if not self.attributes_of(token) & ATTR_LSTRIP)

    def _encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
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
        """A token's bytes, maybe part of a character. Control tokens are empty unless `special`. Thread-safe."""
        piece = ctypes.create_string_buffer(64)
        n = self._lib.llama_token_to_piece(self._vocab, token, piece, len(piece), 0, special)
        if n < 0:
            piece = ctypes.create_string_buffer(-n)
            n = self._lib.llama_token_to_piece(self._vocab, token, piece, len(piece), 0, special)
        return piece.raw[: max(n, 0)]

    def is_end(self, token: int) -> bool:
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """All tokens that end a generation."""
        return tuple(filter(self.is_end, range(self.n_vocab)))

    @cached_property
    def fill_in(self) -> dict[str, int]:
        """Tokens for filling in the middle of a text, as far as the model has them: pre, suf, mid, rep, sep."""
        names = ("pre", "suf", "mid", "rep", "sep")
        tokens = {name: int(getattr(self._lib, f"llama_vocab_fim_{name}")(self._vocab)) for name in names}
        return {name: token for name, token in tokens.items() if token != NO_TOKEN_ID}

    @cached_property
    def longest(self) -> int:
        return max(len(self.decode_piece(token, special=True)) for token in range(self.n_vocab))

    def text_of(self, token: int) -> bytes:
        text: bytes | None = self._lib.llama_vocab_get_text(self._vocab, token)
        return text or b""

    def spelled_out(self, token: int) -> str:
        """Its text, with U+FFFD for what is no UTF-8; empty for NO_TOKEN_ID."""
        return self.text_of(token).decode("utf-8", "replace") if token >= 0 else ""

    def attributes_of(self, token: int) -> int:
        return int(self._lib.llama_vocab_get_attr(self._vocab, token))

    @cached_property
    def pieces(self) -> list[Piece]:
        return [(self.text_of(token), bool(self.attributes_of(token) & ATTR_BYTE)) for token in range(self.n_vocab)]

    @cached_property
    def piece_bytes(self) -> list[bytes]:
        """`decode_piece` of each token of the vocabulary, control tokens included."""
        return [self.decode_piece(token, special=True) for token in range(self.n_vocab)]

    def kind(self) -> int:
        """The type of tokenizer: SPM, BPE, WPM, …, as libllama counts them."""
        return int(self._lib.llama_vocab_type(self._vocab))

    def close(self) -> None:
        """Free the vocabulary. May be called twice."""
        if self._model:
            self._lib.llama_model_free(self._model)
        self._model = None


class TextStream:
    """Decodes tokens, and returns text once its characters are complete. `markers`: control tokens are included, such
    as those around reasoning and tool calls, except those that end a text."""

    def __init__(self, tokenizer: Tokenizer, markers: bool = False) -> None:
        self._tokenizer, self._markers = tokenizer, markers
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        special = self._markers and not self._tokenizer.is_end(token)
        return self._decoder.decode(self._tokenizer.decode_piece(token, special))

    def flush(self) -> str:
        """The rest: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)


SPECIAL = re.compile(r"tokenizer\.ggml\.(\w+)_token_id")


class VocabularyFile:
    """`source`: a model, the first file of a split one, or the head of such a file. The file is held open until the
    vocabulary is needed, and may be removed meanwhile."""

    def __init__(self, source: Path | FileHead) -> None:
        """Raises UserError when it cannot be read."""
        self._source, self.path = source, source.path if isinstance(source, FileHead) else source
        self._tokenizer: Tokenizer | None = None
        self._lock = threading.Lock()  # threads that open grammars ahead read the same file
        try:
            self._file: BinaryIO = io.BytesIO(source.data) if isinstance(source, FileHead) else source.open("rb")
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from None

    def open(self) -> Tokenizer:
        """The tokenizer, always the same. Raises UserError."""
        with self._lock:
            self._tokenizer = self._tokenizer or self._open()
            return self._tokenizer

    def _open(self) -> Tokenizer:
        source = self._source
        if isinstance(source, Path):
            source = Path(f"/proc/self/fd/{self._file.fileno()}")
        header = metadata_only(source, self._file)
        fd = memory_file("vocabulary", len(header), (), lambda fd: os.pwrite(fd, header, 0))
        try:
            return Tokenizer(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)

    def close(self) -> None:
        """May be called twice."""
        self._file.close()


def metadata_only(source: Path | FileHead, file: BinaryIO) -> bytes:
    """A model file's header without tensors, from which libllama can load the vocabulary. `file`: its bytes."""
    entries = []
    for key, (start, end) in read_header(source).spans.items():
        if key != "general.alignment" and not key.startswith("split."):
            file.seek(start)
            entries.append(file.read(end - start))
    return encode_header(entries, [])


def describe_vocabulary(path: Path, metadata: Mapping[str, Value]) -> dict[str, Any]:
    """A vocabulary as plain data. `kind`, `preset`: the file's names of the tokenizer and of its pre-tokenizer;
    `special`: use (bos, eos, …) -> token; `ends`: tokens that end a generation. `metadata`: the model file's. Raises
    UserError when its vocabulary is missing or cannot be loaded."""
    with closing(Tokenizer(path)) as tokenizer:

        def token(id: int) -> dict[str, Any]:
            return {"id": id, "text": tokenizer.spelled_out(id)}

        matches = ((SPECIAL.fullmatch(key), value.value) for key, value in metadata.items())
        ids: dict[str, object] = {match[1]: value for match, value in matches if match}
        ids |= {"bos": tokenizer.bos, "eos": tokenizer.eos}  # also where the file leaves them to libllama
        named = {use: token(id) for use, id in ids.items() if isinstance(id, int) and 0 <= id < tokenizer.n_vocab}
        return {
            "kind": value_of(metadata, "tokenizer.ggml.model", ""),
            "preset": value_of(metadata, "tokenizer.ggml.pre", ""),
            "n_tokens": tokenizer.n_vocab,
            "adds_bos": tokenizer.adds_bos,
            "adds_eos": tokenizer.adds_eos,
            "special": dict(sorted(named.items())),
            "ends": tuple(map(token, tokenizer.ends)),
        }


# -- sequence breakers of DRY: texts over which a repetition does not reach, as tokens

BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's
MAX_BREAKERS, MAX_CHARS = 64, 40
MAX_TAIL = 20  # tokens of a breaker behind its first that are compared, as in llama.cpp
MAX_BREAKER_BYTES = 1 << 17  # of a request's breakers in messages between ranks
BREAKERS_OPTION, BREAKERS_FIELD = "--dry-sequence-breaker", "dry_sequence_breakers"


def breakers_json(texts: Sequence[str], name: str) -> str:
    """The JSON list of texts. Raises UserError for too many, and for an empty or a long one."""
    if len(texts) > MAX_BREAKERS:
        raise UserError(f"{name} has {len(texts)} texts; {MAX_BREAKERS} are possible")
    for text in texts:
        if not 0 < len(text) <= MAX_CHARS:
            raise UserError(f"{name} has a text of {len(text)} characters; give 1 to {MAX_CHARS}")
    return json.dumps(list(texts))


@lru_cache(maxsize=16)
def breaker_tokens(tokenizer: Tokenizer, texts: str) -> str:
    """The sequences of tokens that hold or begin these texts, a JSON list or empty for llama.cpp's own, as
    `breakers_text` writes them. Raises UserError for more than messages have room for."""
    sequences = set[tuple[int, ...]]()
    for text in json.loads(texts) if texts else BREAKERS:
        whole = text.encode("utf-8", "replace")
        starts = [(text[:n].encode("utf-8", "replace"), text[n:]) for n in range(1, len(text))]
        tails = [(start, tuple(tokenizer.encode(rest, add_special=False))[:MAX_TAIL]) for start, rest in starts]
        for token, piece in enumerate(tokenizer.piece_bytes):
            if whole in piece:
                sequences.add((token,))
            else:
                sequences.update((token, *tail) for start, tail in tails if piece.endswith(start))
    written = breakers_text(sequences)
    if len(written) > MAX_BREAKER_BYTES:
        reason = f"end a repetition at {len(sequences)} tokens or sequences of tokens, which no message holds"
        way_out = f"give texts that are rarer in the vocabulary of {tokenizer.n_vocab}"
        raise UserError(f"{BREAKERS_FIELD} {reason}; {way_out}")
    return written
