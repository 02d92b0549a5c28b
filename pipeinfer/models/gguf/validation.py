"""The numbers and the vocabulary of a model's header on which libllama ends the process, or computes nonsense: checked
beforehand. Shapes are left to libllama, which refuses those that do not fit."""

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.architectures import PART, WHOLE
from pipeinfer.models.gguf.contents import FileState
from pipeinfer.models.gguf.header import damaged, read_header, read_texts
from pipeinfer.models.gguf.layers import PER_LAYER_KEYS, Layers

MAX_EXPERTS = 1024
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class NumberCheck:
    path: Path
    layers: Layers

    def all(self) -> None:
        """UserError for the first impossible number."""
        self._floats()
        self._arrays()
        self._experts()
        self._heads()
        scaling = self._values("rope.scaling.type", "linear")[0]
        self._require(scaling in ROPE_SCALINGS, f"rope.scaling.type is {scaling!r}")

    def _floats(self) -> None:
        for key, value in self.layers.metadata.items():
            if isinstance(value.value, float):
                sound = math.isfinite(value.value) and (value.value >= 0 or "epsilon" not in key)
                self._require(sound, f"{key} is {value.value}")

    def _arrays(self) -> None:
        for key in PER_LAYER_KEYS:
            value = self.layers.metadata.get(f"{self.layers.name}.{key}")
            n = len(value.value) if value and isinstance(value.value, tuple) else 0
            self._require(not 0 < n < self.layers.n, f"{key} has {n} values for {self.layers.n} layers")

    def _experts(self) -> None:
        n, used = self._number("expert_count", 0), self._values("expert_used_count", 0)
        groups, groups_used = self._number("expert_group_count", 0), self._number("expert_group_used_count", 0)
        most = max((item for item in used if isinstance(item, int)), default=0)
        self._require(0 <= n <= MAX_EXPERTS and (0 < most <= n if n else most == 0), f"{most} of {n} experts are used")
        fits = groups <= 1 or (n % groups == 0 and 0 < groups_used < groups)
        self._require(0 <= groups < max(n, 1) and fits, f"{groups_used} of {groups} groups of {n} experts are used")

    def _heads(self) -> None:
        counts = self._values("attention.head_count", 0)
        kv_counts = self._values("attention.head_count_kv", 0) if self.layers.has("attention.head_count_kv") else counts
        n_heads = next((n for n in counts if n), 0)
        n_layers = max(len(counts), len(kv_counts))
        for n, n_kv in zip(_for_each_layer(counts, n_layers), _for_each_layer(kv_counts, n_layers), strict=False):
            sound = isinstance(n, int) and isinstance(n_kv, int) and 0 < n_kv <= n and n % n_kv == 0
            none = self.layers.architecture.headless and n_kv == 0
            self._require(sound or none, f"there are {n} heads for {n_kv} of keys and values")
        if not isinstance(n_heads, int) or n_heads == 0:
            return
        default = self._number("embedding_length", 0) // n_heads
        key, value = (self._number(f"attention.{name}_length", default) for name in ("key", "value"))
        rotated, allowed = self._number("rope.dimension_count", key), self.layers.architecture.heads
        part = 0 <= rotated <= key and rotated % 2 == 0 and allowed != WHOLE
        equal = key == value or allowed not in (WHOLE, PART)
        sound = key > 0 < value and equal and (rotated == key or part)
        self._require(sound, f"heads have {key} and {value} values, {rotated} of them rotated")

    def _values(self, key: str, default: int | str) -> tuple[object, ...]:
        """One value a layer, or one for all."""
        value = self.layers.metadata.get(f"{self.layers.name}.{key}")
        content = default if value is None else value.value
        return (content if content else (default,)) if isinstance(content, tuple) else (content,)

    def _number(self, key: str, default: int) -> int:
        number = self._values(key, default)[0]
        self._require(isinstance(number, int), f"{key} is {number!r}")
        return cast(int, number)

    def _require(self, sound: bool, otherwise: str) -> None:
        if not sound:
            raise damaged(self.path, otherwise[:200])


def _for_each_layer(values: tuple[object, ...], n: int) -> tuple[object, ...]:
    """One value for all as one for each of `n`."""
    return values * n if len(values) == 1 else values


SPACE = "▁"  # SentencePiece's space
VOCABULARY = "tokenizer.ggml."  # the beginning of a vocabulary's keys


def vocabulary_digest(path: Path) -> str:
    """Equal for two files with the same vocabulary. Raises UserError for a file that is no model."""
    return _vocabulary_digest(path, FileState.of(path))


@lru_cache(maxsize=8)
def _vocabulary_digest(path: Path, state: FileState) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for key, (start, end) in sorted(read_header(path).spans.items()):
            if key.startswith(VOCABULARY):
                file.seek(start)
                digest.update(file.read(end - start))
    return digest.hexdigest()


class VocabularyCheck:
    """The tokens of a model file. Raises UserError if two are the same."""

    def __init__(self, path: Path) -> None:
        self._path = path
        texts = read_texts(path, "tokenizer.ggml.tokens")
        # libllama ends a text at a NUL and gives empty ones a name
        self._texts = frozenset(text.split(b"\0", 1)[0] or b"[EMPTY_%d]" % i for i, text in enumerate(texts))
        if len(self._texts) != len(texts):
            raise damaged(path, f"{len(texts) - len(self._texts)} tokens of its vocabulary come twice")

    def missing_bytes(self) -> frozenset[int]:
        """Bytes that a SentencePiece vocabulary has no token for."""
        return frozenset(
            byte for byte in range(256) if b"<0x%02X>" % byte not in self._texts and bytes([byte]) not in self._texts
        )

    def check_encodable(self, text: str, missing: Collection[int]) -> None:
        """UserError if a character is no token and has one of the `missing` bytes, which libllama would look for."""
        for character in sorted({SPACE, *text.replace(" ", SPACE)}):
            data = character.encode("utf-8", "replace")
            if data not in self._texts and any(byte in missing for byte in data):
                lack = f"has no token for {character!r}: neither it nor all of its bytes"
                way_out = "leave it out, or copy or download the model again"
                raise UserError(f"the vocabulary of {self._path} {lack}; {way_out}")
