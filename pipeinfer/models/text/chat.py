"""Render messages by a chat template to text and tokens. Names of control tokens in messages are text.

Knows no MPI and runs no model.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeinfer.errors import UserError
from pipeinfer.models.text.limited_process import LimitedProcess
from pipeinfer.models.text.literals import Mask, Rendered, masks_of
from pipeinfer.models.text.tokenizer import Tokenizer

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}{% elif message.role == 'user' %}User: {{ message.content }}"
    "{% else %}Assistant:{{ message.content }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For a model without a template."""

PLAIN_STOP = "\nUser:"
"""Where a model without turns begins to write the user's message."""


class TemplateFault(UserError):
    """A template does not render. `what`: the error, without the file's name. `is_broken`: it fails with any
    messages."""

    def __init__(self, name: str, what: str, is_broken: bool) -> None:
        super().__init__(f"{name} {what}; give another with --chat-template-file FILE")
        self.what, self.is_broken = what, is_broken


@dataclass(frozen=True, slots=True)
class Message:
    """`more`: further fields for the template, such as tool_calls; a content in it replaces the text."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatTemplate:
    """`source`: in Jinja. `name`: where it is from, for errors. `variables`: further ones for the template.

    The template always sees the same time, so that earlier turns of a conversation render the same.
    """

    source: str
    name: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    parses_messages: bool = False
    """Names of control tokens in messages are these tokens, as in llama.cpp."""
    n_characters: int = 1 << 26
    """The largest rendered text."""
    now_s: float = field(default_factory=time.time)
    process: LimitedProcess = field(default=LimitedProcess("pipeinfer.models.text.template_child"), compare=False)

    def check(self) -> None:
        """Raises TemplateFault when the template cannot be parsed."""
        found = self._ask([])
        if "answers" not in found:
            raise self._fault(found)

    def render(self, messages: Sequence[Message], tokenizer: Tokenizer) -> Rendered:
        """The text up to the assistant's next answer. Raises TemplateFault when the template fails, exceeds the limits
        or refuses the messages."""
        (found,) = self.render_all([messages], tokenizer)
        if isinstance(found, TemplateFault):
            raise found
        return found

    def render_all(
        self,
        conversations: Sequence[Sequence[Message]],
        tokenizer: Tokenizer,
        variables: Sequence[Mapping[str, Any]] = (),
    ) -> Sequence[Rendered | TemplateFault]:
        """The text, or the fault, of each of several conversations, in about the time of one. `variables`: further
        ones of each, if there are some."""
        common = {
            "add_generation_prompt": True,
            "bos_token": _text_of(tokenizer, tokenizer.bos),
            "eos_token": _text_of(tokenizer, tokenizer.eos),
            "tools": None,
            "documents": None,
            **self.variables,
        }
        said = [
            [{"role": each.role, "content": each.content, **each.more} for each in messages]
            for messages in conversations
        ]
        own = variables or [{}] * len(said)
        masks = [masks_of(messages, more, tokenizer, self.parses_messages)
                 for messages, more in zip(said, own, strict=True)]  # fmt: skip
        contexts = [_contexts(common, {**more, "messages": messages}, masks)
                    for messages, more, masks in zip(said, own, masks, strict=True)]  # fmt: skip
        answers = iter(self._answers([context for group in contexts for context in group]))
        return [
            self._rendered([next(answers) for _ in group], masks) for group, masks in zip(contexts, masks, strict=True)
        ]

    def _rendered(self, answers: Sequence[Mapping[str, Any]], masks: Sequence[Mask]) -> Rendered | TemplateFault:
        """`answers`: of the conversation as it is, then with each of the masks."""
        if not answers:
            return TemplateFault(self.name, "gets messages or variables that are nested too deeply", False)
        plain, *hidden = answers
        if "text" not in plain:
            return self._fault(plain)
        text = str(plain["text"])
        for answer, mask in zip(hidden, masks, strict=True):
            if "text" in answer and (found := mask.reveal(str(answer["text"]))).text == text:
                return found
        return Rendered(text, is_mixed=bool(masks))

    def _fault(self, answer: Mapping[str, Any]) -> TemplateFault:
        said = str(answer.get("broken") or answer.get("error", "says nothing"))
        return TemplateFault(self.name, " ".join(said.split())[:300], "broken" in answer)

    def _answers(self, contexts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One for each context. If all together exceed the limits, each is rendered by itself."""
        found = self._ask(contexts)
        if "answers" in found:
            return list(found["answers"])
        if "broken" in found or len(contexts) == 1:
            return [found] * len(contexts)
        return [answer for each in contexts for answer in self._answers([each])]

    def _ask(self, contexts: list[dict[str, Any]]) -> dict[str, Any]:
        return self.process.ask({
            "source": self.source, "contexts": contexts, "now_s": self.now_s, "n_characters": self.n_characters,
        })  # fmt: skip


def _contexts(common: dict[str, Any], given: dict[str, Any], masks: Sequence[Mask]) -> list[dict[str, Any]]:
    """What is given as it is, and with each mask; none where it is nested too deeply."""
    try:
        return [{**common, **each} for each in (given, *(mask.hide(given) for mask in masks))]
    except RecursionError:
        return []


def encode_rendered(tokenizer: Tokenizer, rendered: Rendered) -> list[int]:
    """Tokens of a rendered text; the template's markers are tokens. It begins with one bos, if the model adds one."""
    tokens = _encode(tokenizer, rendered)
    if tokenizer.adds_bos and tokens[:1] != [tokenizer.bos]:
        tokens.insert(0, tokenizer.bos)
    return tokens


def encode_continuation(tokenizer: Tokenizer, rendered: Rendered) -> list[int] | None:
    """Tokens of a text that continues another; None if the vocabulary adds a space to it."""
    tokens, text = _encode(tokenizer, rendered), rendered.text
    shown = b"".join(tokenizer.decode_piece(token, special=True) for token in tokens)
    if len(shown) - len(shown.lstrip(b" ")) == len(text) - len(text.lstrip(" ")):
        return tokens
    # some vocabularies add a space before every text
    return tokens[1:] if tokenizer.decode_piece(tokens[0]) == b" " else None


def _encode(tokenizer: Tokenizer, rendered: Rendered) -> list[int]:
    if rendered.literals:
        return tokenizer.encode_with_literals(rendered.text, rendered.literals)
    return tokenizer.encode(rendered.text, add_special=False, parse_special=True)


def _text_of(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.text_of(token).decode("utf-8", "replace") if token >= 0 else ""
