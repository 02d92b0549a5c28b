"""The chat format of a job, by the template of its options or the model's own: prompts as text, the grammar of forced
calls, the budget of reasoning. Plans and runs nothing."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.options.text_sections import ChatOptions, TextOptions
from pipeinfer.job.process.streams import complain
from pipeinfer.job.requests.request import read_text
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.text.answers import opened_thought, unclosed_thought
from pipeinfer.models.text.chat_template import (
    MIXED,
    PLAIN_STOP,
    PLAIN_TEMPLATE,
    BuiltinTemplate,
    ChatTemplate,
    Rendered,
    TemplateFault,
    answer_text,
    builtin_names,
    encode_rendered,
    template_of,
)
from pipeinfer.models.text.grammar_text import ANSWER
from pipeinfer.models.text.messages import ChatMessage, Messages, orders, without_lost
from pipeinfer.models.text.reasoning import budget_text, check_message, thought_marks
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.models.text.tools import AUTO, Tools, behind_reasoning, calls_grammar, knows_tools, plain_conversation

TemplateInput = tuple[Sequence[ChatMessage], Tools | None, Mapping[str, Any]]  # messages, tools, other variables

PLAIN = (
    "{path} has no chat template: a plain one is used, with 'User:' and 'Assistant:'; --chat-template-file FILE gives "
    "another"
)


@dataclass(frozen=True)
class ChatFormat:
    """`system`: the system's message before all others. `stops`: texts that end an answer. `budget`: tokens of
    reasoning, below 0 without a limit; `budget_message`: forced before its end."""

    template: ChatTemplate
    tokenizer: Tokenizer
    system: str | None
    stops: tuple[str, ...]
    budget: int = -1
    budget_message: str = ""

    @property
    def makes_nothing(self) -> UserError:
        """The error of a chat whose text has no tokens."""
        ways_out = "say something else, or give another with --chat-template-file FILE"
        return UserError(f"{self.template.name} makes no tokens of this; {ways_out}")

    def render(self, messages: Sequence[ChatMessage]) -> Rendered:
        """The text up to the assistant's next answer. Raises UserError as ChatTemplate does."""
        (text,) = self.render_all([(messages, None, {})])
        if isinstance(text, UserError):
            raise text
        if text.is_mixed:
            complain(MIXED)
        return text

    def render_all(self, chats: Sequence[TemplateInput]) -> Sequence[Rendered | UserError]:
        """The text or the error of each chat. Where a template refuses an order of roles, or passes over a system
        message, other orders are tried."""
        messages = [self._with_system(each) for each, *_ in chats]
        if not self.knows_tools:
            messages = [plain_conversation(each, tools) for each, (_, tools, _) in zip(messages, chats, strict=True)]
        variables = [{**more, **({"tools": tools.functions} if tools else {})} for _, tools, more in chats]
        texts = list(self.template.render_all(messages, self.tokenizer, variables))
        tries = [_tries(each, text) for each, text in zip(messages, texts, strict=True)]
        others = [each for group in tries for each in group]
        if not others:
            return texts
        of_others = [more for more, group in zip(variables, tries, strict=True) for _ in group]
        again = iter(self.template.render_all(others, self.tokenizer, of_others))
        groups = [[next(again) for _ in group] for group in tries]
        return [_first_text(group) or text for group, text in zip(groups, texts, strict=True)]

    def continued(self, rendered: Rendered, answer: ChatMessage) -> tuple[Rendered, str]:
        """(a prompt followed by the beginning of its answer, as in llama.cpp, the text that ends the reasoning begun by
        then). Reasoning that the prompt begins is closed before a content."""
        thought = opened_thought(rendered.text)
        begin, end = thought_marks(self.template.source, thought)
        reasoning = str(answer.more.get("reasoning_content", ""))
        parts = [rendered]
        if reasoning and begin:
            parts += [Rendered("" if thought else f"{begin}\n"), self._answer_text(reasoning)]
            thought = end
        if thought and answer.content:
            parts.append(Rendered(f"\n{thought}\n\n"))
            thought = ""
        if answer.content:
            parts.append(self._answer_text(answer.content))
            thought = unclosed_thought(answer.content)
        return reduce(Rendered.followed_by, parts), thought

    def _answer_text(self, text: str) -> Rendered:
        return answer_text(text, self.tokenizer, self.template.parses_messages)

    @cached_property
    def knows_tools(self) -> bool:
        return knows_tools(self.template.source)

    def constraint(self, tools: Tools | None, thought: str) -> str:
        """The grammar of forced calls; empty where none is forced."""
        is_forced = tools is not None and tools.choice != AUTO
        return calls_grammar(tools, self.template.source, self.tokenizer, thought) if tools and is_forced else ""

    def behind_reasoning(self, sampling: SamplingParams, thought: str) -> SamplingParams:
        """With its grammar, if any, for what follows the answer's reasoning. `thought`: as `continued` returns it."""
        if not sampling.grammar:
            return sampling
        grammar = behind_reasoning(sampling.grammar, self.template.source, thought, self.tokenizer)
        return replace(sampling, grammar=grammar)

    def _with_system(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """With the system's message first, unless there is one."""
        if self.system is None or any(each.role == "system" for each in messages):
            return list(messages)
        return [ChatMessage("system", self.system), *messages]

    def limited(
        self, sampling: SamplingParams, prompt: Sequence[int], thought: str, budget: int = -1, message: str = ""
    ) -> SamplingParams:
        """With the budget of an answer's reasoning, if there is one; a grammar of the whole text allows no reasoning.
        `thought`: as `continued` returns it. `budget`, `message`: of the request, if it has its own."""
        n_tokens, message = budget if budget >= 0 else self.budget, message or self.budget_message
        if n_tokens < 0 or (sampling.grammar and not sampling.grammar.startswith(ANSWER)):
            return sampling
        reasoning = budget_text(n_tokens, message, self.template.source, self.tokenizer, prompt, thought)
        return replace(sampling, reasoning=reasoning)

    def first_prompt(self, text: str) -> tuple[list[int], str]:
        """(a first message's tokens, the text that ends the reasoning which they begin). Raises UserError."""
        rendered = self.render([ChatMessage("user", text)])
        return encode_rendered(self.tokenizer, rendered), opened_thought(rendered.text)


def _tries(messages: Messages, result: Rendered | TemplateFault) -> Sequence[Messages]:
    if isinstance(result, Rendered):
        return without_lost(messages, result.text)
    return [] if result.is_broken else orders(messages)


def _first_text(results: Sequence[Rendered | TemplateFault]) -> Rendered | None:
    return next((each for each in results if isinstance(each, Rendered)), None)


def open_format(
    text: TextOptions, info: ModelInfo, tokenizer: Tokenizer, say: Callable[[str], object] = complain
) -> ChatFormat | None:
    """The format; None where the text is no chat. `say`: called if the model has no template. Raises UserError for
    unreadable files and wrong variables. The model's own template is not checked."""
    chat = text.chat
    if chat is None:
        return None
    system, variables = chat.system, _variables(chat)
    if chat.system_file is not None:
        system = read_text("--system-prompt-file", chat.system_file).removesuffix("\n")
    name, source, stops = f"the chat template of {info.path}", template_of(info.metadata), text.stops
    if chat.template_file is not None and text.template is not None:
        raise UserError("--chat-template and --chat-template-file both give the chat template; give one of them")
    is_builtin = text.template in builtin_names() if text.template is not None else False
    if text.template is not None:
        name, source = f"--chat-template {text.template[:40]}", text.template
        if not is_builtin and "{" not in source:
            names = f"there are {', '.join(builtin_names())}"
            raise UserError(f"--chat-template {source[:40]} is no built-in template, nor one in Jinja; {names}")
    elif chat.template_file is not None:
        name = f"--chat-template-file {chat.template_file}"
        source = read_text("--chat-template-file", chat.template_file)
    elif source is None:
        say(PLAIN.format(path=info.path))
        source, stops = PLAIN_TEMPLATE, (*stops, PLAIN_STOP)
    kind = BuiltinTemplate if is_builtin else ChatTemplate
    template = kind(source, name, variables, text.special_in_messages, now_s=text.now_s or time.time())
    if chat.template_file is not None or text.template is not None:
        template.check()
    check_message(text.reasoning_message or "")
    if text.reasoning_budget >= 0 and not thought_marks(source)[1]:
        say(f"--reasoning-budget {text.reasoning_budget} has no effect: {name} has no marks of reasoning")
    return ChatFormat(template, tokenizer, system, stops, text.reasoning_budget, text.reasoning_message or "")


def contents_of(chat: ChatOptions | None, format: Callable[[], ChatFormat]) -> tuple[ChatOptions | None, str | None]:
    """The options with the contents of their files in place of the paths, as answers depend on these: the system
    message in them, and the template, None without its file. `format`: asked for where there are files."""
    if not chat or not (chat.system_file or chat.template_file):
        return chat, None
    source = format().template.source if chat.template_file else None
    return replace(chat, system=format().system, system_file=None, template_file=None), source


def _variables(chat: ChatOptions) -> dict[str, Any]:
    if chat.variables is None:
        return {}
    try:
        variables = json.loads(chat.variables)
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        raise UserError(f'--chat-template-kwargs {chat.variables[:80]!r} is not a JSON object; write {{"name": value}}')
    if "messages" in variables:
        raise UserError("--chat-template-kwargs has messages, which are what is said; give other names")
    return variables
