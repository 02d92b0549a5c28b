"""What coding agents ask, in small: a long system prompt with twelve tools, several turns, others beside it."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from tests.server.test_serve_tools import TEMPLATE
from tests.support.paces import pace_words, slow_runs
from tests.support.serving import Served, lines_of, open_texts

CHATS = "/v1/chat/completions"
SYSTEM = "You are a coding agent. " + Path(__file__).read_text()[:1700]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "maxLength": 8}, "line": {"type": "integer"}},
                "required": ["path"],
            },
        },
    }
    for name in ("read", "write", "edit", "list", "glob", "grep", "run", "todo", "fetch", "search", "cell", "task")
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "list", "arguments": '{"path": "src"}'}}
TURNS: list[list[dict[str, Any]]] = [
    [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Which file reads the options?"}],
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "options.py\nmain.py"},
    ],
    [{"role": "assistant", "content": "options.py."}, {"role": "user", "content": "Read it."}],
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(2, words(tmp_path_factory.mktemp("template"))) as server:
        yield server


def words(folder: Path) -> list[str]:
    (folder / "tools.jinja").write_text(TEMPLATE)
    return ["--chat-template-file", str(folder / "tools.jinja"), "-c", "8192", "--parallel", "4"]


def body(n_turns: int, **more: Any) -> dict[str, Any]:
    messages = [message for turn in TURNS[:n_turns] for message in turn]
    return {
        "messages": messages,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 60,
        "seed": 3,
        "temperature": 0.6,
        **more,
    }


def pieces(served: Served, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with served.http.stream("POST", CHATS, json=fields | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in lines_of(answer):
            if line != "[DONE]":
                yield json.loads(line)


def test_turns_come_from_the_cache_and_streams_are_the_same(served: Served) -> None:
    n_before = 0
    for n_turns in range(1, len(TURNS) + 1):
        fields = body(n_turns, return_progress=True, stream_options={"include_usage": True})
        name, arguments, read, usage = "", "", list[dict[str, int]](), dict[str, Any]()
        for piece in pieces(served, fields):
            read += [piece["prompt_progress"]] if "prompt_progress" in piece else []
            usage = piece["usage"] or usage
            for call in piece["choices"][0]["delta"].get("tool_calls", []) if piece["choices"] else []:
                name += call["function"].get("name", "")
                arguments += call["function"].get("arguments", "")
        whole = served.http.post(CHATS, json=body(n_turns)).json()
        (call,) = whole["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": name, "arguments": arguments}
        n_cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert n_cached >= 0.9 * n_before - 64  # whole blocks
        assert all(each["total"] == usage["prompt_tokens"] and each["cache"] == n_cached for each in read)
        processed = [each["processed"] for each in read]
        assert processed == sorted(set(processed))
        n_before = usage["prompt_tokens"]
    assert n_before > 600


def test_the_progress_of_a_prompt_is_told_in_steps(served: Served) -> None:
    """Where the server was busy, several are one."""
    numbers = itertools.count()

    def n_steps() -> int:
        messages = [{"role": "user", "content": f"{next(numbers)} {SYSTEM}"}]
        fields = body(1, tool_choice="none", messages=messages, max_tokens=1, return_progress=True)
        return sum("prompt_progress" in piece for piece in pieces(served, fields))

    served.until(lambda: n_steps() > 3)


def test_a_grammar_begins_with_the_cache_of_turns_that_had_none(served: Served, tmp_path: Path) -> None:
    tools = [*TOOLS[1:], TOOLS[0]]  # no other test has evaluated their prompt
    free = body(2, tools=tools, tool_choice="auto", seed=5)
    usage = served.http.post(CHATS, json=free).json()["usage"]
    n_before, held = usage["prompt_tokens"], body(3, tools=tools, seed=6, frequency_penalty=0.5)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    result = served.http.post(CHATS, json=held).json()
    assert result["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0.9 * n_before - 64
    with Served(1, words(tmp_path)) as other:
        anew = other.http.post(CHATS, json=held).json()
    calls = [each["choices"][0]["message"]["tool_calls"][0]["function"] for each in (result, anew)]
    assert calls[0] == calls[1]


def test_others_go_on_while_a_prompt_is_read_and_who_leaves_frees_its_place(tmp_path: Path) -> None:
    fields = body(1, tool_choice="none", messages=[{"role": "user", "content": "other " + SYSTEM}])
    pace = pace_words(tmp_path, slow_runs(500))  # the prompt takes many runs
    with (
        Served(2, [*words(tmp_path), *pace]) as served,
        served.stream(prompt="def f", max_tokens=400, ignore_eos=True, seed=1) as other,
    ):
        tokens = lines_of(other)
        next(tokens)
        reading = (piece for piece in pieces(served, fields | {"return_progress": True}) if "prompt_progress" in piece)
        n_read = next(reading)["prompt_progress"]["processed"]
        (mine,) = [slot for slot in open_texts(served.http) if slot["n_predict"] == 60]
        assert n_read <= mine["n_prompt_tokens_processed"] <= mine["n_prompt_tokens"]
        next(tokens)
        reading.close()
        served.until(lambda: len(open_texts(served.http)) == 1)
        assert served.http.get("/health").status_code == 200
        served.until(lambda: f" of {mine['n_prompt_tokens']} prompt tokens, 0 tokens, left\n" in served.errors)
        other.close()
        served.until(lambda: not open_texts(served.http))


def test_states_are_not_saved_and_what_helps_instead_is_said(served: Served) -> None:
    answer = served.http.post("/slots/0?action=save", json={"filename": "a.bin"})
    error = answer.json()["error"]
    assert answer.status_code == 501 and error["type"] == "not_supported_error" and "--kv-disk" in error["message"]


def test_a_prompt_that_does_not_fit_is_refused_at_once_with_the_way_out(served: Served) -> None:
    def n_evaluated() -> list[str]:
        lines = served.http.get("/metrics").text.splitlines()
        return [line for line in lines if line.startswith("llamacpp:prompt_tokens_total")]

    before = n_evaluated()
    answer = served.http.post(CHATS, json=body(1, messages=[{"role": "user", "content": SYSTEM * 9}]))
    error = answer.json()["error"]
    assert answer.status_code == 400 and n_evaluated() == before and before
    assert "; shorten it to less than " in error["message"] and error["n_prompt_tokens"] >= error["n_ctx"]


def test_what_was_read_for_a_client_that_left_is_there_when_it_asks_again(served: Served) -> None:
    fields = body(1, tool_choice="none", messages=[{"role": "user", "content": "again " + SYSTEM}])
    reading = (piece for piece in pieces(served, fields | {"return_progress": True}) if "prompt_progress" in piece)
    n_read = next(reading)["prompt_progress"]["processed"]
    reading.close()
    served.until(lambda: not open_texts(served.http))
    usage = served.http.post(CHATS, json=fields).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= n_read
