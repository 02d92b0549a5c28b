"""Chat templates: what comes out of them, what hostile ones come to, and which tokens their texts are."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeinfer.child import LimitedProcess, ProcessLimits
from pipeinfer.errors import HostFault, UserError
from pipeinfer.models.text.chat_template import (
    PLAIN_TEMPLATE,
    ChatTemplate,
    Rendered,
    TemplateFault,
    encode_continuation,
    encode_rendered,
)
from pipeinfer.models.text.messages import ChatMessage
from pipeinfer.models.text.stops import StopStrings
from pipeinfer.models.text.tokenizer import TextStream, Tokenizer
from tests.support.gguf_factory import CHAT_TEMPLATE, MARKERS, Shape, write_model
from tests.support.jobs import COMMAND, environment, finish, run_json

LITTLE = LimitedProcess("pipeinfer.models.text.template_child", ProcessLimits(cpu_s=1, n_bytes=256 << 20))


def little(source: str) -> ChatTemplate:
    """A template with little time, memory and room for its text."""
    return ChatTemplate(source, "the template", n_characters=10_000, process=LITTLE)


TURNS = [
    ChatMessage("system", "of"),
    ChatMessage("user", "the <b>"),
    ChatMessage("assistant", " a"),
    ChatMessage("user", "and?"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "model.gguf"
    return write_model(path, Shape(n_layer=2, n_vocab=384), template=CHAT_TEMPLATE)


@pytest.fixture
def tokenizer(model: Path) -> Iterator[Tokenizer]:
    found = Tokenizer(model)
    yield found
    found.close()


def render(source: str, tokenizer: Tokenizer, **variables: object) -> str:
    return replace(little(source), variables=variables, now_s=0.0).render(TURNS, tokenizer).text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            CHAT_TEMPLATE,
            "<s><|system|>\nof<|end|>\n<|user|>\nthe <b><|end|>\n<|assistant|>\n a<|end|>\n<|user|>\nand?"
            "<|end|>\n<|assistant|>\n",
        ),
        (PLAIN_TEMPLATE, "of\n\nUser: the <b>\n\nAssistant: a\n\nUser: and?\n\nAssistant:"),
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": "the <b>"}'),
        (
            "{% for m in messages %}\n  {% if loop.last %}{% break %}{% endif %}\n{{ m.role[0] }}\n{% endfor %}",
            "s\nu\na\n",
        ),
        ("{% generation %}{{ eos_token }}{% endgeneration %}", "</s>"),
        ("{{ strftime_now('%Y') in ('1969', '1970') }} {{ tools is none }} {{ thinking }}", "True True no"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "4"),
    ],
)
def test_templates_say_what_they_say_elsewhere(tokenizer: Tokenizer, source: str, text: str) -> None:
    assert render(source, tokenizer, thinking="no") == text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('touch escaped') }}", "unsafe"),
        ("{{ lipsum.__globals__['os'].system('touch escaped') }}", "unsafe"),
        ("{{ ('{0.__class__.__mro__}').format(messages) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s"),
        ("{{ range(10**9) | list }}", "too big"),
        ("{{ 'a' * 10**9 }}", "more than 256 MiB of memory"),
        ("{% for a in range(99999) %}aaaa{% endfor %}", "renders 399996 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
        ("{{ raise_exception('there is no system here') }}", "there is no system here"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[9].content.strip() }}", "undefined"),
    ],
)
def test_hostile_and_broken_templates_end_in_an_error(
    tokenizer: Tokenizer, tmp_path: Path, source: str, words: str
) -> None:
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        with pytest.raises(UserError) as error:
            render(source, tokenizer)
    finally:
        os.chdir(before)
    assert str(error.value).startswith("the template ") and words.lower() in str(error.value).lower()
    assert str(error.value).endswith("give another with --chat-template-file FILE")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_parsed_is_found_before_anything_is_said(tokenizer: Tokenizer) -> None:
    for source in ("{% if %}", "{{ messages | nothing_such }}", "{% for m in messages %}", "{% nothing_such %}"):
        template = little(source)
        with pytest.raises(TemplateFault, match="the template Template") as caught:
            template.check()
        assert caught.value.is_broken and "the template" not in caught.value.what
        found = template.render_all([TURNS] * 3, tokenizer)
        assert [str(each) for each in found] == [str(caught.value)] * 3
    refuses = little("{{ raise_exception('not this') }}")
    refuses.check()
    with pytest.raises(TemplateFault) as caught:
        refuses.render(TURNS, tokenizer)
    assert not caught.value.is_broken and caught.value.what.endswith("not this")


def test_a_process_that_somebody_kills_is_started_again_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = little("{{ messages[1].content }}")
    template.process.start_ahead()
    template.process.ahead[0].kill()
    template.process.ahead[0].wait()
    assert template.render(TURNS, tokenizer).text == "the <b>"
    monkeypatch.setattr("pipeinfer.child.START", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(HostFault, match="was killed, stopped or not started, 2 times"):
        template.render(TURNS, tokenizer)


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_broken_template_of_the_user_is_refused_before_loading(model: Path, tmp_path: Path, command: str) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% if %}")
    words = ["--port", "0"] if command == "serve" else []
    done = finish(1, [command, "-m", str(model), "-t", "1", "--chat-template-file", str(template), *words])
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"--chat-template-file {template} TemplateSyntaxError" in done.stderr


def test_a_model_s_broken_template_leaves_completions_to_its_server(tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="the extra `serve` is not installed")
    from tests.support.serving import Served

    model = write_model(tmp_path / "model.gguf", Shape(n_layer=2, n_vocab=384), template="{% if %}")
    done = finish(1, ["chat", "-m", str(model), "-t", "1"])
    assert done.returncode == 2 and f"the chat template of {model} TemplateSyntaxError" in done.stderr, done.stderr
    with Served(1, ["-m", str(model)]) as served:
        assert "TemplateSyntaxError" in served.errors and "chats are refused" in served.errors
        assert served.text(prompt="the", max_tokens=2)
        said = [{"role": "user", "content": "a"}]
        answer = served.http.post("/v1/chat/completions", json={"messages": said, "max_tokens": 2})
        error = answer.json()["error"]
        assert answer.status_code == 500 and error["type"] == "server_error"
        assert "TemplateSyntaxError" in error["message"] and str(tmp_path) not in answer.text


def test_a_pipe_none_of_whose_lines_is_answered_ends_with_2(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "picky.jinja"
    template.write_text("{% if messages[0].content == 'x' %}{{ raise_exception('not this') }}{% endif %}the")
    words = ["chat", "-m", str(model), "-t", "1", "-n", "2", "--chat-template-file", str(template)]
    for said, code in (("x\nx\n", 2), ("x\na\n", 0)):
        done = subprocess.run(
            [*COMMAND, *words], input=said, capture_output=True, text=True, env=environment(), timeout=60
        )
        assert done.returncode == code and done.stderr.count("not this") == said.count("x"), done.stderr


def test_a_template_that_sleeps_on_a_busy_host_is_ended_by_the_clock(tokenizer: Tokenizer) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    process = LimitedProcess("pipeinfer.models.text.template_child", ProcessLimits(cpu_s=1000, wall_s=0.5))
    with pytest.raises(UserError, match=r"is not done after 0.5 s"):
        ChatTemplate(loop, "the template", process=process).render(TURNS, tokenizer)


def test_a_chat_that_takes_too_long_leaves_those_beside_it_alone(tokenizer: Tokenizer) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if messages[0].content == 'x' %}" + loop + "{% endif %}said", "the template")
    found = template.render_all([[ChatMessage("user", said)] for said in ("a", "x", "b")], tokenizer)
    said = Rendered("said")
    assert [found[0], str(found[1])[:37], found[2]] == [said, "the template takes more than 1 s; giv", said]


def test_markers_are_tokens_and_a_text_begins_once(tokenizer: Tokenizer) -> None:
    user, end = tokenizer.encode("<|user|>", False, True), tokenizer.encode("<|end|>", False, True)
    assert len(user) == len(end) == 1 and tokenizer.is_end(end[0])
    with_bos, without = (
        encode_rendered(tokenizer, Rendered("<s><|user|>\nthe")),
        encode_rendered(tokenizer, Rendered("<|user|>\nthe")),
    )
    assert with_bos == without and with_bos[:2] == [tokenizer.bos, *user] and with_bos.count(tokenizer.bos) == 1


@pytest.mark.parametrize("before", ["the", "the model<|end|>", "a\n"])
@pytest.mark.parametrize("after", ["<|end|>\n<|user|>\nthe layer", "\n\nUser: the", " and in", "\n"])
def test_a_continuation_is_the_text_that_follows(tokenizer: Tokenizer, before: str, after: str) -> None:
    tokens = encode_continuation(tokenizer, Rendered(after))
    assert tokens is not None
    first = encode_rendered(tokenizer, Rendered(before))
    if after.startswith("<"):
        assert [*first, *tokens] == encode_rendered(tokenizer, Rendered(before + after))
    shown = b"".join(tokenizer.decode_piece(token, special=True) for token in tokens).decode()
    assert shown.replace("|> ", "|>") == after  # this vocabulary has a space behind every marker


def test_what_cannot_continue_a_text_is_said(tokenizer: Tokenizer) -> None:
    assert encode_continuation(tokenizer, Rendered("the")) is None, "this vocabulary would put a space before it"
    assert encode_continuation(tokenizer, Rendered("")) == []


def test_markers_of_reasoning_pass_through_and_ends_do_not(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("<think>a</think>b<|end|>", False, True)
    shown = {}
    for markers in (False, True):
        stream = TextStream(tokenizer, markers)
        shown[markers] = "".join(map(stream.push, tokens)) + stream.flush()
    assert shown[True].replace(" ", "") == "<think>a</think>b" and shown[False].replace(" ", "") == "ab"
    assert {"<think>", "</think>", "<|end|>"} < set(MARKERS)


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["a", "b\nUs", "er: c"], ["\nUser:"], "ab"),
        (["a", "b\nUs", "ed"], ["\nUser:"], "ab\nUsed"),
        (["a", "b\nUs"], ["\nUser:"], "ab\nUs"),
        (["aab", "aac"], ["aac", "x"], "aab"),
        (["one two"], ["two", "ne"], "o"),
        (["x", "x", "y"], ["xxx"], "xxy"),
        (["plain"], [], "plain"),
    ],
)
def test_stop_strings_are_cut_out_wherever_they_are_cut(pieces: list[str], stops: list[str], text: str) -> None:
    for parts in (pieces, list("".join(pieces)), ["".join(pieces)]):
        found, out = StopStrings(stops), ""
        for part in parts:
            out += found.push(part)
            assert text.startswith(out)
        assert out + found.flush() == text
        assert found.hit == (text != "".join(pieces))


@pytest.mark.parametrize(
    ("text", "thought", "kept"),
    [
        ("Is it b?\n\nNo.</think>\n\na b\n\nc", "</think>", "Is it b?\n\nNo.</think>\n\na "),
        ("<think>b</think>\n\na\n\nc", "", "<think>b</think>\n\na"),
        ("\n <think>b</think><think>b</think>a b", "", "\n <think>b</think><think>b</think>a "),
        ("<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>ab", "", None),
        ("<|channel|>analysis json<|message|>b<|end|><|channel|>final json<|message|>ab", "", None),
        ("<thinb", "", "<thin"),
        ("<think>b</think>", "", "<think>b</think>"),
        ("b</thin", "</think>", "b</thin"),
        ("\n\na", "", ""),
        ("\n\n<think>b</think>a b", "", "\n\n<think>b</think>a "),
        ("<think>b", None, "<think>"),
    ],
)
def test_stop_strings_in_reasoning_end_nothing(text: str, thought: str | None, kept: str | None) -> None:
    for parts in (list(text), [text], [text[:7], text[7:]]):
        stops, out = StopStrings(["b", "\n\n"], thought), ""
        for part in parts:
            out += stops.push(part)
        assert out + stops.flush() == (text[:-1] if kept is None else kept), parts


def test_run_chat_asks_with_the_models_template(model: Path, tokenizer: Tokenizer) -> None:
    asked = [
        "-m",
        str(model),
        "-md",
        "none",
        "-p",
        "the model",
        "-n",
        "8",
        "-t",
        "1",
        "--temp",
        "0",
        "--chat",
        "-sys",
        "of\\na",
    ]
    result = run_json(1, asked)
    text = "<s><|system|>\nof\na<|end|>\n<|user|>\nthe model<|end|>\n<|assistant|>\n"
    assert result["prompt_tokens"] == encode_rendered(tokenizer, Rendered(text))
    plain = run_json(1, [*asked[:-3], "--stop", result["text"][3:5], "--ignore-eos"])
    assert plain["prompt_tokens"] == tokenizer.encode("the model")
    stopped = run_json(1, [*asked, "--stop", result["text"][3:5]])
    assert stopped["text"] == result["text"][: result["text"].index(result["text"][3:5])]
    assert stopped["finish"] == "end" and len(stopped["tokens"]) < 8


def test_without_a_template_a_plain_one_is_named() -> None:
    done = finish(1, ["run", "--chat", "-p", "x", "-n", "4", "--temp", "0", "-t", "1"])
    assert done.returncode == 0 and "has no chat template: a plain one is used" in done.stderr


def test_a_hostile_template_ends_a_job_of_ranks_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{{ ''.__class__.__mro__ }}")
    done = finish(2, ["run", "--chat", "-p", "x", "-md", "none", "--chat-template-file", str(tmp_path / "bad.jinja")])
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "bad.jinja SecurityError" in done.stderr and not done.stdout


def test_templates_may_look_at_variables(model: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file.jinja").write_text("{% if thinking %}<think>{% else %}the{% endif %}")
    words = [
        "run",
        "--json",
        "-m",
        str(model),
        "-md",
        "none",
        "--chat",
        "-f",
        "-",
        "-n",
        "1",
        "--chat-template-file",
        str(tmp_path / "file.jinja"),
        "--chat-template-kwargs",
        '{"thinking": true}',
    ]
    done = subprocess.run([*COMMAND, *words], input="x", capture_output=True, text=True, env=environment(), timeout=60)
    assert json.loads(done.stdout)["prompt_tokens"] == encode_rendered(tokenizer, Rendered("<think>"))


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
CALLED = [
    ChatMessage("user", "x"),
    ChatMessage("assistant", "", {"content": None, "tool_calls": [CALL]}),
    ChatMessage("tool", "2"),
]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
        # as DeepSeek's, which joins texts
        "{% for m in messages %}{% if m.content is none or m.tool_calls %}{{ '' + m.tool_calls[0]['function']"
        "['arguments'] }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.content is not none or 'y' in m.content %}{% endif %}"
        "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_gets_the_arguments_of_calls_as_it_wants_them(source: str, tokenizer: Tokenizer) -> None:
    assert little(source).render(CALLED, tokenizer).text == '{"a": "é"}'


@pytest.mark.parametrize("arguments", ["c.function.arguments | tojson", "'' + c.function.arguments"])
def test_ids_of_calls_have_the_form_that_a_template_asks_for(arguments: str, tokenizer: Tokenizer) -> None:
    """Mistral's."""
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('9') }}"
        f"{{% endif %}}{{{{ {arguments} }}}}{{{{ c.id }}}}{{% endfor %}}{{{{ m.tool_call_id }}}}{{% endfor %}}"
    )
    for id in ("toolu_0123456789abcdef01234567", "call_012345678", "aB3456789"):
        call, result = {**CALL, "id": id}, ChatMessage("tool", "2", {"tool_call_id": id})
        text = little(source).render([ChatMessage("assistant", "", {"tool_calls": [call]}), result], tokenizer).text
        first, second = text[-18:-9], text[-9:]
        assert first == second and first.isalnum() and (first == id) is (len(id) == 9)


def test_a_template_may_expect_what_tools_may_leave_out(tokenizer: Tokenizer) -> None:
    """As Command R's."""
    template = little(
        "{% for each in tools %}{{ '|' + each.function.description }}{% for name, about in each.function.parameters"
        ".properties.items() %}{{ name + about.description }}{% endfor %}{% endfor %}"
    )
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"description": "c"}}}
    tools = [{"function": {"name": "f"}}, {"function": {"name": "g", "description": "d", "parameters": schema}}]
    assert template.render_all([TURNS], tokenizer, [{"tools": tools}]) == [Rendered("||dabc")]
    assert template.render_all([TURNS], tokenizer) == [Rendered("")]
    (fault,) = template.render_all([TURNS], tokenizer, [{"tools": [2]}])
    assert "has no attribute" in str(fault)


def test_a_template_may_append_to_lists_and_write_what_map_returns(tokenizer: Tokenizer) -> None:
    """As Kimi K2's and one of llama.cpp's for DeepSeek R1. What a failed try appended is in no other."""
    source = "{% set _ = x.append(3) %}{{ x | map('int') | tojson }}{{ '' + messages[0].content }}"
    said = [ChatMessage("assistant", "", {"content": None})]
    for asks in ("", "{% if messages[0].content is none %}{% endif %}"):
        found = little(source + asks).render_all([said], tokenizer, [{"x": [2]}])
        assert found == [Rendered("[2, 3]")]


def test_each_conversation_has_its_own_variables(tokenizer: Tokenizer) -> None:
    template = replace(little("{{ x }}{{ tools | length }}"), variables={"x": 1})
    found = template.render_all([TURNS, TURNS], tokenizer, [{"tools": [2, 3]}, {"x": 2, "tools": []}])
    assert found == [Rendered("12"), Rendered("20")]
