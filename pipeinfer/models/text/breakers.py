"""DRY's sequence breakers: texts over which a repetition does not reach, as tokens. Knows no sampling."""

import json
from collections.abc import Sequence
from functools import lru_cache

from pipeinfer.core.samplers import breakers_text
from pipeinfer.errors import UserError
from pipeinfer.models.text.tokenizer import Tokenizer

DEFAULT = ("\n", ":", '"', "*")  # llama.cpp's
MAX_BREAKERS, MAX_CHARS = 64, 40
MAX_TAIL = 20  # tokens of a breaker behind its first that are compared, as in llama.cpp
MAX_BYTES = 1 << 17  # of a request's breakers in messages between ranks
OPTION, FIELD = "--dry-sequence-breaker", "dry_sequence_breakers"


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
    for text in json.loads(texts) if texts else DEFAULT:
        whole = text.encode("utf-8", "replace")
        starts = [(text[:n].encode("utf-8", "replace"), text[n:]) for n in range(1, len(text))]
        tails = [(start, tuple(tokenizer.encode(rest, add_special=False))[:MAX_TAIL]) for start, rest in starts]
        for token, piece in enumerate(tokenizer.spelled):
            if whole in piece:
                sequences.add((token,))
            else:
                sequences.update((token, *tail) for start, tail in tails if piece.endswith(start))
    written = breakers_text(sequences)
    if len(written) > MAX_BYTES:
        reason = f"end a repetition at {len(sequences)} tokens or sequences of tokens, which no message holds"
        raise UserError(f"{FIELD} {reason}; give texts that are rarer in the vocabulary of {tokenizer.n_vocab}")
    return written
