"""What a request says of its chat, in OpenAI's words: messages, tools, reasoning, the template's variables. Renders
nothing."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeinfer.job.requests.fields import PassedOver, flag, refuse, shown, text_of, without_null
from pipeinfer.models.text.chat import Message
from pipeinfer.models.text.tools import AUTO, NONE, REQUIRED, Tools

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
         "function": "tool"}  # fmt: skip
MAX_TOOLS = 128
"""As OpenAI has it."""

NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
FORMATS = ("auto", "none", "deepseek")
"""Of reasoning: none leaves it in the text."""

CHAT_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "reasoning_format",
               "chat_template_kwargs", "add_generation_prompt", "continue_final_message")  # fmt: skip
OWN = {"messages", "tools", "add_generation_prompt"}
"""Variables of a template that a request says otherwise."""

MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "function_call",
           "refusal", "annotations", "audio"}  # fmt: skip
"""Fields of a message, those included that clients send back as they got them."""


def read_messages(value: Any, passed: PassedOver) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        refuse(f"messages is {shown(value)}; give a list of objects with role and content")
    return tuple(_message(f"messages[{at}]", each, passed) for at, each in enumerate(value))


def _message(name: str, value: Any, passed: PassedOver) -> Message:
    """`name`: where it stands in the request."""
    if not isinstance(value, dict):
        refuse(f"{name} is {shown(value)}; give an object with role and content, or what a chat's tools need")
    given = {key: each for key, each in value.items() if each or each == ""}
    if unknown := set(given) - MESSAGE:
        field = min(unknown)
        passed.add(f"messages.{field}", f"{name} has the unknown field {shown(field)}; leave it out")
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or role not in ROLES:
        refuse(f"{name}.role is {shown(role)}; it is one of {', '.join(ROLES)}")
    more: dict[str, Any] = {}
    calls = given.get("tool_calls") or ([{"function": given["function_call"]}] if "function_call" in given else [])
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            refuse(f"{name}.tool_calls is {shown(calls)}; an assistant's message may have a list of them")
        more["tool_calls"] = [_call(f"{name}.tool_calls[{at}]", each) for at, each in enumerate(calls)]
        if content is None:
            content, more["content"] = "", None
    for field in ("tool_call_id", "name") if ROLES[role] == "tool" else ():
        if field in given:
            more[field] = _text(f"{name}.{field}", given[field])
    for field in ("reasoning_content", "reasoning") if role == "assistant" else ():
        if field in given:
            more.setdefault("reasoning_content", _text(f"{name}.{field}", given[field]))
    if role == "assistant" and content is None:
        content = given.get("refusal", "")
    return Message(ROLES[role], content_of(f"{name}.content", content, role, passed), more)  # type: ignore[arg-type]


def content_of(name: str, value: Any, role: str, passed: PassedOver, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a message. What a tool's result has beside text, such as a picture, becomes a line that says so: it
    would be in the way of all later turns. Raises UserError."""
    if ROLES.get(role) == "tool" and isinstance(value, list):
        value = [_told(f"{name}[{at}]", part, passed, kinds) for at, part in enumerate(value)]
    return text_of(name, value, kinds)


def _told(name: str, part: Any, passed: PassedOver, kinds: tuple[str, ...]) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind in kinds:
        return part
    passed.add(f"{name.partition('[')[0]}.{kind}", f"{name} is of type {shown(kind)}; the model reads text")
    what = "an image" if "image" in kind else f"a part of type {kind[:40]}"
    return {"type": kinds[0], "text": f"[{what} is left out here: this model reads text only]"}


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


def read_tools(given: Mapping[str, Any], passed: PassedOver) -> Tools | None:
    """None where no call may be made. Tools that another server would run are passed over."""
    value, choice = given.get("tools", []), given.get("tool_choice", AUTO)
    if not isinstance(value, list):
        refuse(f"tools is {shown(value)}; give a list of up to {MAX_TOOLS} functions")
    own = [(f"tools[{at}]", each) for at, each in enumerate(value) if not _is_hosted(f"tools[{at}]", each, passed)]
    if len(own) > MAX_TOOLS:
        refuse(f"tools has {len(own)} functions; up to {MAX_TOOLS} are possible")
    functions = tuple(_function(*each) for each in own)
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
        refuse("tool_choice is required, and there are no tools of type function; give some")
    else:
        chosen = choice
    if not functions or chosen == NONE:
        return None
    return Tools(functions, chosen, flag(given, "parallel_tool_calls", True))


def _is_hosted(name: str, value: Any, passed: PassedOver) -> bool:
    kind = value.get("type", "function") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind == "function":
        return False
    passed.add(f"tools.{kind}", f"{name} is of type {shown(kind)}; only tools of type function can be served")
    return True


def _function(name: str, value: Any) -> Mapping[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        refuse(f"{name} is {shown(value)}; give an object of type function, with a function that has a name")
    if not isinstance(function.get("name"), str) or not NAME.fullmatch(function["name"]):
        refuse(f"{name}.function.name is {shown(function.get('name'))}; give up to 64 letters, digits, _, . and -")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        refuse(f"{name}.function.parameters is {shown(parameters)}; give a JSON schema")
    return {"type": "function", "function": without_null(function)}


def continues(given: Mapping[str, Any], messages: Sequence[Message]) -> bool:
    """Whether the answer goes on with the last message, an assistant's: by default it does, as in llama-server; with
    `continue_final_message` or `add_generation_prompt` as in vLLM."""
    is_answer = bool(messages) and messages[-1].role == "assistant" and not messages[-1].more.get("tool_calls")
    asked = flag(given, "continue_final_message", is_answer and "add_generation_prompt" not in given)
    if asked and not is_answer:
        refuse("continue_final_message is true, and the last message is no text of the assistant; leave it out")
    if asked and flag(given, "add_generation_prompt", False):
        refuse("add_generation_prompt and continue_final_message are both true; give one of them")
    return asked


def read_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the template: those that are asked for, and by its usual names whether and how long the model reasons."""
    variables, effort = given.get("chat_template_kwargs", {}), given.get("reasoning_effort")
    if not isinstance(variables, dict) or OWN & {*variables}:
        refuse(f"chat_template_kwargs is {shown(variables)}; give an object without {', '.join(sorted(OWN))}")
    if not flag(given, "add_generation_prompt", True) and not given.get("continue_final_message"):
        variables = {**variables, "add_generation_prompt": False}
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
