"""Requests of all kinds to a real server, whole or streamed; what was heard of them, and when. Checks nothing."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from tests.support.serving import lines_of, open_texts


def random_request(number: int) -> tuple[str, dict[str, Any]]:
    """(path, what is asked), the same for a number each time: plain and chats, greedy and sampled, short and with long
    beginnings in common, with stop strings, penalties, grammars and log-probabilities."""
    rng = random.Random(number)
    text = "def read_lines(path):\n    return " * rng.choice((1, 1, 1, 1, 1, 1, 1, 8, 8, 20)) + "ab"[: number % 3]
    asked: dict[str, Any] = {"max_tokens": rng.randint(8, 24), "seed": number, "temperature": rng.choice((0, 0.7, 1.2))}
    asked |= {"ignore_eos": True} if rng.random() < 0.7 else {}
    asked |= {"stop": rng.choice(("\n", "self", ")"))} if rng.random() < 0.2 else {}
    asked |= {"repeat_penalty": 1.2, "presence_penalty": 0.1} if rng.random() < 0.2 else {}
    asked |= {"grammar": 'root ::= "a"+ " b" [a-z ]*'} if rng.random() < 0.1 and "ignore_eos" not in asked else {}
    asked |= {"cache_prompt": rng.random() < 0.5}
    if rng.random() < 0.2:
        said = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "y"},
        ]
        return "/v1/chat/completions", asked | {"messages": said[: rng.choice((1, 3))], "logprobs": number % 2 == 0}
    return "/v1/completions", asked | {"prompt": text} | ({"logprobs": 2} if number % 5 == 0 else {})


def ask(http: httpx.Client, path: str, asked: dict[str, Any]) -> str:
    """The text, asked for as a whole."""
    return _text(http.post(path, json=asked).raise_for_status().json())


@dataclass(slots=True)
class Stream:
    """What has come of one so far. `at_s`: when it was asked for, and when each piece of its text came. `left`: by its
    client."""

    number: int
    at_s: list[float] = field(default_factory=list)
    text: str = ""
    left: bool = False

    @property
    def ttft_s(self) -> float:
        return self.at_s[1] - self.at_s[0] if len(self.at_s) > 1 else 0.0

    @property
    def longest_gap_s(self) -> float:
        return max((after - before for before, after in pairwise(self.at_s[1:])), default=0.0)

    def read(self, http: httpx.Client, n_pieces: int = -1) -> None:
        """To its end, or until so many pieces have come. Raises AssertionError where nothing comes in the client's
        time: with what the server says of its streams then, and after a further request."""
        path, asked = random_request(self.number)
        self.at_s.append(time.monotonic())
        with http.stream("POST", path, json=asked | {"stream": True}) as answer:
            answer.raise_for_status()
            try:
                self._take(answer, n_pieces)
            except httpx.TimeoutException:
                slots = open_texts(http)
                ask(http, *random_request(0))
                raise AssertionError(
                    f"request {self.number} stalls after {len(self.at_s) - 1} pieces, {self.text!r}; /slots: "
                    f"{slots}, after a further request: {http.get('/slots').text}"
                ) from None

    def _take(self, answer: httpx.Response, n_pieces: int) -> None:
        self.left = n_pieces == 0
        lines = () if self.left else lines_of(answer)
        for line in lines:
            if line != "[DONE]" and (piece := _text(json.loads(line))):
                self.at_s.append(time.monotonic())
                self.text += piece
                if len(self.at_s) - 1 == n_pieces:
                    self.left = True
                    return


def _text(said: dict[str, Any]) -> str:
    choice = said["choices"][0]
    return str(choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or "")
