"""llama.cpp's built-in chat templates: the texts of `llama_chat_apply_template`, in every command."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pipeinfer.errors import UserError
from pipeinfer.job.options.text_sections import ChatOptions, TextOptions
from pipeinfer.job.requests.chat_format import ChatFormat, TemplateInput, open_format
from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.llama.ggml import load_library
from pipeinfer.models.text.chat_template import Rendered, builtin_names
from pipeinfer.models.text.messages import ChatMessage
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.models.text.tools import Tools
from tests.support.jobs import finish, run_json

SAID = [ChatMessage("user", " Ünd? "), ChatMessage("assistant", "a\nb"), ChatMessage("user", "x" * 3000)]
CHATS = [SAID[:1], SAID, [ChatMessage("system", "s "), *SAID], [ChatMessage("system", "s")]]


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    opened = Tokenizer(TARGET)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    return read_model_info(Path(TARGET))


def format_of(info: ModelInfo, tokenizer: Tokenizer, template: str) -> ChatFormat:
    format = open_format(TextOptions(chat=ChatOptions(), template=template), info, tokenizer)
    assert format
    return format


def applied(name: str, messages: Sequence[ChatMessage], opens_answer: bool = True) -> str:
    lib, buffer = load_library(), ctypes.create_string_buffer(1 << 16)
    chat = (lib.llama_chat_message * len(messages))()
    for at, each in enumerate(messages):
        chat[at].role, chat[at].content = each.role.encode(), each.content.encode()
    n = lib.llama_chat_apply_template(name.encode(), chat, len(messages), opens_answer, buffer, len(buffer))
    return buffer.raw[:n].decode()


def test_every_name_has_libllama_s_text(info: ModelInfo, tokenizer: Tokenizer) -> None:
    names = builtin_names()
    assert {"chatml", "llama2", "llama3", "mistral-v1", "gpt-oss"} <= {*names} and len(names) > 40
    for name in names:
        for messages in CHATS:
            assert format_of(info, tokenizer, name).render(messages).text == applied(name, messages), name
    assert format_of(info, tokenizer, "chatml").render(SAID[:1]).text == (
        "<|im_start|>user\n Ünd? <|im_end|>\n<|im_start|>assistant\n"
    )


def test_limits_of_built_in_templates(info: ModelInfo, tokenizer: Tokenizer) -> None:
    format = format_of(info, tokenizer, "chatml")
    tools = Tools(({"type": "function", "function": {"name": "add", "parameters": {}}},), "auto", True)
    user, opens_none, without_end = SAID[:1], {"add_generation_prompt": False}, [ChatMessage("user", "\0")]
    asked, bare, nul = format.render_all([(user, tools, {}), (user, None, opens_none), (without_end, None, {})])
    assert isinstance(asked, Rendered) and '"name": "add"' in asked.text, "tools are text of the system's message"
    assert isinstance(bare, Rendered) and bare.text == applied("chatml", SAID[:1], False)
    assert isinstance(nul, UserError) and "NUL" in str(nul)
    jinja = format_of(info, tokenizer, "{{ messages[0].content }}!")
    assert jinja.render(SAID[:1]).text == " Ünd? !"
    for template, why in (("chatlm", "no built-in template, nor one in Jinja; there are "), ("{% if", "SyntaxError")):
        with pytest.raises(UserError, match=why):
            format_of(info, tokenizer, template)
    both = TextOptions(chat=ChatOptions(template_file=Path("x.jinja")), template="chatml")
    with pytest.raises(UserError, match="--chat-template and --chat-template-file both"):
        open_format(both, info, tokenizer)


def test_no_system_message_is_lost(info: ModelInfo, tokenizer: Tokenizer) -> None:
    """Templates such as gpt-oss's write the first alone, DeepSeek R1's the last; another refuses several."""
    told = [ChatMessage("system", " be brief "), *SAID[:1], ChatMessage("system", "now")]
    rest = "{% for each in messages if each.role != 'system' %}|{{ each.content }}{% endfor %}"
    refuses = "{% if messages[2:] %}{{ raise_exception('one') }}{% endif %}"
    several = "{% for each in messages %}|{{ each.content | trim }}{% endfor %}"
    system = "(messages | selectattr('role', 'eq', 'system') | {}).content"
    first, last = (f"{{{{ {system.format(end)} }}}}{rest}" for end in ("first", "list | last"))
    chats: list[TemplateInput] = [(told, None, {}), (told[:2], None, {}), (told, None, {})]
    for source in (first, last, f"{refuses}{first}"):
        found = format_of(info, tokenizer, source).render_all(chats)
        assert [each.text for each in found if isinstance(each, Rendered)] == [
            " be brief \n\nnow| Ünd? ",
            " be brief | Ünd? ",
            " be brief \n\nnow| Ünd? ",
        ]
    assert format_of(info, tokenizer, several).render(told).text == "|be brief|Ünd?|now"
    assert format_of(info, tokenizer, "{# #}none").render(told).text == "none"


def test_a_chat_by_a_built_in_template_is_the_raw_prompt(tokenizer: Tokenizer) -> None:
    words = ["-md", "none", "-t", "1", "-n", "12", "--temp", "0", "--ignore-eos"]
    message = [ChatMessage("user", "def add(a, b):")]
    chat = run_json(2, [*words, "--chat", "--chat-template", "zephyr", "-p", message[0].content])
    raw = run_json(1, [*words, "--no-escape", "-p", applied("zephyr", message)])
    assert chat["tokens"] == raw["tokens"]
    done = finish(1, ["run", *words, "-p", "x", "--chat-template", "zephyr"])
    assert done.returncode == 2 and "--chat-template is for chats" in done.stderr
