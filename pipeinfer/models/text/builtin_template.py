"""llama.cpp's built-in chat templates, by their names, which libllama formats: without tools, reasoning and variables.
Knows no file of a model."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pipeinfer.models.llama.ggml import load_library
from pipeinfer.models.text.chat_template import ChatTemplate


@cache
def builtin_names() -> tuple[str, ...]:
    """Names that libllama knows. Raises UserError where it cannot be loaded."""
    lib = load_library()
    names = (ctypes.c_char_p * lib.llama_chat_builtin_templates(None, 0))()
    lib.llama_chat_builtin_templates(names, len(names))
    return tuple(each.decode() for each in names if each)


def formatted(name: str, messages: Sequence[Mapping[str, Any]], opens_answer: bool) -> bytes:
    """The text of messages with role and content; `opens_answer`: with the beginning of the assistant's next one."""
    lib, chat = load_library(), [(each["role"], each["content"] or "") for each in messages]
    encoded = [tuple(text.encode("utf-8", "replace") for text in each) for each in chat]
    array = (lib.llama_chat_message * len(chat))(*(lib.llama_chat_message(*each) for each in encoded))
    n = 0
    while True:
        buffer = ctypes.create_string_buffer(n)
        n = lib.llama_chat_apply_template(name.encode(), array, len(chat), opens_answer, buffer, n)
        if n <= len(buffer):
            return buffer.raw[:n]


@dataclass(frozen=True)
class BuiltinTemplate(ChatTemplate):
    """`source`: a name of `builtin_names`."""

    def _ask(self, contexts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"answers": [self._answer(each) for each in contexts]}

    def _answer(self, context: Mapping[str, Any]) -> dict[str, Any]:
        messages = context["messages"]
        if any("\0" in (each["content"] or "") for each in messages):
            return {"error": "ends each message at a character NUL, and one has some"}
        text = formatted(self.source, messages, bool(context["add_generation_prompt"]))
        return {"text": text.decode("utf-8", "replace")}
