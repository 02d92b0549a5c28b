"""Many streams against a real server: when each token was there and when its client had it, beside who does not read.

`python benchmarks/serving.py --streams 50` starts `pipeinfer serve`, and prints what HTTP adds to a token: the time
from its emission by the engine to the client's read, p50 and p99, on the clock of the host, whose cores all share.
With `--deaf 20` as many further clients ask for long texts and read nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.jobs import descendants
from tests.serving import Served

PROMPT = "def read_lines(path):\n"


class Client:
    """One stream. `read` makes of it `late_s`: of each token, how long after its emission it was there."""

    def __init__(self, seed: int, n_tokens: int) -> None:
        self.asked = {"prompt": PROMPT, "max_tokens": n_tokens, "seed": seed, "stream": True, "ignore_eos": True,
                      "timings_per_token": True}  # fmt: skip
        self.start_s, self._lines = 0.0, list[tuple[float, bytes]]()

    async def run(self, port: int) -> None:
        reader, writer = await ask(port, self.asked)
        self.start_s = time.monotonic()
        async for line in reader:
            self._lines.append((time.monotonic(), line))
        writer.close()

    def read(self) -> None:
        """What came, once nobody waits for it any more."""
        self.late_s, self.n_tokens, self.first_s = list[float](), 0, 0.0
        for now_s, line in self._lines:
            if line.startswith(b'data: {"id"') and (timed := json.loads(line[6:]).get("timings", {})).get("at_s"):
                self.first_s = self.first_s or now_s
                self.late_s += [now_s - timed["at_s"]] * (timed["predicted_n"] - self.n_tokens)
                self.n_tokens = timed["predicted_n"]


async def ask(port: int, asked: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


def cpu_s(served: Served) -> float:
    """What the process that speaks HTTP has had of a core."""
    for pid in descendants(served.job.pid):
        process = Path(f"/proc/{pid}")
        if b"pipeinfer.server.process" in (process / "cmdline").read_bytes():
            used = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
            return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")
    raise AssertionError("there is no such process")


async def measure(served: Served, n_streams: int, n_tokens: int, n_deaf: int) -> None:
    deaf = [await ask(served.port, {**Client(seed, 900).asked, "n": 1}) for seed in range(n_deaf)]
    for reader, _ in deaf:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
    clients = [Client(seed, n_tokens) for seed in range(n_streams)]
    start_s, before_s = time.monotonic(), cpu_s(served)
    await asyncio.gather(*(client.run(served.port) for client in clients))
    wall_s, used_s = time.monotonic() - start_s, cpu_s(served) - before_s
    for client in clients:
        client.read()
    late_ms = 1e3 * np.array([late_s for client in clients for late_s in client.late_s])
    p50, p90, p99 = np.percentile(late_ms, (50, 90, 99))
    total = sum(client.n_tokens for client in clients)
    ttft_s = np.median([client.first_s - client.start_s for client in clients])
    print(f"{n_streams} streams, {n_deaf} that read nothing: {total} tokens in {wall_s:.1f} s, {total / wall_s:.0f} a "
          f"second, first ones after {ttft_s:.2f} s (p50)")  # fmt: skip
    print(f"HTTP adds to a token {p50:.2f} ms (p50), {p90:.2f} ms (p90), {p99:.2f} ms (p99), {late_ms.max():.1f} ms at "
          f"most; the process that speaks it took {1e6 * used_s / total:.0f} µs of a core for each")  # fmt: skip
    for _, writer in deaf:
        writer.close()


@click.command(help=__doc__)
@click.option("--streams", default=50, show_default=True)
@click.option("--tokens", default=64, show_default=True, help="Of each text.")
@click.option("--deaf", default=0, show_default=True, help="Further clients that read nothing.")
@click.option("--ranks", default=2, show_default=True)
@click.argument("words", nargs=-1)
def main(streams: int, tokens: int, deaf: int, ranks: int, words: tuple[str, ...]) -> None:
    parallel = ["--parallel", str(min(254, streams + deaf)), "--max-connections", str(2 * (streams + deaf) + 20)]
    with Served(ranks, [*parallel, *words]) as served:
        served.text(prompt=PROMPT, max_tokens=4)
        asyncio.run(measure(served, streams, tokens, deaf))


if __name__ == "__main__":
    main()
