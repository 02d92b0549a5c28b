"""Many streams at a time from an OpenAI-compatible server, whoever's: tokens a second while all of them decode."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence

TIMEOUT_S = 600.0


class Stream(threading.Thread):
    """One completion of exactly `n_predict` tokens; `times_s` has when each piece of it came."""

    def __init__(self, port: int, prompt: str, n_predict: int) -> None:
        super().__init__(daemon=True)
        self.port, self.body = port, {"prompt": prompt, "max_tokens": n_predict, "temperature": 0, "stream": True}
        self.body |= {"ignore_eos": True, "cache_prompt": False}
        self.times_s: list[float] = []
        self.start()

    def run(self) -> None:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        link.request("POST", "/v1/completions", json.dumps(self.body), {"content-type": "application/json"})
        for line in link.getresponse():
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                self.times_s.append(time.monotonic())


def throughput(port: int, prompts: Sequence[str], n_predict: int) -> float:
    """Tokens a second of all streams together from the last one's first token until the first one's last. Raises
    RuntimeError where a stream brought less than half of its tokens as pieces."""
    streams = [Stream(port, prompt, n_predict) for prompt in prompts]
    for stream in streams:
        stream.join(TIMEOUT_S)
        if len(stream.times_s) < n_predict // 2:
            raise RuntimeError(f"{len(stream.times_s)} pieces of {n_predict} tokens came from port {port}")
    start_s, end_s = max(each.times_s[0] for each in streams), min(each.times_s[-1] for each in streams)
    n_tokens = sum(start_s < time_s <= end_s for each in streams for time_s in each.times_s)
    return n_tokens / (end_s - start_s)
