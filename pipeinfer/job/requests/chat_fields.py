"""What a request says of its chat, in OpenAI's words: messages, tools, reasoning, the template's variables. Renders
nothing."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pipeinfer.job.requests.fields import refuse, shown, text_of, without_null
from pipeinfer.models.text.chat import Message
from pipeinfer.models.text.tools import AUTO, NONE, REQUIRED, Tools

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_TOOLS = 128
"""As OpenAI has it."""

NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
FORMATS = ("auto", "none", "deepseek")
"""Of reasoning: none leaves it in the text."""

CHAT_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "reasoning_format",
               "chat_template_kwargs")  # fmt: skip
OWN = {"messages", "tools", "add_generation_prompt"}
"""Variables of a template that a request says otherwise."""

MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal", "annotations",
           "audio", "function_call"}  # fmt: skip
"""Fields that clients send back as they got them; of those that are not used only null, or an empty list."""


def read_messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        refuse(f"messages is {shown(value)}; give a list of objects with role and content")
    return tuple(_message(f"messages[{at}]", each) for at, each in enumerate(value))


def _message(name: str, value: Any) -> Message:
    """`name`: where it stands in the request."""
    given = {key: each for key, each in value.items() if each or each == ""} if isinstance(value, dict) else {}
    if not isinstance(value, dict) or set(given) - MESSAGE | {*given} & {"refusal", "audio", "function_call"}:
        refuse(f"{name} is {shown(value)}; give an object with role and content, or what a chat's tools need")
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or role not in ROLES:
        refuse(f"{name}.role is {shown(role)}; it is one of {', '.join(ROLES)}")
    more: dict[str, Any] = {}
    if calls := given.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, list):
            refuse(f"{name}.tool_calls is {shown(calls)}; an assistant's message may have a list of them")
        more["tool_calls"] = [_call(f"{name}.tool_calls[{at}]", each) for at, each in enumerate(calls)]
        if content is None:
            content, more["content"] = "", None
    for field in ("tool_call_id", "name") if role == "tool" else ("reasoning_content",) if role == "assistant" else ():
        if field in given:
            more[field] = _text(f"{name}.{field}", given[field])
    return Message(ROLES[role], text_of(f"{name}.content", content, ("text",)), more)  # type: ignore[arg-type]


def _text(name: str, value: Any) -> str:
    return value if isinstance(value, str) else refuse(f"{name} is {shown(value)}; give a text")


def _call(name: str, value: Any) -> dict[str, Any]:
    """A call that was made, its arguments as an object: templates write them in their own way."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        refuse(f"{name} is {shown(value)}; give what the server answered: an id, type function, and a function with "
               "name and arguments")  # fmt: skip
    given = function.get("arguments") or "{}"
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        refuse(f"{name}.function.arguments is {shown(given)}; give a JSON object, as a text")
    return {**value, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_tools(given: Mapping[str, Any]) -> Tools | None:
    """None where no call may be made."""
    value, choice = given.get("tools", []), given.get("tool_choice", AUTO)
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        refuse(f"tools is {shown(value)}; give a list of up to {MAX_TOOLS} functions")
    functions = tuple(_function(f"tools[{at}]", each) for at, each in enumerate(value))
    names = [each["function"]["name"] for each in functions]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        refuse(f"tools has the function {twice} twice; give each a name of its own")
    if isinstance(choice, dict):
        function = choice.get("function")
        chosen = str(function.get("name") if isinstance(function, dict) else choice.get("name"))
        if choice.get("type") != "function" or chosen not in names:
            known = {"type": "function", "function": {"name": names[0] if names else "…"}}
            refuse(f"tool_choice is {shown(choice)}; name one of the tools, such as {json.dumps(known)}")  # fmt: skip
    elif choice not in (AUTO, NONE, REQUIRED):
        refuse(f"tool_choice is {shown(choice)}; it is auto, none, required, or an object that names a function")
    elif choice == REQUIRED and not names:
        refuse("tool_choice is required, and there are no tools; give some")
    else:
        chosen = choice
    if not functions or chosen == NONE:
        return None
    return Tools(functions, chosen, given.get("parallel_tool_calls", True))


def _function(name: str, value: Any) -> Mapping[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type") != "function":
        refuse(f"{name} is {shown(value)}; only tools of type function can be served")
    if not isinstance(function.get("name"), str) or not NAME.fullmatch(function["name"]):
        refuse(f"{name}.function.name is {shown(function.get('name'))}; give up to 64 letters, digits, _, . and -")
    if not isinstance(function.get("parameters", {}), dict):
        refuse(f"{name}.function.parameters is {shown(function['parameters'])}; give a JSON schema")
    return {"type": "function", "function": without_null(function)}


def read_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the template: those that are asked for, and by its usual names whether and how long the model reasons."""
    variables, effort = given.get("chat_template_kwargs", {}), given.get("reasoning_effort")
    if not isinstance(variables, dict) or OWN & {*variables}:
        refuse(f"chat_template_kwargs is {shown(variables)}; give an object without {', '.join(sorted(OWN))}")
    if effort is None:
        return variables
    if effort not in EFFORTS:
        refuse(f"reasoning_effort is {shown(effort)}; it is one of {', '.join(EFFORTS)}")
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks, **variables}


def splits_reasoning(given: Mapping[str, Any]) -> bool:
    asked = given.get("reasoning_format", "auto")
    if asked not in FORMATS:
        refuse(f"reasoning_format is {shown(asked)}; it is one of {', '.join(FORMATS)}")
    return bool(asked != "none")
