"""Messages -> the text and the tokens that a model continues, by its chat template. Knows no MPI and runs no model."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeinfer.errors import UserError
from pipeinfer.models.tokenizer import Tokenizer

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}{% elif message.role == 'user' %}User: {{ message.content }}"
    "{% else %}Assistant:{{ message.content }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For a model without one."""

PLAIN_STOP = "\nUser:"
"""Where a model that knows no turns begins to speak for the user."""

N_TRIES = 2
"""Of a rendering whose process was killed by somebody else."""

START = (
    "import sys; sys.path = sys.argv[4:]; "
    "from pipeinfer.models.template_child import main; main(*map(int, sys.argv[1:4]))"
)


class TemplateFault(UserError):
    """A template does not render: `what` is wrong, without the name of its file. `is_broken`: whatever it is given."""

    def __init__(self, name: str, what: str, is_broken: bool) -> None:
        super().__init__(f"{name} {what}; give another with --chat-template-file FILE")
        self.what, self.is_broken = what, is_broken


@dataclass(frozen=True, slots=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What rendering a template may take: seconds of a core, seconds, bytes, and characters of what comes out."""

    cpu_s: int = 5
    wall_s: float = 30.0
    n_bytes: int = 512 << 20
    n_characters: int = 1 << 26


@dataclass(frozen=True)
class ChatTemplate:
    """`source`: in Jinja. `name`: where it comes from, for errors. `variables`: further ones that it may look at.

    What it asks for the time is always told the same, so that what it says of a conversation stays as it was.
    """

    source: str
    name: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = Limits()
    now_s: float = field(default_factory=time.time)
    ahead: list[subprocess.Popen[bytes]] = field(default_factory=list, compare=False, repr=False)

    def start_ahead(self) -> None:
        """Start the process of the next rendering now: that takes longer than most templates do."""
        if not self.ahead:
            with contextlib.suppress(OSError):  # who renders will say so
                self.ahead.append(self._start())

    def check(self) -> None:
        """Raises TemplateFault when the template cannot be parsed, and so could render nothing."""
        found = self._ask({"source": self.source, "contexts": [], "now_s": self.now_s})
        if "answers" not in found:
            raise self._fault(found)

    def render(self, messages: Sequence[Message], tokenizer: Tokenizer) -> str:
        """The text up to where the assistant's next answer begins. Raises TemplateFault when the template fails, takes
        more than the limits, or refuses the messages."""
        (found,) = self.render_all([messages], tokenizer)
        if isinstance(found, TemplateFault):
            raise found
        return found

    def render_all(
        self, conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer
    ) -> Sequence[str | TemplateFault]:
        """The same of several conversations, for little more than one; of each its text, or what is wrong with it."""
        common = {
            "add_generation_prompt": True,
            "bos_token": _text_of(tokenizer, tokenizer.bos),
            "eos_token": _text_of(tokenizer, tokenizer.eos),
            "tools": None,
            "documents": None,
            **self.variables,
        }
        said = [[{"role": each.role, "content": each.content} for each in messages] for messages in conversations]
        answers = self._answers([{"messages": messages, **common} for messages in said])
        return [str(answer["text"]) if "text" in answer else self._fault(answer) for answer in answers]

    def _fault(self, answer: Mapping[str, Any]) -> TemplateFault:
        said = str(answer.get("broken") or answer.get("error", "says nothing"))
        return TemplateFault(self.name, " ".join(said.split())[:300], "broken" in answer)

    def _answers(self, contexts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One for each. What is too much for all of them may be so for one alone, or for none."""
        found = self._ask({"source": self.source, "contexts": contexts, "now_s": self.now_s})
        if "answers" in found:
            return list(found["answers"])
        if "broken" in found or len(contexts) == 1:
            return [found] * len(contexts)
        return [answer for each in contexts for answer in self._answers([each])]

    def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The answers of the process that renders, or why there are none; it is killed when its time is over."""
        limits = self.limits
        for _ in range(N_TRIES):
            start_s = time.monotonic()
            try:
                with self.ahead.pop() if self.ahead else self._start() as process:
                    try:
                        said = process.communicate(json.dumps(asked).encode(), limits.wall_s)[0]
                    finally:
                        process.kill()
                found = json.loads(said)
            except subprocess.TimeoutExpired:
                return {"error": f"is not rendered after {limits.wall_s:g} s"}
            except OSError as error:
                return {"error": f"cannot be rendered: {error.strerror}"}
            except ValueError:
                # at its limit of time the system kills it too, but no sooner
                if process.returncode == -signal.SIGKILL and time.monotonic() - start_s < limits.cpu_s:
                    continue
                # or it could not even say that there is no memory left
                return {"error": f"takes more than {limits.cpu_s} s or {limits.n_bytes >> 20} MiB"}
            return found if isinstance(found, dict) else {}
        return {"broken": f"is not rendered: its process was killed, {N_TRIES} times; the host may be short of memory"}

    def _start(self) -> subprocess.Popen[bytes]:
        limits = self.limits
        # what this process can import, that one can, and no more
        paths = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        words = [*map(str, (limits.cpu_s, limits.n_bytes, limits.n_characters)), *paths]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a rendered text: its markers are tokens. One that begins texts of this model is there once."""
    tokens = tokenizer.encode(text, add_special=False, parse_special=True)
    if tokenizer.adds_bos and tokens[:1] != [tokenizer.bos]:
        tokens.insert(0, tokenizer.bos)
    return tokens


def encode_continuation(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Tokens of what follows other text; None where the vocabulary cannot tell it from a text that begins."""
    tokens = tokenizer.encode(text, add_special=False, parse_special=True)
    shown = b"".join(tokenizer.decode_piece(token, special=True) for token in tokens)
    if len(shown) - len(shown.lstrip(b" ")) == len(text) - len(text.lstrip(" ")):
        return tokens
    # some vocabularies begin every text with a space
    return tokens[1:] if tokenizer.decode_piece(tokens[0]) == b" " else None


def _text_of(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.text_of(token).decode("utf-8", "replace") if token >= 0 else ""
