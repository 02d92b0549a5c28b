"""A request's chat in OpenAI's JSON: messages, tools, reasoning, variables of the template. Renders nothing."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeinfer.job.options.limits import INT32_MAX
from pipeinfer.job.requests.fields import (
    BUDGET_MESSAGE,
    BUDGETS,
    EFFORTS,
    PassedOver,
    flag,
    is_list_of,
    is_too_deep,
    one_of,
    refuse,
    shown,
    text_of,
    whole,
    without_null,
)
from pipeinfer.models.text.messages import ChatMessage
from pipeinfer.models.text.tools import AUTO, NONE, REQUIRED, Tools

SAME_ROLES = ("system", "user", "assistant", "tool")
ROLES = {each: each for each in SAME_ROLES} | {"developer": "system", "function": "tool"}
MAX_TOOLS = 128  # OpenAI's limit
MAX_NAME = 128  # characters, Anthropic's limit; OpenAI's is 64
NAME = re.compile(rf"[\w.-]{{1,{MAX_NAME}}}", re.ASCII)
REASONING_FORMATS = ("auto", "none", "deepseek", "deepseek-legacy")  # `none` leaves reasoning in the text
RESERVED = ("add_generation_prompt", "messages", "tools")  # variables of a template that have fields of their own
MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "function_call"}
MESSAGE |= {"reasoning_content", "reasoning", "refusal", "annotations", "audio"}
"""Fields of a message, including those of answers that clients send back."""


def read_messages(value: Any, passed: PassedOver) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        refuse(f"messages is {shown(value)}; give a list of objects with role and content")
    return tuple(_message(f"messages[{at}]", each, passed) for at, each in enumerate(value))


def _message(name: str, value: Any, passed: PassedOver) -> ChatMessage:
    """`name`: its place in the request."""
    if not isinstance(value, dict):
        refuse(f"{name} is {shown(value)}; give an object with role and content, or what a chat's tools need")
    fields = {key: each for key, each in value.items() if each or each == ""}
    if unknown := set(fields) - MESSAGE:
        field = min(unknown)
        passed.add(f"messages.{field}", f"{name} has the unknown field {shown(field)}; leave it out")
    role, content = one_of(f"{name}.role", value.get("role"), ROLES), value.get("content")
    more: dict[str, Any] = {}
    calls = fields.get("tool_calls") or ([{"function": fields["function_call"]}] if "function_call" in fields else [])
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            refuse(f"{name}.tool_calls is {shown(calls)}; an assistant's message may have a list of them")
        more["tool_calls"] = [_call(f"{name}.tool_calls[{at}]", each, passed) for at, each in enumerate(calls)]
        if content is None:
            content, more["content"] = "", None
    for field in ("tool_call_id", "name") if ROLES[role] == "tool" else ():
        if field in fields:
            more[field] = _text(f"{name}.{field}", fields[field])
    for field in ("reasoning_content", "reasoning") if role == "assistant" else ():
        if field in fields:
            more.setdefault("reasoning_content", _text(f"{name}.{field}", fields[field]))
    if role == "assistant" and content is None:
        content = fields.get("refusal", "")
    return ChatMessage(ROLES[role], content_of(f"{name}.content", content, role, passed), more)  # type: ignore[arg-type]


def content_of(name: str, value: Any, role: str, passed: PassedOver, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a message. In a tool's result a line replaces images and the like: later turns have them too."""
    kinds += ("refusal",) if ROLES.get(role) == "assistant" else ()
    if ROLES.get(role) == "tool" and isinstance(value, list):
        value = [_text_part(f"{name}[{at}]", part, passed, kinds) for at, part in enumerate(value)]
    return text_of(name, value, kinds)


def _text_part(name: str, part: Any, passed: PassedOver, kinds: tuple[str, ...]) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind in kinds:
        return part
    passed.add(f"{name.partition('[')[0]}.{kind}", f"{name} is of type {shown(kind)}; the model reads text")
    what = "an image" if "image" in kind else f"a part of type {kind[:40]}"
    return {"type": kinds[0], "text": f"[{what} is left out here: this model reads text only]"}


def _text(name: str, value: Any) -> str:
    return value if isinstance(value, str) else refuse(f"{name} is {shown(value)}; give a text")


def _call(name: str, value: Any, passed: PassedOver) -> dict[str, Any]:
    """A call of an assistant, with its arguments as an object, which each template writes in its own way. Arguments
    that are no object, as a model wrote them, are put into one: a refusal would block all later turns."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        answered = "an id, type function, and a function with name and arguments"
        refuse(f"{name} is {shown(value)}; give what the server answered: {answered}")
    text = function.get("arguments") or "{}"
    try:
        arguments = (json.loads(text) or {}) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        arguments = text
    if not isinstance(arguments, dict) or is_too_deep(arguments):
        reason = f"{name}.function.arguments is {shown(text)}; give a JSON object, as a text"
        passed.add("messages.tool_calls.arguments", reason)
        arguments = {"arguments": text}
    return {**value, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_tools(fields: Mapping[str, Any], passed: PassedOver) -> Tools | None:
    """None where no function may be called. Tools that a server would run are passed over."""
    value, choice = fields.get("tools", []), fields.get("tool_choice", AUTO)
    if not isinstance(value, list):
        refuse(f"tools is {shown(value)}; give a list of up to {MAX_TOOLS} functions")
    named = [(f"tools[{at}]", each) for at, each in enumerate(value)]
    client_tools = [each for each in named if not _is_hosted(*each, passed)]
    if len(client_tools) > MAX_TOOLS:
        refuse(f"tools has {len(client_tools)} functions; up to {MAX_TOOLS} are possible")
    functions = tuple(_function(*each) for each in client_tools)
    names = [each["function"]["name"] for each in functions]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        refuse(f"tools has the function {twice} twice; give each a name of its own")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, names = _allowed("tool_choice.allowed_tools", choice.get("allowed_tools"))
        functions = tuple(each for each in functions if each["function"]["name"] in names)
    chosen = ""
    if isinstance(choice, dict):
        chosen = str(_name_of(choice))
        if choice.get("type") != "function" or chosen not in names:
            example = {"type": "function", "function": {"name": names[0] if names else "…"}}
            refuse(f"tool_choice is {shown(choice)}; name one of the tools, such as {json.dumps(example)}")
        choice = REQUIRED
    elif choice not in (AUTO, NONE, REQUIRED):
        refuse(f"tool_choice is {shown(choice)}; it is auto, none, required, or an object that names a function")
    elif choice == REQUIRED and not functions:
        refuse("tool_choice is required, and there are no tools of type function; give some")
    if not functions or choice == NONE:
        return None
    return Tools(functions, choice, flag(fields, "parallel_tool_calls", True), chosen)


def _allowed(name: str, value: Any) -> tuple[Any, list[Any]]:
    """(the choice, the names) of a choice among some of the tools. `name`: its place in the request."""
    if not isinstance(value, dict) or not is_list_of(dict, chosen := value.get("tools") or []):
        refuse(f"{name} is {shown(value)}; give an object with mode and a list of tools")
    return value.get("mode", AUTO), [_name_of(each) for each in chosen]


def _name_of(value: Mapping[str, Any]) -> Any:
    """The name of a function, in the form of chats or in that of responses."""
    function = value.get("function")
    return function.get("name") if isinstance(function, dict) else value.get("name")


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
        refuse(
            f"{name}.function.name is {shown(function.get('name'))}; give up to {MAX_NAME} letters, digits, _, . and -"
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        refuse(f"{name}.function.parameters is {shown(parameters)}; give a JSON schema")
    return {"type": "function", "function": without_null(function)}


def continues(fields: Mapping[str, Any], messages: Sequence[ChatMessage]) -> bool:
    """Whether the answer continues an assistant's last message: by default, as in llama-server, or by vLLM's fields."""
    is_answer = bool(messages) and messages[-1].role == "assistant" and not messages[-1].more.get("tool_calls")
    value = flag(fields, "continue_final_message", is_answer and "add_generation_prompt" not in fields)
    if value and not is_answer:
        refuse("continue_final_message is true, and the last message is no text of the assistant; leave it out")
    if value and flag(fields, "add_generation_prompt", False):
        refuse("add_generation_prompt and continue_final_message are both true; give one of them")
    return value


def read_variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the template: the request's, and the usual ones for reasoning and its effort."""
    variables, effort = fields.get("chat_template_kwargs", {}), fields.get("reasoning_effort")
    if not isinstance(variables, dict) or variables.keys() & {*RESERVED}:
        refuse(f"chat_template_kwargs is {shown(variables)}; give an object without {', '.join(RESERVED)}")
    if not flag(fields, "add_generation_prompt", True) and not fields.get("continue_final_message"):
        variables = {**variables, "add_generation_prompt": False}
    if effort is None:
        return variables
    thinks = one_of("reasoning_effort", effort, EFFORTS) != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks, **variables}


def read_budget(fields: Mapping[str, Any], is_chat: bool, passed: PassedOver) -> tuple[int, str]:
    """(the most tokens of reasoning, below 0 where the request does not say; the text before its forced end)."""
    names = [name for name in (*BUDGETS, BUDGET_MESSAGE) if name in fields]
    if names and not is_chat:
        passed.add(names[0], f"{names[0]} is for chats, which have messages; leave it out")
        return -1, ""
    budgets = [whole(name, fields[name], -1, INT32_MAX) for name in BUDGETS if name in fields]
    return (budgets or [-1])[0], _text(BUDGET_MESSAGE, fields.get(BUDGET_MESSAGE, ""))


def splits_reasoning(fields: Mapping[str, Any]) -> bool:
    return one_of("reasoning_format", fields.get("reasoning_format", "auto"), REASONING_FORMATS) != "none"
