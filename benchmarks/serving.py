"""Many streams against a real server: when each token was there and when its client had it, beside who does not read.

`python benchmarks/serving.py --streams 50` starts `pipeinfer serve`, and prints how long after the target's decision
on a token the process that speaks HTTP was told of it, and how long after that it lay at its client's socket, by the
kernel's stamp: that is what HTTP adds. Ranks, server and clients share the cores of one host here, so the clients read
what is there now and then, all of them at once: they would be elsewhere.
With `--deaf 20` as many further clients ask for long texts and read nothing. With `--toy 20` no rank computes: a toy
head has a token for each stream at once, 20 times a second, so what HTTP takes is seen alone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.job.options.text_sections import ChatOptions, ContextOptions, TextOptions
from pipeinfer.job.requests.body import Defaults
from pipeinfer.job.serve.channel import Ask, Cancel, Finished, Ready, Setup, Started, TextUpdate, TextUpdates
from pipeinfer.models.demo import TARGET
from pipeinfer.server.front import HttpFront, HttpOptions
from tests.support.jobs import descendants
from tests.support.serving import Served

PROMPT = "def read_lines(path):\n"


DONE = b"data: [DONE]"
REST_S = 4e-3
SO_TIMESTAMPNS = 35  # Linux's, which Python's socket does not name
STAMP = struct.Struct("qq")  # seconds and nanoseconds on the wall's clock


class Client:
    """One stream. `read` makes of it `steps_s`: of each token when it was decided on, told, and at the socket."""

    def __init__(self, port: int, seed: int, n_tokens: int) -> None:
        self.link = ask(
            port,
            {
                "prompt": PROMPT,
                "max_tokens": n_tokens,
                "seed": seed,
                "stream": True,
                "ignore_eos": True,
                "timings_per_token": True,
            },
        )
        self.link.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.start_s, self._came = time.monotonic(), list[tuple[float, bytes]]()

    def take(self) -> bool:
        """What is there; False once all has come."""
        data, stamps, _, _ = self.link.recvmsg(1 << 16, socket.CMSG_SPACE(STAMP.size))
        came_s = time.monotonic()
        for _, kind, stamp in stamps:
            if kind == SO_TIMESTAMPNS:
                seconds, nanoseconds = STAMP.unpack(stamp)
                came_s -= time.time() - seconds - nanoseconds * 1e-9
        self._came.append((came_s, data))
        return bool(data)

    def read(self) -> None:
        """What came, once nobody waits for it any more. A line is there when its end is; of a token that was read with
        the end of the stream that is not known, as the kernel keeps one stamp."""
        self.steps_s, self.n_tokens, self.first_s, rest = list[tuple[float, ...]](), 0, 0.0, b""
        for came_s, data in self._came:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b'data: {"id"') and (timed := json.loads(line[6:]).get("timings", {})).get("at_s"):
                    self.first_s = self.first_s or came_s
                    n_new = timed["predicted_n"] - self.n_tokens
                    self.steps_s += [(timed["at_s"], timed["told_s"], came_s)] * (n_new if DONE not in data else 0)
                    self.n_tokens += n_new


def ask(port: int, asked: object) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", port))
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    link.sendall(head.encode() + body)
    return link


def listen(clients: Sequence[Client]) -> None:
    """All of them, with next to nothing for each piece that comes, and not while the server writes the others."""
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.link, selectors.EVENT_READ, client)
        while selector.get_map():
            selector.select()
            time.sleep(REST_S)
            for key, _ in selector.select():
                if not key.data.take():
                    selector.unregister(key.fileobj)


class ToyHead:
    """The process that speaks HTTP, and a process that tells it of tokens `rate` times a second."""

    def __init__(self, rate: float, n_most: int) -> None:
        http = HttpOptions(port=0, n_connections=2 * n_most + 20, log_format="none")
        self._front = HttpFront(
            http,
            Setup(
                TARGET,
                TextOptions(chat=ChatOptions()),
                ContextOptions(),
                Defaults(SamplingParams(), -1, (), False),
                n_most,
                None,
                1 << 20,
                1024,
                900,
                "toy",
            ),
        )
        self.port, self.rate = int(self._front.address.rpartition(":")[2]), rate
        self._process = multiprocessing.get_context("fork").Process(target=self._run, daemon=True)
        self._process.start()
        wait_until_ready(self.port)

    def _run(self) -> None:
        self._front.tell(Ready(1024))
        left, next_s = dict[int, int](), time.monotonic()
        while not self._front.lost():
            next_s = max(next_s + 1 / self.rate, time.monotonic())
            while (rest_s := next_s - time.monotonic()) > 0:
                time.sleep(min(rest_s, 5e-3))
                self._hear(left)
            self._say(left)

    def _hear(self, left: dict[int, int]) -> None:
        for message in self._front.take():
            if isinstance(message, Ask):
                left[message.id] = message.request.n_predict
                self._front.tell(Started(message.id))
            elif isinstance(message, Cancel):
                left.pop(message.id, None)

    def _say(self, left: dict[int, int]) -> None:
        parts: list[TextUpdate] = [(id, [262 + n], " word", []) for id, n in left.items()]
        if parts:
            now_s = time.monotonic()
            self._front.tell(TextUpdates(now_s, now_s, parts))
        for id in left:
            left[id] -= 1
        for id in [id for id, n in left.items() if not n]:
            del left[id]
            self._front.tell(Finished(id, "length", {"cache_n": 0}))

    def __enter__(self) -> ToyHead:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._front.close()


def wait_until_ready(port: int) -> None:
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


def core_s(pid: int) -> np.ndarray:
    """How long the process that speaks HTTP, somewhere below this one, has had a core, and has waited for one."""
    for each in descendants(pid):
        process = Path(f"/proc/{each}")
        if b"pipeinfer.server.process" in (process / "cmdline").read_bytes():
            return 1e-9 * np.array((process / "schedstat").read_text().split()[:2], float)
    raise AssertionError("there is no such process")


def measure(port: int, pid: int, n_streams: int, n_tokens: int, n_deaf: int) -> None:
    """`pid`: of the process that has started the one that speaks HTTP at the port."""
    deaf = [Client(port, seed, 900) for seed in range(n_deaf)]
    start_s, before_s = time.monotonic(), core_s(pid)
    clients = [Client(port, seed, n_tokens) for seed in range(n_streams)]
    listen(clients)
    wall_s, (used_s, waited_s) = time.monotonic() - start_s, core_s(pid) - before_s
    for client in clients:
        client.read()
    total = sum(client.n_tokens for client in clients)
    ttft_s = np.median([client.first_s - client.start_s for client in clients])
    print(
        f"{n_streams} streams, {n_deaf} that read nothing: {total} tokens in {wall_s:.1f} s, {total / wall_s:.0f} a "
        f"second, first ones after {ttft_s:.2f} s (p50)"
    )
    decided_s, told_s, came_s = np.array([step for client in clients for step in client.steps_s]).T
    print(f"HTTP adds to a token: {spread(came_s - told_s)}")
    print(f"  before that, from its decision on: {spread(told_s - decided_s)}; both: {spread(came_s - decided_s)}")
    print(
        f"the process that speaks it had a core for {1e6 * used_s / total:.0f} µs for each, and waited for one for "
        f"{1e6 * waited_s / total:.0f} µs"
    )
    for client in deaf:
        client.link.close()


def spread(waits_s: np.ndarray) -> str:
    """Waits in seconds as a line in milliseconds."""
    p50, p90, p99 = np.percentile(1e3 * waits_s, (50, 90, 99))
    return f"{p50:.2f} ms (p50), {p90:.2f} ms (p90), {p99:.2f} ms (p99), {1e3 * waits_s.max():.1f} ms at most"


@click.command(help=__doc__)
@click.option("--streams", default=50, show_default=True)
@click.option("--tokens", default=64, show_default=True, help="Of each text.")
@click.option("--deaf", default=0, show_default=True, help="Further clients that read nothing.")
@click.option("--ranks", default=2, show_default=True)
@click.option("--toy", type=float, help="No ranks, but tokens so many times a second.")
@click.argument("words", nargs=-1)
def main(streams: int, tokens: int, deaf: int, ranks: int, toy: float | None, words: tuple[str, ...]) -> None:
    if toy:
        with ToyHead(toy, min(1000, streams + deaf)) as head:
            measure(head.port, os.getpid(), streams, tokens, deaf)
        return
    parallel = ["--parallel", str(min(254, streams + deaf)), "--max-connections", str(2 * (streams + deaf) + 20)]
    with Served(ranks, [*parallel, *words]) as served:
        served.text(prompt=PROMPT, max_tokens=4)
        measure(served.port, served.job.pid, streams, tokens, deaf)


if __name__ == "__main__":
    main()
