"""Choices of real models: a JSON-lines file, a text a line. Knows no model, no policy and no time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from pipeinfer.core.runs import Guess
from pipeinfer.errors import UserError
from pipeinfer.outputs import write_file
from pipeinfer.virtual.choices import Branch


@dataclass(frozen=True)
class RecordedChoices:
    """A target's text after a prompt of `n_prompt` tokens, and the guesses of a draft, (token, probability), likeliest
    first: `known[i]` before the text's token i, the last one after its end.

    A wrong branch gets the guesses of some right context: no token of them is accepted, only their distribution counts.
    """

    name: str
    n_prompt: int
    tokens: Sequence[int]
    known: Sequence[Sequence[tuple[int, float]]]

    @cached_property
    def prompt(self) -> Sequence[int]:
        """As many random tokens, since the prompt's own are not recorded."""
        return np.random.default_rng([self.n_prompt, *self.tokens]).integers(0, 1 << 15, self.n_prompt).tolist()

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + len(self.tokens)

    @property
    def acceptance(self) -> float:
        """The share of tokens for which the draft's best guess is right."""
        return sum(self.hits) / len(self.tokens)

    @cached_property
    def hits(self) -> list[bool]:
        """For each token whether it is the draft's best guess."""
        return [found[0][0] == token for found, token in zip(self.known, self.tokens, strict=False)]

    def target(self, position: int) -> int:
        index = position - self.n_prompt
        if index >= len(self.tokens):
            return 0  # beyond the end of the text
        return self.tokens[index] if index >= 0 else self.prompt[position]

    def guesses(self, start: int, branch: Branch, width: int, age: int = 0) -> list[Guess]:
        index = start - self.n_prompt + 1
        if branch:
            index = hash((start, branch)) % max(1, len(self.tokens))
        found = self.known[index] if 0 <= index < len(self.known) else self.known[0]
        return [Guess(token, probability) for token, probability in found[:width]]


def write_choices(path: Path, texts: Iterable[RecordedChoices]) -> None:
    """Raises UserError when the file cannot be written."""
    lines = (json.dumps(asdict(text), separators=(",", ":")) + "\n" for text in texts)
    write_file(path, "choices", "".join(lines).encode())


def read_choices(path: Path) -> list[RecordedChoices]:
    """Raises UserError for a file that cannot be read or holds no recorded texts."""
    try:
        found = [RecordedChoices(**json.loads(line)) for line in path.read_text().splitlines()]
        if found and all(text.tokens and len(text.known) == len(text.tokens) + 1 and all(text.known) for text in found):
            return found
    except OSError as error:
        raise UserError(f"--choices {path}: {error.strerror}; name a file that can be read") from None
    except (ValueError, TypeError):
        pass
    raise UserError(f"--choices {path} holds no recorded texts, a JSON object a line; experiments/record.py makes them")
