"""Compare token ids with llama-server's: of raw prompts with and without control tokens, of chats by five templates.

    python benchmarks/token_ids.py MODEL --server path/to/llama-server

llama-server must be of the llama.cpp that the package has. Prints a line for each kind; the exit code is 1 where ids
differ that must not.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeinfer.job.requests.chat_format import ChatFormat
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.text.chat_template import ChatTemplate, Rendered, encode_rendered, template_of
from pipeinfer.models.text.messages import ChatMessage
from pipeinfer.models.text.tokenizer import Tokenizer

N_RAW, N_CHATS, PORT, START_S = 200, 60, 9911, 60.0
WORDS = [
    "What",
    "is",
    "2+2?",
    "Write",
    "a",
    "poem",
    "about",
    "the sea.",
    "def",
    "f(x):",
    "return",
    "x",
    "é🎉",
    "日本語",
    "The",
    "quick",
    "brown",
    "fox",
    "<b>bold</b>",
    "<|nothing|>",
    "[INST]",
    "{json:",
    "1}",
]
FRAMES = {
    "headers": ("<|im_start|>{role}<|im_end|>\n\n", "<|endoftext|>", "<|im_start|>assistant<|im_end|>\n\n"),
    "roles as text": ("<|{role}|>\n", "<|im_end|>\n", "<|assistant|>\n"),
    "brackets": ("[{role}] ", " [/{role}]<|im_end|>", "[assistant] "),
    "words": ("{role}: ", "<|endoftext|>\n", "assistant: "),
}
"""What stands before and behind a message, and before the answer."""


def template(frame: tuple[str, str, str]) -> str:
    before, behind, answer = frame
    quoted = [
        json.dumps(part.replace("{role}", "\0")).replace("\\u0000", '" + m.role + "') for part in (before, behind)
    ]
    return (
        "{% for m in messages %}{{ " + quoted[0] + " + m.content + " + quoted[1] + " }}{% endfor %}"
        "{% if add_generation_prompt %}{{ " + json.dumps(answer) + " }}{% endif %}"
    )


@contextmanager
def running(server: str, model: Path, *words: str) -> Iterator[None]:
    command = [server, "-m", str(model), "-c", "2048", "--port", str(PORT), "-np", "1", "--no-warmup", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                post("/tokenize", content="")
                break
            except OSError:
                time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


def post(path: str, **body: Any) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def their_ids(text: str) -> list[int]:
    """As `/completion` tokenises a prompt."""
    found: list[int] = post("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
    return found


def text_of(rng: random.Random, names: list[str]) -> str:
    """Some words, and names of control tokens."""
    parts = [
        rng.choice(names) if names and rng.random() < 0.35 else rng.choice(WORDS) + rng.choice([" ", "\n", "", "  "])
        for _ in range(rng.randint(1, 14))
    ]
    return "".join(parts) or "a"


def conversation(rng: random.Random, names: list[str], is_begun: bool) -> list[ChatMessage]:
    """`is_begun`: the assistant has begun its answer."""
    said = [ChatMessage("system", text_of(rng, []))] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 3)):
        said += [ChatMessage("user", text_of(rng, names)), ChatMessage("assistant", text_of(rng, []))]
    return said if is_begun else said[:-1]


def our_ids(format: ChatFormat, messages: list[ChatMessage], is_begun: bool) -> list[int]:
    (found,) = format.render_all([(messages[:-1] if is_begun else messages, None, {})])
    assert isinstance(found, Rendered), found
    rendered = format.continued(found, messages[-1])[0] if is_begun else found
    return encode_rendered(format.tokenizer, rendered)


def compare_chats(name: str, source: str, tokenizer: Tokenizer, rng: random.Random) -> int:
    names, n_wrong = [text for _, text in tokenizer.controls], 0
    for kind in ("plain", "begun answers", "control tokens as text", "--special-in-messages"):
        n_differ = 0
        format = ChatFormat(ChatTemplate(source, name, parses_messages=kind.startswith("--")), tokenizer, None, ())
        for _ in range(N_CHATS // 4):
            is_begun = kind == "begun answers"
            messages = conversation(rng, names if "special" in kind or "control" in kind else [], is_begun)
            said = [{"role": each.role, "content": each.content} for each in messages]
            n_differ += their_ids(post("/apply-template", messages=said)["prompt"]) != our_ids(
                format, messages, is_begun
            )
        print(f"{name}, {kind}: {n_differ} of {N_CHATS // 4} differ")
        n_wrong += n_differ if kind != "control tokens as text" else 0
    return n_wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--server", required=True)
    given = parser.parse_args()
    tokenizer, rng = Tokenizer(given.model), random.Random(7)
    names, n_wrong = [text for _, text in tokenizer.controls], 0
    with running(given.server, given.model):
        for kind, used in (("plain", []), ("with control tokens", names)):
            texts = [text_of(rng, used) for _ in range(N_RAW // 2)]
            n_differ = sum(their_ids(text) != tokenizer.encode(text, True, True) for text in texts)
            print(f"raw prompts, {kind}: {n_differ} of {len(texts)} differ")
            n_wrong += n_differ
    own = template_of(read_model_info(given.model).metadata)
    sources = {**({"the model's own": own} if own else {}), **{name: template(each) for name, each in FRAMES.items()}}
    for name, source in sources.items():
        with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
            file.write(source)
            file.flush()
            with running(given.server, given.model, "--jinja", "--chat-template-file", file.name):
                n_wrong += compare_chats(name, source, tokenizer, rng)
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
