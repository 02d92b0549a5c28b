"""Tools and reasoning over HTTP: OpenAI's own client against a real server on two ranks, as agents ask it."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
import openai

from tests.support.paces import pace_words, slow_runs
from tests.support.serving import Served

TEMPLATE = (
    "{% for t in tools or [] %}T {{ t.function.name }} {% endfor %}{% if effort %}{{ effort }} {% endif %}"
    "{% for m in messages %}{{ m.role[0] }} {% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{{ m.content or '' }}\n{% endfor %}a {% if enable_thinking %}{{ '<th' ~ 'ink>' }}{% endif %}"
)
"""Where it says <think>, a model may think before it calls, and this one would not come to an end."""

OPERANDS = {"left": {"type": "integer", "maximum": 99}, "operator": {"enum": ["+", "-"]}}
CALCULATE = {"type": "object", "properties": OPERANDS, "required": ["left", "operator"]}
LIST = {"type": "object", "properties": {"hidden": {"type": "boolean"}}, "required": ["hidden"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": schema, "strict": True}}
    for name, schema in (("calculate", CALCULATE), ("list_files", LIST))
]
ASKED: dict[str, Any] = {"model": "x", "tools": TOOLS, "max_tokens": 300, "seed": 3, "temperature": 0.6}
USER = {"role": "user", "content": "What is 1 + 1?"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = Path(tmp_path_factory.mktemp("template")) / "tools.jinja"
    template.write_text(TEMPLATE)
    with Served(2, ["--chat-template-file", str(template), "-c", "4096", "--parallel", "4"]) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def whole(client: openai.OpenAI, **query: Any) -> tuple[list[tuple[str, str]], str, str | None]:
    """Calls, the reason of the end, content."""
    choice = client.chat.completions.create(**ASKED | query).choices[0]
    calls: Any = choice.message.tool_calls or []
    assert all(len(call.id) == 9 and call.type == "function" for call in calls)
    return (
        [(call.function.name, call.function.arguments) for call in calls],
        choice.finish_reason,
        choice.message.content,
    )


def streamed(client: openai.OpenAI, **query: Any) -> tuple[list[tuple[str, str]], str, str | None]:
    calls, content, finish = dict[int, list[str]](), "", ""
    for piece in client.chat.completions.create(stream=True, **ASKED | query):
        choice = piece.choices[0]
        finish, content = choice.finish_reason or finish, content + (choice.delta.content or "")
        for call in choice.delta.tool_calls or []:
            if call.id:
                assert call.index == len(calls)
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments or ""
    return [(name, params) for name, params in calls.values()], finish, content or None


def check(name: str, params: str) -> None:
    """Raises what is wrong with a call by its schema."""
    result = json.loads(params)
    if name == "calculate":
        assert result.keys() == {"left", "operator"} and result["operator"] in "+-" and result["left"] <= 99
    else:
        assert name == "list_files" and result.keys() == {"hidden"} and isinstance(result["hidden"], bool)


def test_a_loop_of_required_calls_streamed_or_not(client: openai.OpenAI) -> None:
    messages: list[Any] = [USER]
    for step in range(5):
        query = {"messages": messages, "tool_choice": "required", "parallel_tool_calls": False, "seed": step}
        calls, finish, content = whole(client, **query)
        assert streamed(client, **query) == (calls, finish, content) and len(calls) == 1
        assert finish == "tool_calls" and content is None
        check(*calls[0])
        function = {"name": calls[0][0], "arguments": calls[0][1]}
        call = {"id": f"abcdefg{step:02}", "type": "function", "function": function}
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        messages = [*messages, {"role": "assistant", "content": None, "tool_calls": [call]}, answer]


def test_a_function_may_be_named_and_several_calls_be_made(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "list_files"}}
    calls, finish, _ = whole(client, messages=[USER], tool_choice=named)
    assert [name for name, _ in calls] == ["list_files"] and finish == "tool_calls"
    result = [whole(client, messages=[USER], tool_choice="required", seed=0)]
    while len(result[-1][0]) < 2 and len(result) < 6:
        result.append(whole(client, messages=[USER], tool_choice="required", seed=len(result)))
    assert len(result[-1][0]) > 1
    for name, params in (
        call for calls, finish, _ in result for call in calls[: None if finish == "tool_calls" else -1]
    ):
        check(name, params)


def test_a_call_that_is_cut_off_is_told_as_far_as_it_came(client: openai.OpenAI) -> None:
    query = {"messages": [USER], "tool_choice": "required", "max_tokens": 24}
    calls, finish, _ = whole(client, **query)
    assert finish == "length" and streamed(client, **query)[:2] == (calls, finish)


def test_without_a_choice_the_model_decides(client: openai.OpenAI, served: Served) -> None:
    bare = {"model": "x", "messages": [USER], "max_tokens": 16, "seed": 3, "temperature": 0.6}
    text = client.chat.completions.create(**bare).choices[0].message.content  # type: ignore[call-overload]
    off: Any = {"messages": [USER], "tool_choice": "none", "max_tokens": 16}
    assert whole(client, **off) == ([], "length", text) == streamed(client, **off)
    used = client.chat.completions.create(**ASKED | {"messages": [USER], "max_tokens": 1}).usage
    assert used and used.prompt_tokens > client.chat.completions.create(**ASKED | off).usage.prompt_tokens


def test_the_template_is_steered_and_reasoning_split_off(served: Served) -> None:
    def ask(**more: Any) -> dict[str, Any]:
        query = {"messages": [USER], "max_tokens": 12, "seed": 3, **more}
        result: dict[str, Any] = served.http.post("/v1/chat/completions", json=query).json()
        return result

    plain, longer = ask(), ask(chat_template_kwargs={"effort": "much much more"})
    assert longer["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    thought = ask(reasoning_effort="high")["choices"][0]["message"]
    assert thought["reasoning_content"] and thought["content"] == ""
    retained = ask(reasoning_effort="high", reasoning_format="none")["choices"][0]["message"]
    assert retained["content"].strip() == thought["reasoning_content"].strip() and "reasoning_content" not in retained
    query = {"messages": [USER], "max_tokens": 12, "seed": 3, "reasoning_effort": "high", "stream": True}
    lines = served.http.post("/v1/chat/completions", json=query).text.split("\n\n")
    objects = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    deltas = [each["choices"][0]["delta"] for each in objects]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought["reasoning_content"]


def test_grammars_and_stop_strings_are_for_what_follows_the_reasoning(served: Served) -> None:
    def ask(**more: Any) -> Any:
        query = {"messages": [USER], "max_tokens": 48, "seed": 3, "reasoning_budget_tokens": 12} | more
        return served.http.post("/v1/chat/completions", json=query | {"reasoning_effort": "high"}).json()

    reply = ask()
    free = reply["choices"][0]["message"]["reasoning_content"]
    n_reasoning = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 12 < n_reasoning < reply["usage"]["completion_tokens"], "the end's tokens are counted"
    for more in ({"json_schema": LIST}, {"grammar": 'root ::= "yes" | "no"'}, {"guided_choice": ["yes", "no"]}):
        for guesses in (True, False):
            message = ask(guesses=guesses, **more)["choices"][0]["message"]
            assert message["reasoning_content"] == free
            assert message["content"] in ("yes", "no") or json.loads(message["content"]).keys() == {"hidden"}
    stopped, all_of_it = (ask(stop=[free[3:6]], reasoning_format=each) for each in ("deepseek-legacy", "none"))
    assert stopped["choices"][0]["message"]["reasoning_content"] == free
    assert all_of_it["choices"][0]["message"]["content"] == free[:3]
    assert all_of_it["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tools": {}}, "tools is {}; give a list of up to 128 functions"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "there are no tools of type function"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "the function calculate twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 'tools[0].function.name is "a b"'),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "give a JSON schema"),
        ({"tools": TOOLS, "tool_choice": "must"}, "it is auto, none, required, or an object"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "name one of the tools"),
        ({"tools": TOOLS, "tool_choice": "required", "grammar": 'root ::= "a"'}, "both say what the text must be"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "leave one of them out"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
                "tool_choice": "required",
            },
            "the tools' JSON schema cannot be used",
        ),
        ({"chat_template_kwargs": {"tools": []}}, "without add_generation_prompt, messages, tools"),
        ({"reasoning_effort": "enough"}, "it is one of none, minimal"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls is 1; give true or false"),
        ({"messages": [USER, {"role": "user", "content": "x", "tool_calls": [1]}]}, "an assistant's message may have"),
        ({"prompt": "a", "tools": TOOLS}, "tools are for chats"),
    ],
)
def test_what_is_wrong_with_tools_is_said(served: Served, fields: dict[str, Any], why: str) -> None:
    url, more = ("/v1/completions", {}) if "prompt" in fields else ("/v1/chat/completions", {"messages": [USER]})
    answer = served.http.post(url, json=more | fields)
    assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text


def test_reasoning_ends_with_its_budget(served: Served) -> None:
    query: dict[str, Any] = {"messages": [USER], "max_tokens": 40, "seed": 3, "enable_thinking": True}
    free = served.http.post("/v1/chat/completions", json=query).json()["choices"][0]["message"]
    query |= {"reasoning_budget_tokens": 6, "reasoning_budget_message": " So:"}
    message = served.http.post("/v1/chat/completions", json=query).json()["choices"][0]["message"]
    thought, said, rest = message["reasoning_content"].rpartition(" So:")
    assert said and not rest and message["content"] and free["reasoning_content"].startswith(thought)
    thinking = {"type": "enabled", "budget_tokens": 0}
    reply = served.http.post("/v1/messages", json={**query, "reasoning_budget_tokens": None, "thinking": thinking})
    assert [block["type"] for block in reply.json()["content"]] == ["thinking", "text"], reply.text


def test_a_request_without_guesses_has_the_same_text(tmp_path: Path) -> None:
    """Beside one with guesses, and by a policy that guesses whether it pays or not."""
    query = {"prompt": "def read_lines(path):\n", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    pace = pace_words(tmp_path, slow_runs(20))
    with Served(2, ["-c", "4096", "--parallel", "4", "--policy", "pipeinfer", *pace]) as served:

        def completion(more: dict[str, Any]) -> tuple[str, int]:
            reply = served.http.post("/v1/completions", json={**query, **more}).json()
            return reply["choices"][0]["text"], reply["timings"]["draft_n"]

        text, n_guesses = completion({})
        with ThreadPoolExecutor(3) as threads:
            asked: list[dict[str, Any]] = [{}, {"guesses": False}, {"speculative.n_max": 0}]
            (beside, _), *others = threads.map(completion, asked)
    assert n_guesses and beside == text and others == [(text, 0)] * 2
