"""What the clients that people use send, each request as they send it, against a real server on two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from tests.server import client_shapes
from tests.server.client_shapes import SHAPES
from tests.support.gguf_factory import Shape, write_model
from tests.support.serving import Served, open_texts

TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}"
    "{% endif %}<|{{ 'user' if m.role == 'tool' else m.role }}|>\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""Knows tools, and wants the system to speak first, as many templates do."""

N_TOKENS = 8
"""Of each answer: what a client asks for is more than a test can wait for."""

REFUSED = {("Claude Code", "the search of the web as a request of its own"): "name one of the tools"}
"""What would be another text, or no answer at all, without what is asked for."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    shape = Shape(n_layer=2, n_embd=64, n_head=2, n_head_kv=1, n_ff=64, n_vocab=384)
    model = write_model(tmp_path_factory.mktemp("model") / "model.gguf", shape, template=TEMPLATE)
    words = ["-m", str(model), "-c", "8192", "--parallel", "2", "-n", str(N_TOKENS), "--log-format", "none"]
    with Served(2, words) as server:
        yield server


def value_of(answer: Any, key: str) -> Any:
    """Of a dotted key; numbers are places in lists. Raises where there is none."""
    if key in answer:
        return answer[key]
    for part in key.split("."):
        answer = answer[int(part)] if isinstance(answer, list) else answer[part]
    return answer


def shortened(body: dict[str, Any]) -> dict[str, Any]:
    """The same with a short answer where a long one is asked for."""
    lengths = ("max_tokens", "max_completion_tokens", "n_predict", "max_output_tokens", "max_new_tokens")
    n = 100 if body.get("tool_choice") not in (None, "auto", "none") else N_TOKENS  # until a call has begun
    shorter = {name: n for name in lengths if isinstance(body.get(name), int) and body[name] > n}
    return body | shorter | ({"max_tokens": n} if n > N_TOKENS and not {*lengths} & {*body} else {})


@pytest.mark.parametrize("shape", SHAPES, ids=lambda each: f"{each.client}: {each.what}")
def test_what_clients_send_is_served(served: Served, shape: client_shapes.Shape) -> None:
    whole = served.http.post(shape.path, json=shortened(shape.body) | ({"stream": False} if shape.must else {}))
    message = "" if whole.status_code == 200 else whole.json()["error"]["message"]
    if message and any(what in shape.what for what in ("image", "document")):
        assert whole.status_code == 400 and "text" in message
        return
    if (refused := REFUSED.get((shape.client, shape.what))) is not None:
        assert whole.status_code == 400 and refused in message
        return
    assert whole.status_code == 200, message
    for key in shape.must:
        value_of(whole.json(), key)
    if not shape.body.get("stream"):
        return
    with served.http.stream("POST", shape.path, json=shortened(shape.body)) as stream:
        assert stream.status_code == 200
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert events and not any("error" in event and event["error"] for event in events)


def test_a_length_beyond_the_context_is_cut_to_what_fits(served: Served) -> None:
    body = {"prompt": "the", "max_tokens": 32_000, "ignore_eos": True, "seed": 1}
    found = list[dict[str, int]]()

    def is_seen() -> bool:
        """It may have come to its end before."""
        with served.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            assert stream.status_code == 200
            found.extend(open_texts(served.http))
        return bool(found)

    served.until(is_seen)
    assert found[0]["n_predict"] + found[0]["n_prompt_tokens"] == found[0]["n_ctx"] == 8192
    prompt = served.http.post("/v1/completions", json={"prompt": "the " * 8192, "max_tokens": 4})
    assert prompt.status_code == 400 and "8192" in prompt.json()["error"]["message"]
