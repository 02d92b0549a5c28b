"""Other APIs than chats and completions, by their own clients, against a real server on two ranks."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
pytest.importorskip("anthropic", reason="the extra `dev` is not installed")
import anthropic
import openai

from pipeinfer.errors import UserError
from pipeinfer.job.requests.fields import PassedOver
from pipeinfer.server.infill import infill_of, with_suffix
from tests.server.test_serve_tools import TEMPLATE
from tests.support.serving import Served

USER: list[Any] = [{"role": "user", "content": "What is 1 + 1?"}]
SCHEMA = {"type": "object", "properties": {"hidden": {"type": "boolean"}}, "required": ["hidden"]}
ORIGIN = "https://chat.example"
OTHER_ORIGIN = "https://more.example"
LONG = "x " * 2000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = Path(tmp_path_factory.mktemp("template")) / "tools.jinja"
    template.write_text(TEMPLATE)
    words = ["--chat-template-file", str(template), "-c", "4096", "--parallel", "4", "--log-format", "json"]
    with Served(2, [*words, "--allow-origin", ORIGIN, "--allow-origin", OTHER_ORIGIN, "--seed", "5"]) as server:
        yield server


@pytest.fixture(scope="module")
def claude(served: Served) -> Any:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(served: Served) -> Any:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def text(served: Served, **more: Any) -> str:
    reply = served.http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 16} | more).json()
    return str(reply["choices"][0]["message"]["content"])


def test_messages_are_the_chat_s(served: Served, claude: Any) -> None:
    query: Any = {"model": "any", "max_tokens": 16, "messages": USER}
    reply = claude.messages.create(**query)
    assert reply.content[0].text == text(served) and reply.stop_reason == "max_tokens" and reply.role == "assistant"
    assert reply.usage.output_tokens == 16
    n_prompt = claude.messages.count_tokens(model="any", messages=USER).input_tokens
    assert n_prompt == reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    with claude.messages.stream(**query) as stream:
        assert "".join(stream.text_stream) == reply.content[0].text
        assert stream.get_final_message().usage.output_tokens == 16
    with_system = claude.messages.create(**query, system=[{"type": "text", "text": "of"}])
    assert with_system.content[0].text == text(served, messages=[{"role": "system", "content": "of"}, *USER])


def test_a_loop_of_messages_with_tools(claude: Any) -> None:
    tools = [{"name": "list_files", "description": "x", "input_schema": SCHEMA}]
    messages = list(USER)
    for _ in range(3):
        query: Any = {"model": "any", "max_tokens": 200, "messages": messages, "tools": tools}
        query["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
        reply = claude.messages.create(**query)
        (block,) = reply.content
        assert reply.stop_reason == "tool_use" and block.name == "list_files" and set(block.input) == {"hidden"}
        with claude.messages.stream(**query) as stream:
            streamed = stream.get_final_message()
        assert streamed.content[0].input == block.input and streamed.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "a.txt"}]}
        messages.append({"role": "assistant", "content": [each.model_dump() for each in reply.content]})
        messages.append({"role": "user", "content": [result]})


def test_models_are_listed_as_both_know_them(claude: Any, client: Any) -> None:
    (here,), (there,) = claude.models.list().data, client.models.list().data
    assert here.type == "model" and here.display_name == here.id == there.id
    assert here.created_at.timestamp() == there.created


def test_reasoning_is_a_block_and_an_item(claude: Any, client: Any) -> None:
    reply = claude.messages.create(
        model="any", max_tokens=12, messages=USER, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert [block.type for block in reply.content] == ["thinking"]
    response = client.responses.create(
        model="any", max_output_tokens=12, input="What is 1 + 1?", reasoning={"effort": "high"}
    )
    assert response.output[0].type == "reasoning" and response.output[0].content[0].text == reply.content[0].thinking


def test_responses_are_the_chat_s(served: Served, client: Any) -> None:
    reply = client.responses.create(model="any", input="What is 1 + 1?", max_output_tokens=16)
    assert reply.output_text == text(served) and reply.status == "incomplete"
    assert reply.incomplete_details and reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage and reply.usage.output_tokens == 16
    assert reply.output[-1].status == "incomplete" and reply.output[-1].content and reply._request_id == reply.id
    with client.responses.stream(model="any", input="What is 1 + 1?", max_output_tokens=16) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    (item,) = (event.item for event in events if event.type == "response.output_item.done")
    assert item.status == events[-1].response.output[0].status == "incomplete"
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"
    assert "response.output_text.delta" in kinds and "response.output_item.done" in kinds
    query = {"model": "any", "input": "What is 1 + 1?", "max_output_tokens": 4000, "extra_body": {"ignore_eos": True}}
    with client.responses.stream(**query) as stream:
        deltas = (event for event in stream if event.type == "response.output_text.delta")
        assert len([*islice(deltas, 5)]) == 5, "it comes as it is written"
    data: Any = [
        {"role": "developer", "content": "of"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": USER[0]["content"]}]},
    ]
    as_items = client.responses.create(model="any", input=data, max_output_tokens=16).output_text
    assert as_items == text(served, messages=[{"role": "system", "content": "of"}, *USER])
    assert (
        client.responses.create(
            model="any", input=USER[0]["content"], instructions="of", max_output_tokens=16
        ).output_text
        == as_items
    )


def test_a_loop_of_responses_with_tools(client: Any) -> None:
    tools: Any = [{"type": "function", "name": "list_files", "parameters": SCHEMA, "strict": True}]
    items: list[Any] = list(USER)
    for _ in range(3):
        query: Any = {"model": "any", "input": items, "tools": tools, "tool_choice": "required"}
        query |= {"parallel_tool_calls": False, "max_output_tokens": 200}
        (call,) = client.responses.create(**query).output
        assert call.type == "function_call" and set(json.loads(call.arguments)) == {"hidden"}
        with client.responses.stream(**query) as stream:
            streamed = stream.get_final_response()
        assert streamed.output[0].arguments == call.arguments and streamed.status == "completed"
        items += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "a.txt"}]


def test_llama_server_s_own_endpoints(served: Served) -> None:
    query = {"prompt": "def f(", "n_predict": 8}
    whole = served.http.post("/completion", json=query).json()
    assert whole["content"] == served.text(prompt="def f(", max_tokens=8) and whole["stop_type"] == "limit"
    lines = served.http.post("/completion", json=query | {"stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(event["content"] for event in events) == whole["content"] and events[-1]["stop"]
    tokens = served.http.post("/completion", json=query | {"return_tokens": True}).json()["tokens"]
    assert len(tokens) == 8 and [token for event in events for token in event["tokens"]] == tokens
    assert whole["tokens"] == [] == events[-1]["tokens"], "only where they are asked for"
    stopped = query | {"stop": [whole["content"][-1]], "return_tokens": True}
    tokens = served.http.post("/completion", json=stopped).json()["tokens"]
    lines = served.http.post("/completion", json=stopped | {"stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert tokens and [token for event in events for token in event["tokens"]] == tokens, "also those without text"
    query |= {"dry_multiplier": 1, "dry_sequence_breakers": ["a"], "samplers": ["dry", "min_p", "top_k"], "n_probs": 2}
    settings = served.http.post("/completion", json=query).json()["generation_settings"]
    assert settings["temperature"] == 1 and settings["dry_sequence_breakers"] == ["a"] and settings["n_probs"] == 2
    assert settings["samplers"] == ["dry", "min_p", "top_k"] and settings["max_tokens"] == 8
    assert not {"temp", "dry_breakers", "sampler_order", "ends", "base_chunk", "reasoning"} & settings.keys()
    props = served.http.get("/props").json()
    assert props["default_generation_settings"]["params"].keys() == settings.keys()
    assert props["total_slots"] == 4 and props["chat_template"] == TEMPLATE
    prompt = served.http.post("/apply-template", json={"messages": USER}).json()["prompt"]
    assert prompt == "u What is 1 + 1?\na "
    assert "no tokens for a text with a hole" in served.http.post("/infill", json={"input_prefix": "a"}).text
    assert (
        served.http.post("/completions", json={"prompt": "def f(", "n_predict": 8}).json()["content"]
        == whole["content"]
    )
    chat = {"messages": USER, "max_tokens": 4}
    for path, body in (("/chat/completions", chat), ("/responses", {"input": "What?", "max_output_tokens": 4})):
        short, full = (served.http.post(f"{version}{path}", json=body | {"seed": 1}).json() for version in ("", "/v1"))
        assert short["object"] == full["object"] and short["usage"]["total_tokens"] == full["usage"]["total_tokens"]
        for version in ("", "/v1"):
            counted = served.http.post(f"{version}{path}/input_tokens", json=body).json()
            n_tokens = short["usage"].get("prompt_tokens", short["usage"].get("input_tokens"))
            assert counted == {"input_tokens": n_tokens, "object": "response.input_tokens"}
    meta = served.http.get("/v1/models").json()["data"][0]["meta"]
    assert meta["n_ctx_train"] > 0 < meta["n_embd"] and meta["n_params"] * 5 > meta["size"] > meta["n_params"] / 5
    missing = served.http.post("/v1/embeddings", json={"input": "a"})
    assert missing.status_code == 404 and "no embeddings" in missing.json()["error"]["message"]


@pytest.mark.parametrize(
    ("url", "fields", "data"),
    [
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "models here read text alone",
        ),
        (
            "/v1/messages",
            {
                "messages": USER,
                "tools": [{"type": "bash_20250124", "name": "bash"}],
                "tool_choice": {"type": "tool", "name": "bash"},
            },
            "name one of the tools",
        ),
        ("/v1/messages", {"messages": USER, "tool_choice": {"type": "some"}}, "its type is auto, any, none or tool"),
        ("/v1/messages", {"messages": 1}, "messages is 1"),
        ("/v1/responses", {"input": []}, "input is []"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "no answer is kept here"),
        (
            "/v1/responses",
            {"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"},
            "there are no tools of type function",
        ),
        ("/v1/responses", {"input": "a", "include": ["message.output_text.logprobs"]}, "have no log-probabilities"),
        ("/v1/responses", {"input": [{"type": "item_reference"}]}, "input[0] is of type"),
    ],
)
def test_what_cannot_be_translated_is_said(served: Served, url: str, fields: dict[str, Any], data: str) -> None:
    answer = served.http.post(url, json=fields)
    assert answer.status_code == 400 and data in answer.json()["error"]["message"], answer.text
    assert answer.json()["type"] == "error"


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("/completion", {"prompt": LONG}),
        ("/completion", {"prompt": [5] * 1024, "stream": True}),
        ("/v1/completions", {"prompt": "🙂é\n" * 80_000}),  # so long that its tokens are not counted
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "stream": True}),
        ("/v1/chat/completions", {"messages": USER * 1030}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_as_clients_know_it(
    served: Served, url: str, fields: dict[str, Any]
) -> None:
    answer = served.http.post(url, json=fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "exceed_context_size_error", answer.text
    assert error["code"] == "context_length_exceeded" and error["n_prompt_tokens"] >= error["n_ctx"] == 1024
    words = f"{error['n_prompt_tokens']} tokens) exceeds the available context size (1024 tokens): "
    assert words in error["message"] and "; s" in error["message"], "what to do is said too"
    anthropic_s = f"prompt is too long: {error['n_prompt_tokens']} tokens > 1024 maximum; "
    assert error["message"].startswith(anthropic_s if url == "/v1/messages" else "the request (")
    assert error["param"] == next((name for name in ("prompt", "messages") if name in fields), None)


# -- what the server passes over, says and lets in


def test_fields_that_are_off_are_taken_and_others_passed_over_with_a_warning(served: Served) -> None:
    off = {
        "typical_p": 1.0,
        "mirostat": 0,
        "mirostat_tau": 5,
        "dry_multiplier": 0.0,
        "xtc_probability": 0,
        "top_n_sigma": -1,
    }
    plain = served.text(prompt="def f(", max_tokens=8)
    assert served.text(prompt="def f(", max_tokens=8, **off) == plain
    for _ in range(2):
        query = {"prompt": "def f(", "max_tokens": 8, "frobnicate": 1, "id_slot": 2}
        answer = served.http.post("/v1/completions", json=query)
        assert answer.headers["x-pipeinfer-passed-over"] == "frobnicate, id_slot"
        assert answer.json()["choices"][0]["text"] == plain
    with served.http.stream("POST", "/v1/completions", json=query | {"stream": True}) as stream:
        assert stream.headers["x-pipeinfer-passed-over"] == "frobnicate, id_slot"
    names, lines = ("frobnicate", "id_slot"), lambda: [line for line in served.lines if "without a part" in line]
    served.until(lambda: all(any(name in line for line in lines()) for name in names))
    assert [sum(name in line for line in lines()) for name in names] == [1, 1]


def test_the_log_has_a_line_a_request(served: Served) -> None:
    id = served.complete(prompt="def f(", max_tokens=8)["id"]
    served.until(lambda: any(id in line for line in served.lines))
    (line,) = (json.loads(line) for line in served.lines if id in line)
    assert line["predicted_n"] == 8 and line["finish"] == "length" and line["path"] == "/v1/completions"
    assert line["ttft_s"] > 0 and "def f(" not in json.dumps(line)


def test_pages_of_an_origin_that_is_named_may_ask(served: Served) -> None:
    asks = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "x-a, x-b"}
    before = served.http.options("/v1/chat/completions", headers=asks)
    assert before.status_code == 204 and before.headers["access-control-allow-headers"] == "x-a, x-b"
    reply = served.http.get("/v1/models", headers={"origin": ORIGIN})
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == ORIGIN
    assert served.http.get("/v1/models", headers={"origin": OTHER_ORIGIN}).status_code == 200
    assert served.http.get("/v1/models", headers={"origin": "https://other.example"}).status_code == 403


def prompts(n_ctx: int, **marks: int) -> Any:
    """A vocabulary of characters, and of these further marks."""

    def encode(text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return list(map(ord, text))

    fill_in = {"pre": 1, "suf": 2, "mid": 3, **marks}
    tokenizer = SimpleNamespace(fill_in=fill_in, adds_bos=True, bos=0, longest=1, encode=encode)
    return SimpleNamespace(tokenizer=tokenizer, n_ctx=n_ctx, fitting=lambda text: text)


def spelled(tokens: list[int]) -> str:
    """Marks as digits."""
    return "".join(chr(token) if token > 9 else str(token) for token in tokens)


@pytest.mark.parametrize(
    ("marks", "extra", "before"),
    [
        ({}, [], ""),
        ({}, ["t"], "\n\n--- snippet ---\n\nt"),
        ({"sep": 4}, [], "4filename\n"),
        ({"sep": 4, "rep": 5}, ["t", "u"], "5myproject\n4f\nt4f\nu4filename\n"),
    ],
)
def test_a_text_with_a_hole_is_asked_as_llama_server_writes_it(
    marks: dict[str, int], extra: list[str], before: str
) -> None:
    files = [{"filename": "f", "text": text} for text in extra]
    values = {"input_prefix": "a", "prompt": "b", "input_suffix": "c", "input_extra": files, "n_predict": 4}
    body = infill_of(values, prompts(4096, **marks), PassedOver())
    assert spelled(body.pop("prompt")) == f"{before}01ab2c3" and body == {"n_predict": 4}


def test_what_is_far_from_the_hole_is_left_out_where_the_context_is_short() -> None:
    values: Any = {"input_prefix": "a" * 5000 + "b", "prompt": "p" * 10, "input_suffix": "c" + "d" * 5000}
    values["input_extra"] = [{"text": name * 1000} for name in "stu"]
    for n_ctx, n_prefix, n_suffix in ((4096, 1536, 500), (256, 153, 39)):
        prompt = spelled(infill_of(values, prompts(n_ctx, sep=4), PassedOver())["prompt"])
        files, _, hole = prompt.partition("01")
        assert hole == f"{'a' * (n_prefix - 1)}b{'p' * 10}2c{'d' * (n_suffix - 1)}3"
        assert len(prompt) < n_ctx and "4tmp\ns" not in files
    assert files == ""
    prompt = spelled(infill_of(values, prompts(4096, sep=4), PassedOver())["prompt"])
    for name in ("n_predict", "max_tokens"):
        longer = spelled(infill_of({**values, name: 1000}, prompts(4096, sep=4), PassedOver())["prompt"])
        assert len(longer) == 4096 - 1000 and prompt.endswith(longer)
    assert len(prompt) == 4096 - 512 and prompt.startswith("t" * 500) and f"4tmp\n{'u' * 1000}4filename\n01" in prompt


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"input_prefix": None}, "input_prefix is null"),
        ({"input_suffix": None}, "input_suffix is null"),
        ({"prompt": ["a"]}, "prompt is "),
        *(({"input_extra": [each]}, "input_extra is ") for each in ({}, {"filename": "f"}, {"text": 1}, "t")),
        ({"input_extra": [{"text": "t", "filename": 123}]}, "input_extra is "),
    ],
)
def test_wrong_fields_of_a_text_with_a_hole_are_named(wrong: dict[str, Any], why: str) -> None:
    fields = {"input_prefix": "a", "input_suffix": "b"} | wrong
    with pytest.raises(UserError, match=why):
        infill_of({name: value for name, value in fields.items() if value is not None}, prompts(4096), PassedOver())


def test_a_completion_may_have_a_suffix() -> None:
    for prompt, expected in (
        ("a", [0, 1, "a", 2, "c", 3]),
        ([7, 8], [0, 1, 7, 8, 2, "c", 3]),
        (["a"], [[0, 1, "a", 2, "c", 3]]),
        (["a", [7]], [[0, 1, "a", 2, "c", 3], [0, 1, 7, 2, "c", 3]]),
    ):
        assert with_suffix({"prompt": prompt, "suffix": "c"}, prompts(4096), PassedOver())["prompt"] == expected
    for wrong, why in (
        ({"suffix": "c"}, "prompt is null"),
        ({"prompt": "a", "suffix": 1}, "suffix is 1"),
        ({"prompt": "a", "suffix": "c", "echo": True}, "echo and suffix do not go together"),
    ):
        with pytest.raises(UserError, match=why):
            with_suffix(wrong, prompts(4096), PassedOver())
