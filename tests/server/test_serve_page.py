"""The server's page in headless Chromium: a chat that is streamed and stopped, and the picture of the pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from tests.support import chromium
from tests.support.serving import Served

BROWSER = chromium.find()
SAID = "document.querySelector('.turn.assistant:last-child div')?.textContent"


def say(page: chromium.Page, text: str, **fields: str) -> None:
    for id, value in {"text": text, **fields}.items():
        page.evaluate(f"document.getElementById('{id}').value = {value!r}")
    page.evaluate("document.getElementById('form').requestSubmit()")


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_the_page_talks_and_shows_the_pipeline(tmp_path: Path) -> None:
    assert BROWSER
    with Served(2, ["--api-key", "secret"]) as served, chromium.Page(BROWSER, tmp_path) as page:
        page.open(served.url)
        page.until("document.getElementById('model').textContent.includes('API key is missing')")
        page.evaluate("document.getElementById('key').value = 'secret'")
        page.evaluate("document.getElementById('key').dispatchEvent(new Event('change'))")
        page.until("document.getElementById('model').textContent.startsWith('target.gguf')")

        say(page, "def f(x):", tokens="30", seed="5", temperature="0.7")
        page.until("document.querySelector('.turn.assistant small')")
        headers = {"authorization": "Bearer secret"}
        asked = {"messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 30, "seed": 5,
                 "temperature": 0.7}  # fmt: skip
        answer = served.http.post("/v1/chat/completions", json=asked, headers=headers).json()
        assert page.evaluate(SAID) == answer["choices"][0]["message"]["content"]
        assert "30 tokens" in page.evaluate("document.querySelector('.turn.assistant small').textContent")

        say(page, "more", tokens="800", seed="1")
        page.until(f"document.querySelectorAll('.turn').length === 4 && ({SAID}).length > 5")
        page.until("document.querySelectorAll('.rank canvas').length === 2")
        page.until("/[1-9][0-9]*% busy/.test(document.getElementById('ranks').textContent)")
        page.until("document.getElementById('load').textContent.startsWith('1 text being written')")
        page.evaluate("document.getElementById('stop').click()")
        served.until(lambda: not served.http.get("/slots", headers=headers).json())
        page.until("document.getElementById('load').textContent.startsWith('0 texts')")
        shown = page.evaluate(
            "[...document.querySelectorAll('canvas')].map(canvas => new Set(canvas.getContext('2d')"
            ".getImageData(0, 0, canvas.width, canvas.height).data).size)"
        )
        assert all(n > 4 for n in shown), "colours"

        say(page, "more", tokens="5000")
        page.until("document.querySelector('.turn.error')?.textContent.includes('with 5000 to come')")
        page.evaluate("document.getElementById('clear').click()")
        assert page.evaluate("document.querySelectorAll('.turn').length") == 0
        assert [error for error in page.errors if "status of 40" not in error] == [], "but for what was refused"
