"""10 000 requests to a server, some of them abandoned: no process keeps memory or a file, each text is its own."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.long.asking import Stream, ask, random_request
from tests.support.serving import Served, growth, open_texts, sizes

pytestmark = pytest.mark.long

N_REQUESTS, N_WARM, N_CLIENTS, N_DIFFERENT = 10_000, 3000, 24, 60
SHARE_LEFT, SHARE_WRONG = 0.15, 0.05
IDLE_S = 6.0  # until connections on which nothing is asked any more are closed
GROWTH_KIB = 2048
WRONG = ({"prompt": [-1]}, {"prompt": "x", "max_tokens": -5}, {"prompt": "x", "grammar": "root ::= ("}, {"messages": 3})


@pytest.mark.parametrize("options", [[], ["--draft-rank", "1", "--policy", "pipeinfer"]], ids=["auto", "pipeinfer"])
def test_nothing_is_kept(options: list[str]) -> None:
    with Served(2, ["--parallel", "16", *options], by_pid=True) as served:
        ask_one = asker(served, [ask(served.http, *random_request(number)) for number in range(N_DIFFERENT)])
        done, found = Counter[str](), []
        with ThreadPoolExecutor(N_CLIENTS) as pool:
            for numbers in (range(N_WARM), range(N_WARM, N_REQUESTS)):
                done.update(pool.map(ask_one, numbers))
                served.until(lambda: not open_texts(served.http), timeout_s=30)
                time.sleep(IDLE_S)
                found.append(sizes(served))
        print(f"\n{dict(done)}\n{growth(*found)}")
    before, after = found
    assert before.keys() == after.keys()
    for pid, (n_kib, n_files) in after.items():
        assert n_kib <= before[pid][0] + GROWTH_KIB and n_files <= before[pid][1] + 1


def asker(served: Served, alone: list[str]) -> Callable[[int], str]:
    """What asks for one request, which its number decides, and says what became of it."""
    local = threading.local()

    def ask_one(number: int) -> str:
        if not hasattr(local, "http"):
            local.http = httpx.Client(base_url=served.url, timeout=60)
        http: httpx.Client = local.http
        rng = random.Random(-number)
        which, kind = rng.randrange(N_DIFFERENT), rng.random()
        if kind < SHARE_WRONG:
            answer = http.post("/v1/completions", json=rng.choice(WRONG))
            assert answer.status_code == 400, answer.text
            return "refused"
        if kind < SHARE_WRONG + SHARE_LEFT / 2:
            path, asked = random_request(which)
            with contextlib.suppress(httpx.TimeoutException):
                http.post(path, json=asked, timeout=rng.random() * 0.2)
            return "abandoned"
        stream, is_left = Stream(which), kind < SHARE_WRONG + SHARE_LEFT
        if is_left or rng.random() < 0.5:
            stream.read(http, rng.randint(0, 5) if is_left else -1)
        else:
            stream.text = ask(http, *random_request(which))
        if stream.left:
            return "abandoned"
        assert stream.text == alone[which], f"request {which}: {stream.text!r} is not {alone[which]!r}"
        return "finished"

    return ask_one
