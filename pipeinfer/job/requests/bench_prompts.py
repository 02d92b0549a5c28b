"""Prompts of benchmarks: texts and question sets, as tokens turn by turn. Runs nothing."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.job.process.streams import read_limited
from pipeinfer.job.requests.request import BYTE_ORDER_MARK
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.columns import digest

TEXTS = tuple(Path(__file__).parent / "prompts" / f"{name}.txt" for name in ("program", "tale", "excerpt"))
"""What `bench` and experiments.sh continue unless they are given others."""

SEPARATOR = "\n\n"  # before each later turn; there is no chat template, as speed is measured


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A text, or `n_tokens` of text, as in `pp512`. `later`: the user's further turns, after each answer."""

    name: str
    text: str = ""
    n_tokens: int = 0
    later: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchTurn:
    """A user's turn in a conversation. `name`: in its rows."""

    name: str
    tokens: tuple[int, ...]
    digest: str = ""  # of all turns up to this one
    measured: bool = False  # an earlier sweep has measured it: only its answer may be needed, for a later turn


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, each of which follows the answers before it. `cut`: tokens of a prompt at most, 0: any number."""

    turns: tuple[BenchTurn, ...]
    cut: int
    n_keep: int  # first tokens that a cut keeps: the beginning-of-text token

    def prompt(self, history: Sequence[int], turn: BenchTurn) -> tuple[int, ...]:
        """The prompt of a turn after `history`, its newest tokens if it must be cut."""
        tokens = (*history, *turn.tokens)
        if not self.cut or len(tokens) <= self.cut:
            return tokens
        n_newest = max(0, self.cut - self.n_keep)
        return tokens[: self.cut - n_newest] + tokens[len(tokens) - n_newest :]

    def lengths(self, n_predict: int) -> list[int]:
        """Tokens of each turn's prompt, if answers have `n_predict` tokens."""
        lengths: list[int] = []
        for turn in self.turns:
            n_history = lengths[-1] + n_predict if lengths else 0
            lengths.append(min(n_history + len(turn.tokens), self.cut or sys.maxsize))
        return lengths


def conversation_of(prompt: BenchPrompt, tokenizer: Tokenizer, cut: int) -> Conversation:
    """A prompt in tokens, the first `cut` of its first turn at most. Raises UserError for an empty one."""
    if prompt.n_tokens:
        return Conversation((_turn(prompt.name, _of_length(prompt.n_tokens, tokenizer)),), cut=0, n_keep=0)
    tokens = tokenizer.encode(prompt.text, parse_special=True)
    if not tokens:
        raise UserError(f"the prompt {prompt.name} is empty; give some text")
    first = _turn(prompt.name, tokens[:cut] if cut else tokens)
    turns = [first]
    # appended as tokens, not as text: answers stay as the model wrote them, and their lengths are known
    for number, text in enumerate(prompt.later, start=2):
        turns.append(_turn(f"{prompt.name}.{number}", _continuation(f"{SEPARATOR}{text}", tokenizer), turns[-1].digest))
    return Conversation(tuple(turns), cut, n_keep=int(tokens[0] == tokenizer.bos))


def _turn(name: str, tokens: Sequence[int], before: str = "") -> BenchTurn:
    """`before`: the digest of the turn before it."""
    return BenchTurn(name, tuple(tokens), digest((*([before] if before else []), *tokens)))


def _of_length(n_tokens: int, tokenizer: Tokenizer) -> list[int]:
    """The first `n_tokens` of real text, repeated as needed: speed depends on the words too."""
    tokens, more = _real_text(tokenizer)
    return (tokens + more * (n_tokens // len(more)))[:n_tokens]


def _real_text(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(the tokens of TEXTS, those of TEXTS once more after them)."""
    text = SEPARATOR.join(path.read_text(encoding="utf-8") for path in TEXTS)
    return tokenizer.encode(text), tokenizer.encode(SEPARATOR + text, add_special=False)


def first_turns(prompts: Sequence[BenchPrompt], n: int, tokenizer: Tokenizer, cut: int) -> list[tuple[int, ...]]:
    """`n` first turns, of `prompts` in a cycle. When a prompt of `n_tokens` comes again it is of another part of the
    text, as equal requests would share their prefixes. Raises UserError."""
    whole = [conversation_of(prompt, tokenizer, cut).turns[0].tokens for prompt in prompts]
    begins, more = _real_text(tokenizer)
    n_before = int(begins[0] == tokenizer.bos)
    turns = []
    for number in range(n):
        again, at = divmod(number, len(prompts))
        tokens = whole[at]
        if again and prompts[at].n_tokens:
            start = again * len(tokens) % len(more)
            tokens = (*tokens[:n_before], *(more[start:] + more * (1 + len(tokens) // len(more)))[: len(tokens)])
        turns.append(tokens[: len(whole[at])])
    return turns


def _continuation(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a text that follows another, without the space with which some vocabularies begin a text."""
    tokens = tokenizer.encode(text, add_special=False, parse_special=True)
    return tuple(tokens[1:] if tokenizer.decode_piece(tokens[0]) == b" " else tokens)


def read_prompts(source: str, n_questions: int, n_turns: int = 0, cut: int = 0) -> list[BenchPrompt]:
    """`source`: lengths (`512,1024`) of up to `cut` (0: any), a text file, or a `.jsonl` whose objects have `turns` or
    a `prompt`: the first `n_questions` of them with their first `n_turns` (0: all) are read. Raises UserError for
    anything else."""
    if all(part.isdecimal() for part in source.split(",")):
        lengths = [int(part) for part in source.split(",")]
        if not all(0 < length <= 1 << 20 for length in lengths):
            raise UserError(f"-p {source}: a prompt has 1 to {1 << 20} tokens")
        lengths = [min(length, cut or length) for length in lengths]
        return [BenchPrompt(f"pp{length}", n_tokens=length) for length in lengths]
    path = Path(source)
    try:
        with path.open(encoding="utf-8") as file:
            text = read_limited(file, f"-p {source}").removeprefix(BYTE_ORDER_MARK)
    except OSError as error:
        forms = "give numbers of tokens, a text file or a .jsonl; of several files each its own -p"
        raise UserError(f"-p {source}: {error.strerror}; {forms}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"-p {source} is not UTF-8 text (byte {error.start})") from None
    if path.suffix != ".jsonl":
        return [BenchPrompt(path.stem, text)]
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    questions = [_question(path, number, line, n_turns) for number, line in lines[: n_questions or None]]
    if not questions:
        raise UserError(f"-p {source} holds no questions")
    return questions


def _question(path: Path, number: int, line: str, n_turns: int) -> BenchPrompt:
    try:
        question = json.loads(line)
        turns = [question["prompt"]] if "turns" not in question else question["turns"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        turns = None
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
        form = "a JSON object with a list of texts named turns, or a text named prompt"
        raise UserError(f"{path}, line {number}: not {form}")
    first, *later = turns[: n_turns or None]
    return BenchPrompt(f"{path.stem}/{number}", first, later=tuple(later))
