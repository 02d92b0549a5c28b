"""The server's page in headless Chromium: chats that are streamed, stopped, edited and kept; the pipeline's picture."""

import json
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from tests.support import chromium
from tests.support.paces import pace_words, slow_runs
from tests.support.serving import Served, open_texts

BROWSER = chromium.find()
SAID = "chat.messages.at(-1).content"
ENDED = "!stopping && document.querySelector('.turn.assistant:last-child small')"

MARKDOWN = """# Head
Some *words*, **bold `x`** and https://a.example/b.
<script>alert(1)</script>

```python
def f(x):
    return "<b>"
```
1. one
   - inner
2. two

| a | b |
|---|---|
| 1 | 2 |

> said
"""


def say(page: chromium.Page, text: str, **fields: str) -> None:
    for id, value in {"text": text, **fields}.items():
        page.evaluate(f"document.getElementById('{id}').value = {value!r}")
    page.evaluate("document.getElementById('form').requestSubmit()")


def click(page: chromium.Page, name: str, nth: int = 0) -> None:
    """The `nth` button of that name."""
    page.evaluate(
        f"[...document.querySelectorAll('button')].filter(each => each.textContent === {name!r}).at({nth}).click()"
    )


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_the_page_talks_and_shows_the_pipeline(tmp_path: Path) -> None:
    assert BROWSER
    pace = pace_words(tmp_path, slow_runs(30))  # a long text is there while the page is looked at
    words = ["--api-key", "secret", *pace]
    with Served(2, words) as served, chromium.Page(BROWSER, tmp_path / "browser") as page:
        page.open(served.url)
        page.until("document.getElementById('model').textContent.includes('API key is missing')")
        page.evaluate("document.getElementById('key').value = 'secret'")
        page.evaluate("document.getElementById('key').dispatchEvent(new Event('change'))")
        page.until("document.getElementById('model').textContent.startsWith('target.gguf')")

        say(page, "def f(x):", tokens="30", seed="5", temperature="0.7")
        page.until(ENDED)
        headers = {"authorization": "Bearer secret"}
        messages = [{"role": "user", "content": "def f(x):"}]
        query = {"messages": messages, "max_tokens": 30, "seed": 5, "temperature": 0.7}
        answer = served.http.post("/v1/chat/completions", json=query, headers=headers).json()
        text = answer["choices"][0]["message"]["content"]
        assert page.evaluate(SAID) == text
        note = page.evaluate("document.querySelector('.turn.assistant small').textContent")
        assert "30 tokens, " in note and "tokens/s" in note and "seed 5" in note

        click(page, "Regenerate")
        page.until(ENDED)
        assert page.evaluate(SAID) == text and page.evaluate("chat.messages.length") == 2, "the same seed"
        click(page, "Edit")
        page.evaluate("document.querySelector('.turn textarea').value = 'class A:'")
        click(page, "Send")
        page.until(f"chat.messages[0].content === 'class A:' && {ENDED}")
        page.evaluate("document.getElementById('system').value = 'of'")
        page.evaluate("document.getElementById('system').dispatchEvent(new Event('input'))")
        assert page.evaluate("asked().messages.map(each => each.role).join()") == "system,user,assistant"

        say(page, "more", tokens="800", seed="1")
        page.until("chat.messages.length === 3 && document.querySelector('.coming .text')?.textContent.length > 5")
        page.until("document.querySelectorAll('.rank canvas').length === 2")
        page.until("/[1-9][0-9]*% busy/.test(document.getElementById('ranks').textContent)")
        page.until("document.getElementById('load').textContent.startsWith('1 text being written')")
        page.evaluate("document.getElementById('stop').click()")
        served.until(lambda: not open_texts(served.http, headers=headers))
        page.until("document.getElementById('load').textContent.startsWith('0 texts')")
        shown = page.evaluate(
            "[...document.querySelectorAll('canvas')].map(canvas => new Set(canvas.getContext('2d')"
            ".getImageData(0, 0, canvas.width, canvas.height).data).size)"
        )
        assert all(n > 4 for n in shown), "colours"

        say(page, "more", tokens="-5")
        page.until("document.querySelector('.turn.error')?.textContent.includes('max_tokens is -5; give a whole')")
        assert [error for error in page.errors if "status of 40" not in error] == [], "but for what was refused"

        page.open(served.url)  # anew: the chat that was open is open again
        page.until(
            "document.querySelectorAll('.turn').length === 6 && document.getElementById('system').value === 'of'"
        )
        page.evaluate("document.querySelectorAll('#list button')[1].click()")
        page.until("document.querySelectorAll('#list li, .turn').length === 0")


def press(page: chromium.Page, key: str, where: str) -> None:
    event = f"new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true, cancelable: true}})"
    page.evaluate(f"document.querySelector({where!r}).dispatchEvent({event})")


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_keys_edit_and_close_and_tabs_share_chats(tmp_path: Path) -> None:
    assert BROWSER
    with Served(1, ["--temp", "0", "-n", "8"]) as served, chromium.Page(BROWSER, tmp_path, (375, 667)) as page:
        page.open(served.url)
        page.until("document.getElementById('model').textContent.startsWith('target.gguf')")
        say(page, "def f(x):")
        page.until(ENDED)

        click(page, "Edit")
        page.evaluate("document.querySelector('.turn textarea').value = 'dropped'")
        press(page, "Escape", ".turn textarea")
        assert page.evaluate("chat.messages[0].content") == "def f(x):"
        assert page.evaluate("document.querySelectorAll('.turn textarea').length") == 0
        press(page, "ArrowUp", "#text")
        page.evaluate("document.querySelector('.turn textarea').value = 'class A:'")
        press(page, "Enter", ".turn textarea")
        page.until(f"chat.messages[0].content === 'class A:' && chat.messages.length === 2 && {ENDED}")

        click(page, "Settings")
        boxes = "['#said', '#form', 'aside'].map(each => document.querySelector(each).getBoundingClientRect())"
        tops = page.evaluate(f"{boxes}.flatMap(box => [box.top, box.bottom])")
        assert tops == sorted(tops) and tops[-1] <= 667, "nothing covers the pipeline"
        press(page, "Escape", "#temperature")
        assert page.evaluate("document.getElementById('drawer').hidden")

        # another tab keeps a chat: this one has it too, and keeps its own
        other = json.dumps([{"id": 1, "title": "other", "messages": []}])
        page.evaluate(
            f"localStorage.setItem(CHATS, JSON.stringify([...{other}, ...chats]));"
            "dispatchEvent(new StorageEvent('storage', {key: CHATS}))"
        )
        assert page.evaluate("chats.map(each => each.title).join()") == "other,class A:"
        page.evaluate("localStorage.setItem(CHATS, '[]'); dispatchEvent(new StorageEvent('storage', {key: CHATS}))")
        say(page, "more")
        page.until(f"chat.messages.length === 4 && {ENDED} && chats.length === 1")
        assert page.errors == []


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_markdown_becomes_elements_and_no_text_is_html(tmp_path: Path) -> None:
    assert BROWSER
    with Served(1, []) as served, chromium.Page(BROWSER, tmp_path) as page:
        page.open(served.url)
        page.evaluate(
            f"document.getElementById('said').append(turn({{role: 'assistant', content: {json.dumps(MARKDOWN)}}}))"
        )
        result = page.evaluate(
            "Object.fromEntries(['h1', 'em', 'strong code', 'a', 'script', '.code pre', 'ol > li', 'li li', 'td', "
            "'blockquote p']"
            ".map(each => [each, [...document.querySelectorAll(`#said ${each}`)].map(it => it.textContent)]))"
        )
        inline = {"h1": ["Head"], "em": ["words"], "strong code": ["x"], "a": ["https://a.example/b"], "script": []}
        lists = {"ol > li": ["oneinner", "two"], "li li": ["inner"], "td": ["1", "2"], "blockquote p": ["said"]}
        assert result == inline | lists | {".code pre": ['def f(x):\n    return "<b>"']}
        assert "<script>alert(1)</script>" in page.evaluate("document.getElementById('said').textContent")
        assert page.errors == []
