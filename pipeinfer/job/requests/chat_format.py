"""How this job talks to its model: the template that was asked for, or the model's own, and what ends an answer.
Loads nothing and runs nothing."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.job.options.options import ChatOptions, RunOptions
from pipeinfer.job.process.complain import complain
from pipeinfer.job.requests.request import read_text
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.text.chat import PLAIN_STOP, PLAIN_TEMPLATE, ChatTemplate, Message, encode_rendered
from pipeinfer.models.text.chat_template import template_of
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.models.text.tools import AUTO, Tools, calls_grammar, knows_tools, told_plainly

PLAIN = (
    "{path} has no chat template: a plain one is used, with 'User:' and 'Assistant:'; --chat-template-file FILE gives "
    "another"
)


@dataclass(frozen=True)
class ChatFormat:
    """`system`: what is said before all else. `stops`: texts that end an answer."""

    template: ChatTemplate
    tokenizer: Tokenizer
    system: str | None
    stops: tuple[str, ...]

    @property
    def makes_nothing(self) -> UserError:
        """Of a chat whose text has no tokens."""
        return UserError(f"{self.template.name} makes no tokens of this; say something else, or give another with "
                         "--chat-template-file FILE")  # fmt: skip

    def render(self, messages: Sequence[Message]) -> str:
        """The text up to the next answer of the assistant. Raises UserError as ChatTemplate does."""
        return self.template.render(self._with_system(messages), self.tokenizer)

    def render_all(
        self, chats: Sequence[tuple[Sequence[Message], Tools | None, Mapping[str, Any]]]
    ) -> Sequence[str | UserError]:
        """The same of several: messages, tools, variables of the template. Of each its text, or what is wrong."""
        said = [self._with_system(messages) for messages, *_ in chats]
        if not self.knows_tools:
            said = [told_plainly(messages, tools) for messages, (_, tools, _) in zip(said, chats, strict=True)]
        variables = [{**more, **({"tools": tools.functions} if tools else {})} for _, tools, more in chats]
        return self.template.render_all(said, self.tokenizer, variables)

    @cached_property
    def knows_tools(self) -> bool:
        return knows_tools(self.template.source)

    def constraint(self, tools: Tools | None, thought: str) -> str:
        """The grammar of calls that must be made; empty where none must."""
        must = tools is not None and tools.choice != AUTO
        return calls_grammar(tools, self.template.source, self.tokenizer, thought) if tools and must else ""

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
        raise UserError(f'--chat-template-kwargs {chat.variables[:80]!r} is not a JSON object; write {{"name": value}}')
    if "messages" in found:
        raise UserError("--chat-template-kwargs has messages, which are what is said; give other names")
    return found
