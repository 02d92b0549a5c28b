"""Chat templates: find them in a model file, render messages to text and tokens. Names of control tokens in messages
are text, hidden while a template renders. Runs no model."""

import ctypes
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pipeinfer.child import LimitedProcess
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.header import Value, value_of
from pipeinfer.models.llama.ggml import load_library
from pipeinfer.models.text.answer_forms import MARKS
from pipeinfer.models.text.messages import Messages, fields_of
from pipeinfer.models.text.tokenizer import Span, Tokenizer
from pipeinfer.text import printable

MIXED = (
    "a message has the name of a control token, and the chat template changes messages, so that the name is this token "
    "as in llama.cpp; --special-in-messages makes that the rule"
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered text. `literals`: where names of control tokens are text of a message, in order. `is_mixed`: messages
    have such names, and the template changes them, so that they are tokens like the template's own."""

    text: str
    literals: tuple[Span, ...] = ()
    is_mixed: bool = False

    def since(self, at: int) -> "Rendered":
        """The text behind the first `at` characters."""
        return Rendered(self.text[at:], tuple((first - at, last - at) for first, last in self.literals if first >= at))

    def followed_by(self, other: "Rendered") -> "Rendered":
        n = len(self.text)
        literals = (*self.literals, *((first + n, last + n) for first, last in other.literals))
        return Rendered(self.text + other.text, literals, self.is_mixed)


@dataclass(frozen=True, slots=True)
class Mask:
    """Replaces names of control tokens by signs that no client can guess, and restores them. `names`: matches the
    names. `skips_answers`: messages of the assistant are not changed."""

    names: re.Pattern[str]
    skips_answers: bool = False
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def hide(self, value: Any) -> Any:
        """The value with names replaced in its texts; in an assistant's message marks of answers are kept."""
        if isinstance(value, str):
            return self.names.sub(self._sign, value)
        if isinstance(value, (list, tuple)):
            return [self.hide(each) for each in value]
        if not isinstance(value, Mapping):
            return value
        if value.get("role") == "assistant":
            return value if self.skips_answers else {key: self._hide_answer(each) for key, each in value.items()}
        return {self.hide(key): self.hide(each) for key, each in value.items()}

    def _hide_answer(self, value: Any) -> Any:
        if not isinstance(value, str):
            return self.hide(value)
        return self.names.sub(lambda match: match[0] if match[0] in MARKS else self._sign(match), value)

    def _sign(self, match: re.Match[str]) -> str:
        return f"\ufdd0{self.nonce}{match[0].encode().hex()}\ufdd1"

    def reveal(self, text: str) -> Rendered:
        """The text with its names restored, and their places."""
        pieces, literals, n, at = list[str](), list[Span](), 0, 0
        for match in re.finditer(f"\ufdd0{self.nonce}([0-9a-f]+)\ufdd1", text):
            name = bytes.fromhex(match[1]).decode()
            pieces += [text[at : match.start()], name]
            n += match.start() - at
            literals.append((n, n + len(name)))
            n, at = n + len(name), match.end()
        return Rendered("".join(pieces) + text[at:], tuple(literals))


def masks_of(messages: Any, variables: Any, tokenizer: Tokenizer, parses: bool = False) -> list[Mask]:
    """The masks to try, in order; none if no message has a control token's name, or such are tokens (`parses`)."""
    names = tokenizer.control_names
    if parses or names is None or not (_has(messages, names) or _has(variables, names)):
        return []
    return [Mask(names), Mask(names, skips_answers=True)]


def answer_text(text: str, tokenizer: Tokenizer, parses: bool = False) -> Rendered:
    """The beginning of an assistant's message, which the model continues."""
    if parses or tokenizer.control_names is None:
        return Rendered(text)
    mask = Mask(tokenizer.control_names)
    return mask.reveal(mask.hide({"role": "assistant", "content": text})["content"])


def _has(value: Any, names: re.Pattern[str]) -> bool:
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, str) and names.search(part):
            return True
        if isinstance(part, Mapping):
            stack += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple)):
            stack += part
    return False


KEY = "tokenizer.chat_template"

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}{% elif message.role == 'user' %}User: {{ message.content }}"
    "{% else %}Assistant:{{ message.content }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For a model without a template."""

PLAIN_STOP = "\nUser:"  # the beginning of a user's message, which a model without turns goes on to write


def template_of(metadata: Mapping[str, Value]) -> str | None:
    """The default template in a file's metadata, in Jinja; None if the file has none."""
    template = value_of(metadata, KEY, "")
    return template if template.strip() else None


def named_templates(metadata: Mapping[str, Value]) -> dict[str, str]:
    """Name -> further templates of the file, for uses such as tools."""
    values = {key.removeprefix(f"{KEY}."): value.value for key, value in metadata.items() if key.startswith(f"{KEY}.")}
    return {name: text for name, text in values.items() if isinstance(text, str)}


class TemplateFault(UserError):
    """A template does not render. `what`: the error without the file's name. `is_broken`: with any messages."""

    def __init__(self, name: str, what: str, is_broken: bool) -> None:
        super().__init__(f"{name} {what}; give another with --chat-template-file FILE")
        self.what, self.is_broken = what, is_broken


@dataclass(frozen=True)
class ChatTemplate:
    """`source`: in Jinja. `name`: where it is from, for errors. `variables`: further ones for the template. The
    template always sees the same time, so that earlier turns of a conversation render the same."""

    source: str
    name: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    parses_messages: bool = False  # names of control tokens in messages are these tokens, as in llama.cpp
    n_characters: int = 1 << 26  # the largest rendered text
    now_s: float = field(default_factory=time.time)
    process: LimitedProcess = field(default=LimitedProcess("pipeinfer.models.text.template_child"), compare=False)

    def check(self) -> None:
        """Raises TemplateFault when the template cannot be parsed; HostFault."""
        result = self._ask([])
        if "answers" not in result:
            raise self._fault(result)

    def render(self, messages: Messages, tokenizer: Tokenizer) -> Rendered:
        """The text up to the assistant's next answer. Raises TemplateFault when the template fails, exceeds the limits
        or refuses the messages; HostFault."""
        (result,) = self.render_all([messages], tokenizer)
        if isinstance(result, TemplateFault):
            raise result
        return result

    def render_all(
        self, conversations: Sequence[Messages], tokenizer: Tokenizer, variables: Sequence[Mapping[str, Any]] = ()
    ) -> Sequence[Rendered | TemplateFault]:
        """The text, or the fault, of each of several conversations, in about the time of one. `variables`: further
        ones of each conversation. Raises HostFault."""
        common = {
            "add_generation_prompt": True,
            "bos_token": tokenizer.spelled_out(tokenizer.bos),
            "eos_token": tokenizer.spelled_out(tokenizer.eos),
            "tools": None,
            "documents": None,
            **self.variables,
        }
        contexts, masks = list[list[dict[str, Any]]](), list[Sequence[Mask]]()
        for messages, more in zip(conversations, variables or [{}] * len(conversations), strict=True):
            fields = fields_of(messages, self.source)
            masks.append(masks_of(fields, more, tokenizer, self.parses_messages))
            contexts.append([])
            with suppress(RecursionError):  # it is nested too deeply, and is not rendered
                plain = {**more, "messages": fields}
                contexts[-1] = [{**common, **each} for each in (plain, *(mask.hide(plain) for mask in masks[-1]))]
        answers = iter(self._answers([context for group in contexts for context in group]))
        groups = [[next(answers) for _ in group] for group in contexts]
        return [self._rendered(group, masks_of_group) for group, masks_of_group in zip(groups, masks, strict=True)]

    def _rendered(self, answers: Sequence[Mapping[str, Any]], masks: Sequence[Mask]) -> Rendered | TemplateFault:
        """`answers`: of the conversation as it is, then with each of the masks."""
        if not answers:
            return TemplateFault(self.name, "gets messages or variables that are nested too deeply", False)
        plain, *hidden = answers
        if "text" not in plain:
            return self._fault(plain)
        text = str(plain["text"])
        for answer, mask in zip(hidden, masks, strict=True):
            if "text" in answer and (revealed := mask.reveal(str(answer["text"]))).text == text:
                return revealed
        return Rendered(text, is_mixed=bool(masks))

    def _fault(self, answer: Mapping[str, Any]) -> TemplateFault:
        error = str(answer.get("broken") or answer.get("error", "says nothing"))
        return TemplateFault(self.name, printable(" ".join(error.split())[:300]), "broken" in answer)

    def _answers(self, contexts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One for each context. If all together exceed the limits, each is rendered by itself."""
        result = self._ask(contexts)
        if "answers" in result:
            return list(result["answers"])
        if "broken" in result or len(contexts) == 1:
            return [result] * len(contexts)
        return [answer for each in contexts for answer in self._answers([each])]

    def _ask(self, contexts: list[dict[str, Any]]) -> dict[str, Any]:
        limits = {"now_s": self.now_s, "n_characters": self.n_characters}
        return self.process.ask({"source": self.source, "contexts": contexts, **limits})


# -- tokens


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


# -- llama.cpp's built-in templates, by their names, which libllama formats: without tools, reasoning and variables


@cache
def builtin_names() -> tuple[str, ...]:
    """Names that libllama knows. Raises UserError where it cannot be loaded."""
    lib = load_library()
    names = (ctypes.c_char_p * lib.llama_chat_builtin_templates(None, 0))()
    lib.llama_chat_builtin_templates(names, len(names))
    return tuple(each.decode() for each in names if each)


@dataclass(frozen=True)
class BuiltinTemplate(ChatTemplate):
    """`source`: a name of `builtin_names`."""

    def _ask(self, contexts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"answers": [self._answer(each) for each in contexts]}

    def _answer(self, context: Mapping[str, Any]) -> dict[str, Any]:
        chat = [(each["role"], each["content"] or "") for each in context["messages"]]
        if any("\0" in content for _, content in chat):
            return {"error": "ends each message at a character NUL, and one has some"}
        lib, how = load_library(), (len(chat), bool(context["add_generation_prompt"]))
        encoded = [tuple(text.encode("utf-8", "replace") for text in each) for each in chat]
        array = (lib.llama_chat_message * len(chat))(*(lib.llama_chat_message(*each) for each in encoded))
        n = 0
        while True:
            buffer = ctypes.create_string_buffer(n)
            n = lib.llama_chat_apply_template(self.source.encode(), array, *how, buffer, n)
            if n <= len(buffer):
                return {"text": buffer.raw[:n].decode("utf-8", "replace")}
