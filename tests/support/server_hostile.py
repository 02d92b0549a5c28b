"""One client that asks what costs most: grammars, schemas, stop strings, chats and prompts of hostile shapes. A case is
its number."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from typing import Any

from tests.support.server_fuzz import check, request

ADDRESS = "127.0.0.2"
"""The client's, which others do not have."""

LOOP = 'r1 ::= ("\\n")*\nr2 ::= (((r1){2,5}){1,5} ((r2)+)+)*'
PIECES = ('"a"', "[a-z]", "[^\\n]", ".", '"é🙂"', "x", "y", '""', "[\\x00-\\x1f]", "<[5]>", "!<[5]>")
OFTEN = ("", "", "", "*", "+", "?", "{0,3}", "{2,}", "{0,1000}", "{500}")


def some_grammar(rng: random.Random, depth: int = 3) -> str:
    """A part of one."""
    kind = rng.choice("ppsag") if depth else "p"
    parts = [some_grammar(rng, depth - 1) for _ in range(rng.randint(1, 4))] if kind != "p" else [rng.choice(PIECES)]
    return f"({(' | ' if kind == 'a' else ' ').join(parts)}){rng.choice(OFTEN)}" if kind != "p" else parts[0]


def grammar(rng: random.Random) -> str:
    n = rng.choice((10, 300, 3000, 20_000))
    return rng.choice(
        (
            lambda: f"root ::= {some_grammar(rng)}\nx ::= {some_grammar(rng)}\ny ::= {some_grammar(rng)} x?",
            lambda: f"root ::= {some_grammar(rng)}\nx ::= {some_grammar(rng)}\ny ::= {some_grammar(rng)} x?",
            lambda: f'root ::= "{"a" * rng.randint(1, 900)}" r2\n{LOOP}',
            lambda: f"root ::= r2\n{LOOP}",
            lambda: "root ::= " + '"a"? ' * n,
            lambda: "root ::= " + "(" * n + '"a"' + rng.choice((")", ")?", ")*")) * n,
            lambda: "root ::= " + " | ".join(f'"w{at}"' for at in range(n)),
            lambda: "root ::= r0\n" + "\n".join(f'r{at} ::= "a" r{at + 1} | [b-z] r{at + 1}' for at in range(n)),
            lambda: 'root ::= "x" root | "y" root "z" | ""',
            lambda: "root ::= (([a-z]{0,1000} [a-m]{0,1000}){0,1000} [a-c]{0,1000}){0,1000}",
            lambda: "root ::= " + ".* " * rng.randint(1, 12) + '"x"',
            lambda: "".join(rng.choices('root::=|()[]{}"\\*+?.,x \n0\0é', k=n)),
        )
    )()


def schema(rng: random.Random) -> Any:
    n = rng.choice((5, 100, 800, 4000))
    names = [f"p{at}" for at in range(n)]
    deep: Any = {"type": "string"}
    for _ in range(min(n, 300)):
        deep = rng.choice(({"properties": {"a": deep}}, {"items": deep}, {"anyOf": [deep, {"type": "null"}]}))
    return rng.choice(
        (
            lambda: {"properties": {f"o{k}": {"properties": {name: {} for name in names}} for k in range(6)}},
            lambda: {"properties": {name: {"type": "string"} for name in names}, "required": names[::2]},
            lambda: {"anyOf": [{"properties": {name: {"type": "integer"}}, "required": [name]} for name in names]},
            lambda: {"allOf": [{"anyOf": [{"properties": {f"{k}{j}": {}}} for j in range(4)]} for k in range(n % 17)]},
            lambda: {"enum": names},
            lambda: deep,
            lambda: {"type": "integer", "multipleOf": rng.choice((3, 9973, 999983))},
            lambda: {
                "type": "string",
                "pattern": rng.choice(
                    ("^(a|ab|ba){50,2000}c$", "(.*a){20}.*b.{500}", "((a{1,1000}){1,1000}){1,1000}", "(?=a)", "(" * n)
                ),
            },
            lambda: {"items": {"maxLength": 10**9, "type": "string"}, "minItems": 10**8, "type": "array"},
            lambda: {
                "$defs": {f"d{k}": {"anyOf": [{"$ref": f"#/$defs/d{k + 1}"}] * 2} for k in range(n)}
                | {f"d{n}": {"type": "null"}},
                "$ref": "#/$defs/d0",
            },
            lambda: {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            lambda: {"properties": {"a": {"uniqueItems": True}}, "x-guidance": {"whitespace_pattern": "("}},
        )
    )()


def chat(rng: random.Random) -> Any:
    n = rng.choice((1, 70, 2000, 20_000))
    roles = rng.choice((("user", "assistant"), ("user",), ("system", "user"), ("assistant",)))
    return [{"role": roles[at % len(roles)], "content": "<|im_end|>" * rng.choice((0, 1, 3))} for at in range(n)]


def body(rng: random.Random) -> dict[str, Any]:
    asked: dict[str, Any] = {"prompt": "a", "max_tokens": rng.choice((1, 4, 40)), "temperature": rng.choice((0, 1, 9))}
    more: dict[str, Callable[[], Any]] = {
        "grammar": lambda: grammar(rng),
        "json_schema": lambda: schema(rng),
        "stop": lambda: ["x" * rng.choice((1, 200, 5000))] * rng.choice((4, 32, 20_000)),
        "logit_bias": lambda: [[at, rng.choice((-1, 5, False))] for at in range(rng.choice((10, 4000, 60_000)))],
        "n": lambda: rng.choice((8, 128)),
        "messages": lambda: chat(rng),
        "prompt": lambda: rng.choice(
            (
                lambda: "a" * 600_000,
                lambda: [5] * 200_000,
                lambda: ["ab"] * 100,
                lambda: "🙂é\n" * 90_000,
                lambda: " " * 600_000,
            )
        )(),
    }
    for name in rng.sample([*more, "grammar", "grammar", "json_schema", "json_schema"], rng.choice((1, 1, 1, 2))):
        asked[name] = more[name]()
    if "messages" in asked:
        del asked["prompt"]
    return asked


def abuse(port: int, number: int) -> int:
    """Ask a server, and read what comes: the status. Raises AssertionError for what no client could understand."""
    rng = random.Random(number)
    asked = body(rng)
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    asked["stream"] = rng.random() < 0.5
    said = b""
    with socket.create_connection(("127.0.0.1", port), timeout=120, source_address=(ADDRESS, 0)) as link:
        try:
            link.sendall(request("POST", path, json.dumps(asked).encode()))
            while more := link.recv(1 << 16):
                said += more
        except ConnectionError:
            pass  # it may be refused before all of it was sent
    try:
        check(said)
    except AssertionError as error:
        raise AssertionError(f"case {number}: {error}") from error
    return int(said.split(b" ", 2)[1]) if said else 0
