"""What is said to a model in a benchmark: texts and question sets, as tokens turn by turn. Runs nothing."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.job.process.limited import read_limited
from pipeinfer.job.requests.prompts import TEXTS
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.experiment import digest

SEPARATOR = "\n\n"
"""Between what was said and the next turn. There is no chat template: what is measured is speed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or, for `pp512`, as many tokens of text as its name says. `later`: said next, after each answer."""

    name: str
    text: str = ""
    n_tokens: int = 0
    later: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """What is said next in a conversation. `name` is that of its rows."""

    name: str
    tokens: tuple[int, ...]
    digest: str = ""
    """Of all that has been said to the model with this turn."""

    measured: bool = False
    """Before this sweep: it is generated for its answer, if a turn after it is not."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, each with the answers before it. Most have one turn: a prompt."""

    turns: tuple[Turn, ...]
    cut: int
    n_keep: int  # tokens at the beginning that a cut leaves there: the beginning-of-text token

    def prompt(self, said: Sequence[int], turn: Turn) -> tuple[int, ...]:
        """The prompt of a turn after all that was said, its newest tokens if it must be cut."""
        tokens = (*said, *turn.tokens)
        if not self.cut or len(tokens) <= self.cut:
            return tokens
        n_newest = max(0, self.cut - self.n_keep)
        return tokens[: self.cut - n_newest] + tokens[len(tokens) - n_newest :]

    def lengths(self, n_predict: int) -> list[int]:
        """Tokens of each turn's prompt, known before any answer: an answer has `n_predict` of them."""
        lengths: list[int] = []
        for turn in self.turns:
            said = lengths[-1] + n_predict if lengths else 0
            lengths.append(min(said + len(turn.tokens), self.cut or sys.maxsize))
        return lengths


def conversation_of(prompt: Prompt, tokenizer: Tokenizer, cut: int) -> Conversation:
    """A prompt in tokens, the first `cut` of its first turn at most. Raises UserError when there are none."""
    if prompt.n_tokens:
        return Conversation((_turn(prompt.name, _of_length(prompt.n_tokens, tokenizer)),), cut=0, n_keep=0)
    tokens = tokenizer.encode(prompt.text, parse_special=True)
    if not tokens:
        raise UserError(f"the prompt {prompt.name} is empty; give some text")
    first = _turn(prompt.name, tokens[:cut] if cut else tokens)
    turns = [first]
    # appended as tokens, not as text: an answer stays what the model said, and its length is known beforehand
    for number, text in enumerate(prompt.later, start=2):
        turns.append(_turn(f"{prompt.name}.{number}", _continuation(f"{SEPARATOR}{text}", tokenizer), turns[-1].digest))
    return Conversation(tuple(turns), cut, n_keep=int(tokens[0] == tokenizer.bos))


def _turn(name: str, tokens: Sequence[int], before: str = "") -> Turn:
    """`before`: the digest of the turn before it."""
    return Turn(name, tuple(tokens), digest((*([before] if before else []), *tokens)))


def _of_length(n_tokens: int, tokenizer: Tokenizer) -> list[int]:
    """The first `n_tokens` of real text, which begins anew where it ends: what is measured depends on the words too."""
    tokens, more = _real_text(tokenizer)
    return (tokens + more * (n_tokens // len(more)))[:n_tokens]


def _real_text(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """As it begins, and as it goes on after its end."""
    text = SEPARATOR.join(path.read_text(encoding="utf-8") for path in TEXTS)
    return tokenizer.encode(text), tokenizer.encode(SEPARATOR + text, add_special=False)


def first_turns(prompts: Sequence[Prompt], n: int, tokenizer: Tokenizer, cut: int) -> list[tuple[int, ...]]:
    """`n` prompts, these one after another and again: what each begins with. Those of a length are of other parts of
    the text each time, as requests that are alike would share what they begin with. Raises UserError."""
    whole = [conversation_of(prompt, tokenizer, cut).turns[0].tokens for prompt in prompts]
    begins, more = _real_text(tokenizer)
    n_before = int(begins[0] == tokenizer.bos)
    found = []
    for number in range(n):
        again, at = divmod(number, len(prompts))
        tokens = whole[at]
        if again and prompts[at].n_tokens:
            start = again * len(tokens) % len(more)
            tokens = (*tokens[:n_before], *(more[start:] + more * (1 + len(tokens) // len(more)))[: len(tokens)])
        found.append(tokens[: len(whole[at])])
    return found


def _continuation(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a text that follows another: without the space that some vocabularies begin every text with."""
    tokens = tokenizer.encode(text, add_special=False, parse_special=True)
    return tuple(tokens[1:] if tokenizer.decode_piece(tokens[0]) == b" " else tokens)


def read_prompts(source: str, n_questions: int, n_turns: int = 0) -> list[Prompt]:
    """A length (`512`), a text file, or the first `n_questions` (0: all) of a `.jsonl` whose objects have `turns`, or a
    `prompt`.

    Of these the first `n_turns` (0: all) are taken. Raises UserError when it is none of these.
    """
    if source.isdecimal():
        if not 0 < int(source) <= 1 << 20:
            raise UserError(f"-p {source}: a prompt has 1 to {1 << 20} tokens")
        return [Prompt(f"pp{source}", n_tokens=int(source))]
    path = Path(source)
    try:
        with path.open(encoding="utf-8") as file:
            text = read_limited(file, f"-p {source}")
    except OSError as error:
        raise UserError(f"-p {source}: {error.strerror}; give a number of tokens, a text file or a .jsonl") from None
    except UnicodeDecodeError as error:
        raise UserError(f"-p {source} is not UTF-8 text (byte {error.start})") from None
    if path.suffix != ".jsonl":
        return [Prompt(path.stem, text)]
    questions = [
        _question(path, number, line, n_turns)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not (n_questions and number > n_questions)
    ]
    if not questions:
        raise UserError(f"-p {source} holds no questions")
    return questions


def _question(path: Path, number: int, line: str, n_turns: int) -> Prompt:
    try:
        found = json.loads(line)
        turns = [found["prompt"]] if "turns" not in found else found["turns"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        turns = None
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
        raise UserError(f"{path}, line {number}: not a JSON object with a list of texts named turns, or a text named "
                        "prompt")  # fmt: skip
    first, *later = turns[: n_turns or None]
    return Prompt(f"{path.stem}/{number}", first, later=tuple(later))
