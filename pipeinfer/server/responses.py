"""OpenAI's Responses API: its requests as chats, and the form of its answers, of which none is stored."""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeinfer.job.requests.chat_fields import ROLES, content_of
from pipeinfer.job.requests.fields import PassedOver, is_list_of, one_of, refuse, shown, text_of
from pipeinfer.server.forms import DONE, Block, BlockForm, ChoiceOutput, named_event, renamed

RESPONSES = "/v1/responses"
NAMES = {"max_output_tokens": "max_tokens"}
PASSED_OVER: tuple[str, ...] = ("include", "truncation", "prompt", "background", "conversation", "max_tool_calls")
PASSED_OVER += ("store", "text", "reasoning", "input", "instructions", "stream_options")
STORED = ("previous_response_id", "conversation", "prompt")  # fields that need a stored answer
STORED_ITEMS = ("item_reference",)  # types of such items
LOGPROBS = "message.output_text.logprobs"
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def chat_of(body: Mapping[str, Any], passed: PassedOver) -> dict[str, Any]:
    """The body of a chat. Raises UserError for what cannot be served."""
    if stored := next((name for name in STORED if name in body), ""):
        refuse(f"{stored} is {shown(body[stored])}, and no answer is kept here; give the whole conversation as input")
    if body.get("background"):
        refuse("background is true, and no answer is kept here; leave it out, or give stream true")
    include = body.get("include")
    if isinstance(include, list) and LOGPROBS in include:
        reason = f"include has {LOGPROBS}, and answers of this API have no log-probabilities here"
        refuse(f"{reason}; ask /v1/chat/completions for them")
    fields = renamed({name: value for name, value in body.items() if name not in PASSED_OVER}, NAMES)
    value = body.get("input")
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        refuse(f"input is {shown(value)}; give a text, or a list of items")
    messages = _joined(each for at, item in enumerate(items) for each in _messages(f"input[{at}]", item, passed))
    if not messages:
        refuse(f"input is {shown(value)}; give a text, or a list with a message")
    if "instructions" in body:
        text = text_of("instructions", body["instructions"], TEXTS)
        messages.insert(0, {"role": "system", "content": text})
    reasoning, text_options = body.get("reasoning"), body.get("text")
    if isinstance(reasoning, dict) and reasoning.get("effort"):
        fields["reasoning_effort"] = reasoning["effort"]
    if isinstance(text_options, dict) and isinstance(form := text_options.get("format"), dict):
        schema = {"type": "json_schema", "json_schema": form}
        fields["response_format"] = schema if form.get("type") == "json_schema" else form
    if "tools" in fields:
        if not is_list_of(dict, tools := fields["tools"]):
            refuse(f"tools is {shown(tools)}; give a list of functions")
        fields["tools"] = [{"type": tool.get("type", "function"), "function": {**tool, "type": None}} for tool in tools]
    if isinstance(choice := fields.get("tool_choice"), dict) and choice.get("type") == "allowed_tools":
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": choice}
    elif isinstance(choice, dict):
        fields["tool_choice"] = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    return {**fields, "messages": messages}


def _messages(name: str, item: Any, passed: PassedOver) -> Iterator[dict[str, Any]]:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        role = one_of(f"{name}.role", item.get("role"), ROLES)
        yield {"role": role, "content": content_of(f"{name}.content", item.get("content"), role, passed, TEXTS)}
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input")}
        function = {"name": item.get("name"), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        yield {"role": "assistant", "content": None, "tool_calls": [call]}
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text = content_of(f"{name}.output", item.get("output"), "tool", passed, TEXTS)
        yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
    elif kind == "reasoning":
        text = text_of(f"{name}.content", item.get("content") or item.get("summary") or [], TEXTS)
        yield {"role": "assistant", "reasoning_content": text}
    elif not isinstance(kind, str) or kind in STORED_ITEMS:
        refuse(
            f"{name} is of type {shown(kind)}; message, function_call, function_call_output and reasoning are served"
        )
    else:
        passed.add(f"input.{kind}", f"{name} is of type {shown(kind)}; it is left out")


def _joined(messages: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """The assistant's items in a row as one message."""
    joined = list[dict[str, Any]]()
    for message in messages:
        last = joined[-1] if joined else {}
        is_next = bool(last.get("content")) and "tool_calls" not in message
        if message["role"] != "assistant" or last.get("role") != "assistant" or is_next:
            joined.append(message)
            continue
        calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
        last |= {name: value for name, value in message.items() if value} | ({"tool_calls": calls} if calls else {})
    return [each if "content" in each else {**each, "content": ""} for each in joined]


class ResponseForm(BlockForm):
    prefix, number, is_over = "resp", 0, False

    def _event(self, kind: str, /, **data: Any) -> bytes:
        self.number += 1
        return named_event(f"response.{kind}", {"sequence_number": self.number - 1, **data})

    def _response(self, output: list[Any], status: str) -> dict[str, Any]:
        body, usage = self.parsed.bodies[0], self.usage()
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        functions = body.tools.functions if body.tools else ()
        tools = [{"type": "function", "strict": False, "parameters": None, **each["function"]} for each in functions]
        response: dict[str, Any] = {"id": self.common["id"], "object": "response", "created_at": self.common["created"]}
        response |= {"status": status, "model": self.common["model"], "output": output, "error": None}
        response |= {"incomplete_details": cut, "instructions": None, "metadata": {}, "tools": tools}
        response |= {"parallel_tool_calls": not body.tools or body.tools.parallel}
        choice: Any = body.tools.choice if body.tools else "auto"
        if body.tools and body.tools.name:
            choice = {"type": "function", "name": body.tools.name}
        response |= {"tool_choice": choice, "max_output_tokens": None}
        response |= {"temperature": body.sampling.temp, "top_p": body.sampling.top_p, "store": False}
        response |= {"text": {"format": {"type": "text"}}, "truncation": "disabled"}
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        details = usage["prompt_tokens_details"] | {"cache_write_tokens": 0}
        counts |= {"input_tokens_details": details, "total_tokens": usage["total_tokens"]}
        return response | {"usage": counts | {"output_tokens_details": usage["completion_tokens_details"]}}

    @property
    def _status(self) -> str:
        return "incomplete" if self.finish == "length" else "completed"

    def _items(self) -> list[dict[str, Any]]:
        """Those of an answer that has ended. The last one is incomplete if it was cut."""
        return [_item(block, self._status if block is self.blocks[-1] else "completed") for block in self.blocks]

    def end(self, output: ChoiceOutput) -> bytes:
        self.is_over = True
        return super().end(output)

    def whole(self) -> dict[str, Any]:
        self.all_blocks()
        return self._response(self._items(), self._status) | {"timings": self.timings}

    def first(self) -> bytes:
        response = self._response([], "in_progress")
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def block_start(self, block: Block) -> bytes:
        events = self._event("output_item.added", output_index=block.index, item=_item(block, "in_progress"))
        if block.kind != "arguments":
            events += self._event("content_part.added", **_place(block), content_index=0, part=_part(block, ""))
        return events

    def block_delta(self, block: Block, text: str) -> bytes:
        more: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
        if block.kind != "arguments":
            more["content_index"] = 0
        return self._event(f"{EVENTS[block.kind]}.delta", **_place(block), delta=text, **more)

    def block_stop(self, block: Block) -> bytes:
        done, place = f"{EVENTS[block.kind]}.done", _place(block)
        if block.kind == "arguments":
            events = self._event(done, **place, name=block.name, arguments=block.text)
        else:
            more: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
            events = self._event(done, **place, content_index=0, text=block.text, **more)
            events += self._event("content_part.done", **place, content_index=0, part=_part(block, block.text))
        item = _item(block, self._status if self.is_over else "completed")
        return events + self._event("output_item.done", output_index=block.index, item=item)

    def last(self) -> bytes:
        return self._event(self._status, response=self._response(self._items(), self._status)) + DONE


EVENTS = {"content": "output_text", "reasoning": "reasoning_text", "arguments": "function_call_arguments"}
IDS = {"content": "msg", "reasoning": "rs", "arguments": "fc"}


def _place(block: Block) -> dict[str, Any]:
    return {"item_id": f"{IDS[block.kind]}_{block.id}", "output_index": block.index}


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "content":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _item(block: Block, status: str) -> dict[str, Any]:
    common = {"id": f"{IDS[block.kind]}_{block.id}", "status": status}
    if block.kind == "arguments":
        call = {"call_id": f"call_{block.id[:9]}", "name": block.name, "arguments": block.text}
        return {**common, "type": "function_call", **call}
    content = [_part(block, block.text)] if status != "in_progress" else []
    if block.kind == "reasoning":
        return {**common, "type": "reasoning", "summary": [], "content": content}
    return {**common, "type": "message", "role": "assistant", "content": content}
