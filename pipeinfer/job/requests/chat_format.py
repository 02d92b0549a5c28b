"""How this job talks to its model: the template that was asked for, or the model's own, and what ends an answer.
Loads nothing and runs nothing."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.job.options.options import ChatOptions, RunOptions
from pipeinfer.job.process.complain import complain
from pipeinfer.job.requests.request import read_text
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.text.chat import PLAIN_STOP, PLAIN_TEMPLATE, ChatTemplate, Message, encode_rendered
from pipeinfer.models.text.chat_template import template_of
from pipeinfer.models.text.tokenizer import Tokenizer

PLAIN = (
    "{path} has no chat template: a plain one is used, with 'User:' and 'Assistant:'; --chat-template-file FILE gives "
    "another"
)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """`system`: what is said before all else. `stops`: texts that end an answer."""

    template: ChatTemplate
    tokenizer: Tokenizer
    system: str | None
    stops: tuple[str, ...]

    def render(self, messages: Sequence[Message]) -> str:
        """The text up to the next answer of the assistant. Raises UserError as ChatTemplate does."""
        return self.template.render(self._with_system(messages), self.tokenizer)

    def render_all(self, conversations: Sequence[Sequence[Message]]) -> Sequence[str | UserError]:
        """The same of several conversations; of each its text, or what is wrong with it."""
        return self.template.render_all([self._with_system(each) for each in conversations], self.tokenizer)

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        """The system speaks first, unless it does already."""
        speaks = self.system is not None and not any(each.role == "system" for each in messages)
        return [*([Message("system", self.system or "")] if speaks else []), *messages]

    def first_prompt(self, text: str) -> list[int]:
        """The tokens that ask for an answer to what a user says first. Raises UserError."""
        return encode_rendered(self.tokenizer, self.render([Message("user", text)]))


def open_format(
    options: RunOptions, info: ModelInfo, tokenizer: Tokenizer, say: Callable[[str], object] = complain
) -> ChatFormat | None:
    """None where no chat was asked for. Says so where the model has no template. Raises UserError for files that cannot
    be read or are no template, and for variables that are no JSON object. The model's own template is not looked at."""
    chat = options.chat
    if chat is None:
        return None
    system = chat.system
    if chat.system_file is not None:
        system = read_text("--system-prompt-file", chat.system_file).removesuffix("\n")
    source, variables = template_of(info.metadata), _variables(chat)
    name, stops = f"the chat template of {info.path}", options.stops
    if chat.template_file is not None:
        name = f"--chat-template-file {chat.template_file}"
        source = read_text("--chat-template-file", chat.template_file)
    elif source is None:
        say(PLAIN.format(path=info.path))
        source, stops = PLAIN_TEMPLATE, (*stops, PLAIN_STOP)
    template = ChatTemplate(source, name, variables)
    if chat.template_file is not None:
        template.check()
    return ChatFormat(template, tokenizer, system, stops)


def _variables(chat: ChatOptions) -> dict[str, Any]:
    if chat.variables is None:
        return {}
    try:
        found = json.loads(chat.variables)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f'--chat-template-kwargs {chat.variables[:80]!r} is no JSON object; write {{"name": value}}')
    if "messages" in found:
        raise UserError("--chat-template-kwargs has messages, which are what is said; give other names")
    return found
