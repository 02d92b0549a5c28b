"""Check a grammar, in a process with limited time and memory. Chooses no token."""

import re
from functools import lru_cache

from pipeinfer.errors import UserError
from pipeinfer.models.text.limited_process import LimitedProcess, Limits
from pipeinfer.models.text.tokenizer import Tokenizer

MAX_BYTES = 128 << 10
"""The largest text of a grammar or schema."""

PROCESS = LimitedProcess(
    "pipeinfer.models.text.grammar_child", Limits(cpu_s=1, wall_s=12.0, n_bytes=2 << 30, niceness=10)
)

TOO_MUCH = (
    "the grammar or JSON schema takes too much time or memory: it is too large, or can read the same text in too many "
    "ways; give a smaller one, without parts that may be empty or repeated within repeated parts"
)
EXCERPT = re.compile(r"\n *\d+ \| ")
"""In llguidance's errors: lines of its grammar, which no client has written."""

IS_LIMIT = re.compile("panic|too (large|big|many items)|items; max|limit", re.IGNORECASE)


def check_grammar(tokenizer: Tokenizer, text: str) -> None:
    """Raises UserError for a grammar that is invalid, or cannot be used with this vocabulary."""
    if (n_bytes := len(text.encode("utf-8", "replace"))) > MAX_BYTES:
        raise UserError(f"a grammar or JSON schema of {n_bytes} bytes is too long; {MAX_BYTES} are possible, "
                        "give a shorter one")  # fmt: skip
    if not tokenizer.ends:
        raise UserError(f"{tokenizer.path} has no token that ends a text, which must follow a grammar's last one; "
                        "leave the grammar out")  # fmt: skip
    for name in _token_names(text, tokenizer.n_vocab):
        token_id(tokenizer, name)


def token_id(tokenizer: Tokenizer, name: str) -> int:
    """The id of a token that a grammar names. Raises UserError if the vocabulary does not have it."""
    tokens = tokenizer.encode(name, add_special=False, parse_special=True)
    if len(tokens) != 1:
        raise UserError(f"the grammar names the token {name[:60]}, which the vocabulary does not have; "
                        "POST /tokenize tells a text's tokens")  # fmt: skip
    return tokens[0]


def fault_of(text: str, error: str) -> str:
    """The message for llguidance's error."""
    if IS_LIMIT.search(error):
        return TOO_MUCH
    what = "JSON schema" if text.startswith("{") else "tools' JSON schema" if "%json" in text else "grammar"
    if "NoExtensionBias" in error:  # all that llguidance says of it
        if what == "grammar":
            return "a rule of the grammar refers to itself alone, as in root ::= root; give it a text"
        return f"the {what} refers to itself with nothing between ($ref); give a value between the two"
    if "is not present in a registry" in error:
        return f"the {what} refers to another document ($ref), which is not fetched; put what it has into $defs"
    said = re.sub(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?", "", EXCERPT.split(error)[0].strip())
    return f"the {what} cannot be used: {' '.join(said.split())[:300]}; leave that out, or write it in another way"


@lru_cache(maxsize=64)
def _token_names(text: str, n_vocab: int) -> tuple[str, ...]:
    """Tokens that a grammar names. Raises UserError for an invalid grammar."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            "a grammar has half of a character (a lone surrogate), which no text has; leave it out"
        ) from None
    found = PROCESS.ask({"text": text, "n_vocab": n_vocab})
    if "broken" in found:
        raise UserError(f"the grammar's check {found['broken']}")
    if "error" in found or "wrong" not in found:
        raise UserError(TOO_MUCH)
    if found["wrong"]:
        raise UserError(found["wrong"] if "tokens" not in found else fault_of(text, found["wrong"]))
    return tuple(found["tokens"])
