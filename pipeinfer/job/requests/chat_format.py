"""How this job talks to its model: the template that was asked for, or the model's own, and what ends an answer.
Loads nothing and runs nothing."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.job.options.options import ChatOptions, RunOptions
from pipeinfer.job.process.complain import complain
from pipeinfer.job.requests.request import read_text
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.text.answer_forms import THOUGHTS
from pipeinfer.models.text.answers import begun_thought, opened_thought
from pipeinfer.models.text.chat import PLAIN_STOP, PLAIN_TEMPLATE, ChatTemplate, Message, TemplateFault, encode_rendered
from pipeinfer.models.text.chat_template import template_of
from pipeinfer.models.text.literals import MIXED, Rendered, answer_text
from pipeinfer.models.text.roles import orders
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.models.text.tools import AUTO, Tools, calls_grammar, knows_tools, told_plainly

Chat = tuple[Sequence[Message], Tools | None, Mapping[str, Any]]
"""Messages, tools, further variables of the template."""

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

    def render(self, messages: Sequence[Message]) -> Rendered:
        """The text up to the next answer of the assistant. Raises UserError as ChatTemplate does."""
        (found,) = self.render_all([(messages, None, {})])
        if isinstance(found, UserError):
            raise found
        if found.is_mixed:
            complain(MIXED)
        return found

    def render_all(self, chats: Sequence[Chat]) -> Sequence[Rendered | UserError]:
        """The same of several. Of each its text, or what is wrong. Where a template refuses an order of roles, messages
        of the system in mid conversation above all, it gets the messages in an order that it may take."""
        said = [self._with_system(messages) for messages, *_ in chats]
        if not self.knows_tools:
            said = [told_plainly(messages, tools) for messages, (_, tools, _) in zip(said, chats, strict=True)]
        variables = [{**more, **({"tools": tools.functions} if tools else {})} for _, tools, more in chats]
        found = list(self.template.render_all(said, self.tokenizer, variables))
        for at, fault in enumerate(found):
            if isinstance(fault, TemplateFault) and not fault.is_broken and (tries := orders(said[at])):
                again = self.template.render_all(tries, self.tokenizer, [variables[at]] * len(tries))
                found[at] = next((each for each in again if isinstance(each, Rendered)), fault)
        return found

    def continued(self, rendered: Rendered, answer: Message) -> tuple[Rendered, str]:
        """A prompt with what an assistant's message has of its answer, as llama.cpp continues it, and what ends the
        reasoning that this has begun. Reasoning that the prompt begins is closed before a content."""
        source, thought = self.template.source, opened_thought(rendered.text)
        begin = next((each for each, end in THOUGHTS.items() if each in source and end == (thought or end)), "")
        reasoning = str(answer.more.get("reasoning_content", ""))
        parts = [rendered]
        if reasoning and begin:
            parts += [Rendered("" if thought else f"{begin}\n"), self._answer_text(reasoning)]
            thought = THOUGHTS[begin]
        if thought and answer.content:
            parts.append(Rendered(f"\n{thought}\n\n"))
            thought = ""
        if answer.content:
            parts.append(self._answer_text(answer.content))
            thought = begun_thought(answer.content)
        return reduce(Rendered.followed_by, parts), thought

    def _answer_text(self, text: str) -> Rendered:
        return answer_text(text, self.tokenizer, self.template.parses_messages)

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
    template = ChatTemplate(source, name, variables, options.special_in_messages)
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
