"""`/tokenize` and `/detokenize`: their fields, limits and answers. Knows no connection and no rank 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeinfer.job.requests.answers import Spell
from pipeinfer.job.requests.fields import flag, is_whole, refuse, shown
from pipeinfer.models.text.tokenizer import Tokenizer

MAX_CONTENT = 1 << 17  # bytes of a text to tokenise: each may be a token
MAX_TEXT = 1 << 20  # bytes of the text of tokens: an answer has it twice
FIELDS = {"content", "prompt", "add_special", "add_special_tokens", "parse_special", "with_pieces", "model"}


@dataclass(frozen=True, slots=True)
class Tokenising:
    """A text and how it is tokenised: llama.cpp's `content`, `add_special`, `parse_special`, `with_pieces`, and vLLM's
    names `prompt` and `add_special_tokens`."""

    text: str
    add_special: bool
    parse_special: bool
    with_pieces: bool

    @classmethod
    def read(cls, fields: Mapping[str, Any], strict: bool) -> "Tokenising":
        """`strict`: unknown fields are refused. Raises UserError."""
        if strict and (unknown := set(fields) - FIELDS):
            refuse(f"the field {shown(min(unknown))} is unknown; leave it out")
        text = fields.get("content", fields.get("prompt"))
        if not isinstance(text, str):
            refuse(f"content is {shown(text)}; give a text")
        if (n_bytes := len(text.encode("utf-8", "replace"))) > MAX_CONTENT:
            refuse(f"content has {n_bytes} bytes in UTF-8; up to {MAX_CONTENT} are tokenised at a time, send parts")
        add = flag(fields, "add_special", flag(fields, "add_special_tokens", False))
        return cls(text, add, flag(fields, "parse_special", True), flag(fields, "with_pieces", False))

    def answer(self, tokenizer: Tokenizer, spell: Spell, limit: int) -> dict[str, Any]:
        """`limit`: tokens of a request. Raises UserError."""
        tokens: list[Any] = tokenizer.encode(self.text, self.add_special, self.parse_special)
        tokens = [piece_of(spell, token) for token in tokens] if self.with_pieces else tokens
        return {"tokens": tokens, "count": len(tokens), "max_model_len": limit}


def piece_of(spell: Spell, token: int) -> dict[str, Any]:
    """A token of `/tokenize`; bytes where they are no text."""
    data = spell(token)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}


def read_tokens(fields: Mapping[str, Any], n_vocab: int) -> list[int]:
    """Raises UserError."""
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not all(is_whole(each) and 0 <= each < n_vocab for each in tokens):
        refuse(f"tokens is {shown(tokens)}; give a list of token ids below {n_vocab}")
    return tokens


def text_of(tokens: Sequence[int], spell: Spell) -> dict[str, str]:
    """llama.cpp's `content`, which vLLM calls `prompt`. Raises UserError for a text that is too long."""
    if (n_bytes := sum(len(spell(token)) for token in tokens)) > MAX_TEXT:
        refuse(f"tokens are {len(tokens)}, of {n_bytes} bytes; up to {MAX_TEXT} are sent at a time, send parts")
    text = b"".join(map(spell, tokens)).decode("utf-8", "replace")
    return {"content": text, "prompt": text}
