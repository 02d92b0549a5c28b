"""Anthropic's Messages API: its requests as OpenAI's chats, and the form of its answers."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeinfer.job.requests.chat_fields import content_of
from pipeinfer.job.requests.fields import PassedOver, check_part, is_list_of, refuse, shown, text_of
from pipeinfer.models.text.arguments import json_value
from pipeinfer.server.forms import Block, BlockForm, named_event, renamed

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
NAMES = {"stop_sequences": "stop"}
PASSED_OVER = ("container", "context_management", "mcp_servers", "inference_geo", "output_config", "cache_control")
"""Fields of Anthropic's own service."""

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
DELTAS = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
DELTAS |= {"arguments": ("input_json_delta", "partial_json")}
REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
BILLING = "x-anthropic-billing-header:"
"""The first line of Claude Code's system text. It differs in each request, so that no prompt would be in the cache."""


def chat_of(body: Mapping[str, Any], passed: PassedOver) -> dict[str, Any]:
    """The body of a chat. Raises UserError for what cannot be served."""
    fields = renamed({name: value for name, value in body.items() if name not in PASSED_OVER}, NAMES)
    value = fields.get("messages")
    if not isinstance(value, list) or not value:
        refuse(f"messages is {shown(value)}; give a list of objects with role and content")
    messages = [each for at, message in enumerate(value) for each in _messages(f"messages[{at}]", message, passed)]
    if (system := _system(fields.pop("system", None))) is not None:
        messages.insert(0, {"role": "system", "content": text_of("system", system, ("text",), "")})
    config = body.get("output_config")
    if isinstance(config, dict) and isinstance(form := config.get("format"), dict):
        fields["response_format"] = form
    if "tools" in fields:
        fields["tools"] = _tools(fields["tools"], passed)
    if isinstance(choice := fields.get("tool_choice"), dict):
        fields |= _choice(choice)
    return {**fields, "messages": messages}


def _system(value: Any) -> Any:
    """The system's text without `BILLING`; None where nothing is left."""
    if isinstance(value, str) and value.startswith(BILLING):
        return value.partition("\n")[2].lstrip("\n") or None
    if not isinstance(value, list):
        return value
    blocks = [
        {**each, "text": _system(each["text"])}
        if isinstance(each, dict) and isinstance(each.get("text"), str)
        else each
        for each in value
    ]
    return [each for each in blocks if not (isinstance(each, dict) and each.get("text", "") is None)] or None


def _messages(name: str, message: Any, passed: PassedOver) -> Iterator[dict[str, Any]]:
    """A message for each result of a tool, and one for the text and the calls."""
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if role not in ("user", "assistant", "system"):
        refuse(f"{name}.role is {shown(role)}; it is user, assistant or system")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list) or not is_list_of(dict, content):
        refuse(f"{name}.content is {shown(content)}; give a text, or a list of blocks")
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for at, block in enumerate(map(_read_document, content)):
        kind = block.get("type")
        if kind == "text":
            texts.append(str(block.get("text") or ""))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = block.get("content") or ""
            result = list(map(_read_document, result)) if isinstance(result, list) else result
            text = content_of(f"{name}.content[{at}].content", result, "tool", passed)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
        elif role == "assistant" and kind != "redacted_thinking":
            passed.add(f"messages.{kind}", f"{name}.content[{at}] is of type {shown(kind)}; it is left out")
        elif kind != "redacted_thinking":
            check_part(f"{name}.content[{at}]", kind)
            refuse(
                f"{name}.content[{at}] is of type {shown(kind)}; text, thinking, tool_use and tool_result are served"
            )
    if texts or calls or thoughts:
        content = "\n".join(texts) if texts or not calls else None
        more: dict[str, Any] = {"tool_calls": calls} if calls else {}
        more |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        yield {"role": role, "content": content, **more}


def _read_document(block: Any) -> Any:
    """A document of text as a block of text."""
    source = block.get("source") if isinstance(block, dict) and block.get("type") == "document" else None
    if not isinstance(source, Mapping) or source.get("type") != "text":
        return block
    return {"type": "text", "text": str(source.get("data") or "")}


def _tools(value: Any, passed: PassedOver) -> list[Any]:
    if not is_list_of(dict, value):
        refuse(f"tools is {shown(value)}; give a list of objects with name and input_schema")
    tools = []
    for at, tool in enumerate(value):
        if (kind := tool.get("type") or "custom") != "custom":
            passed.add(f"tools.{kind}", f"tools[{at}] is of type {shown(kind)}; only tools of the client can be served")
            continue
        schema = {"parameters": tool["input_schema"]} if "input_schema" in tool else {}
        function = {name: tool[name] for name in ("name", "description") if name in tool}
        tools.append({"type": "function", "function": function | schema})
    return tools


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    if kind == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in CHOICES:
        chosen = CHOICES[kind]
    else:
        refuse(f"tool_choice is {shown(choice)}; its type is {', '.join(CHOICES)} or tool")
    alone = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": chosen, **alone}


class MessageForm(BlockForm):
    prefix = "msg"

    @property
    def _reason(self) -> str:
        return "stop_sequence" if self.finish == "stop" and self.choice.stop else REASONS[self.finish]

    def _message(self, content: list[Any], reason: str | None) -> dict[str, Any]:
        stop = self.choice.stop if reason == "stop_sequence" else None
        message = {"id": self.common["id"], "type": "message", "role": "assistant", "model": self.common["model"]}
        return message | {"content": content, "stop_reason": reason, "stop_sequence": stop, "usage": self._counts()}

    def _counts(self) -> dict[str, int]:
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = {"input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached}
        return counts | {"cache_creation_input_tokens": 0, "output_tokens": usage["completion_tokens"]}

    def whole(self) -> dict[str, Any]:
        content = [_block(block, block.text) for block in self.all_blocks()]
        return self._message(content, self._reason) | {"timings": self.timings}

    def first(self) -> bytes:
        return named_event("message_start", {"message": self._message([], None)})

    def block_start(self, block: Block) -> bytes:
        return named_event("content_block_start", {"index": block.index, "content_block": _block(block, "")})

    def block_delta(self, block: Block, text: str) -> bytes:
        kind, name = DELTAS[block.kind]
        return named_event("content_block_delta", {"index": block.index, "delta": {"type": kind, name: text}})

    def block_stop(self, block: Block) -> bytes:
        return named_event("content_block_stop", {"index": block.index})

    def last(self) -> bytes:
        stop = self.choice.stop if self._reason == "stop_sequence" else None
        ended = {"delta": {"stop_reason": self._reason, "stop_sequence": stop}, "usage": self._counts()}
        return named_event("message_delta", ended) + named_event("message_stop", {})


def _block(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "content":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    try:
        arguments = json_value(text or "{}")
    except ValueError:
        arguments = {}  # it was cut off, or is no JSON
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": arguments}
