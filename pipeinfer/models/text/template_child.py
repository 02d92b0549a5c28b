"""Render chat templates in a sandbox, in a process of its own: a template from a model file may loop forever, or try to
leave the sandbox. Knows no model."""

import copy
import hashlib
import json
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

T = TypeVar("T")

SHORT_ID = re.compile("[A-Za-z0-9]{9}")
CHAT_S = 1.0  # CPU seconds for one text, so that the others of the same request are rendered in any case


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """`answers`: for each of the `contexts` its `text` or `error`; or `broken`: the template's error with any."""
    signal.signal(signal.SIGVTALRM, _give_up)
    n_characters = request["n_characters"]

    def render(template: Template, context: Mapping[str, Any]) -> dict[str, str]:
        result = attempt(template, context)
        for other in _others(context) if "error" in result else ():
            again = attempt(template, other)
            if "text" in again:
                return again
        return result

    def attempt(template: Template, context: Mapping[str, Any]) -> dict[str, str]:
        signal.setitimer(signal.ITIMER_VIRTUAL, CHAT_S)
        text = _attempt("error", lambda: template.render(**copy.deepcopy(context)))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if isinstance(text, dict) or len(text) <= n_characters:
            return text if isinstance(text, dict) else {"text": text}
        return {"error": f"renders {len(text)} characters"}

    template = _attempt("broken", lambda: parse(request["source"], request["now_s"]))
    if isinstance(template, dict):
        return template
    return {"answers": [render(template, context) for context in request["contexts"]]}


def _others(context: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Contexts to try where a template refuses one: with what tools may leave out, a text for a content of null, the
    arguments of calls as texts in JSON, ids of calls as Mistral's ask for them; and with several of these."""
    contexts = [dict(context)]
    for change in (_complete_tools, _give_content, _write_arguments, _shorten_ids):
        for each in tuple(contexts):
            changed = json.loads(json.dumps(each))
            with suppress(AttributeError, KeyError, TypeError):  # --chat-template-kwargs may have any tools
                change(changed)
            if changed != each:
                contexts.append(changed)
    return contexts[1:]


def _complete_tools(context: dict[str, Any]) -> None:
    context["tools"] = context.get("tools") or []
    for tool in context["tools"]:
        function = tool["function"] = {"description": "", "parameters": {"type": "object"}, **tool["function"]}
        properties = function["parameters"].setdefault("properties", {})
        for each in properties.values() if isinstance(properties, dict) else ():
            if isinstance(each, dict):
                each.setdefault("description", "")


def _give_content(context: dict[str, Any]) -> None:
    for message in context["messages"]:
        message["content"] = message["content"] or ""


def _write_arguments(context: dict[str, Any]) -> None:
    for call in _calls(context):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)


def _shorten_ids(context: dict[str, Any]) -> None:
    """An id that is not 9 letters and digits is replaced by a digest, the same for a call and its result."""
    results = [(each, "tool_call_id") for each in context["messages"] if each["role"] == "tool"]
    for owner, name in [*((call, "id") for call in _calls(context)), *results]:
        id = str(owner.get(name) or "")
        if not SHORT_ID.fullmatch(id):
            owner[name] = hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:9]


def _calls(context: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [call for message in context["messages"] for call in message.get("tool_calls", ())]


def _give_up(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def _attempt(name: str, work: Callable[[], T]) -> T | dict[str, str]:
    """The result of `work`; else {name: its error}."""
    try:
        return work()
    except TimeoutError:
        return {name: f"takes more than {CHAT_S:g} s"}
    except MemoryError:
        return {name: f"takes more than {resource.getrlimit(resource.RLIMIT_AS)[0] >> 20} MiB of memory"}
    except RecursionError:
        return {name: "calls itself without end"}
    except Exception as error:  # whatever a template can raise
        return {name: f"{type(error).__name__}: {error}"}


def parse(source: str, now_s: float) -> Template:
    """The template, with the functions and tags that chat templates use. Raises what jinja2 raises."""

    class GenerationTag(Extension):
        """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; it has no effect here."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's)

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> str:
        raise TemplateError(message)

    def as_json(
        value: object,
        indent: int | None = None,
        ensure_ascii: bool = False,
        separators: Sequence[str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        pair = (str(separators[0]), str(separators[1])) if separators else None
        plain = list(value) if isinstance(value, Iterator) else value  # of jinja2's map
        return json.dumps(plain, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)

    environment = SandboxedEnvironment(  # lists may be appended to, as in llama.cpp: nothing here outlives a chat
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = as_json  # jinja2's own is for HTML
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: time.strftime(form, time.localtime(now_s))
    return environment.from_string(source)
