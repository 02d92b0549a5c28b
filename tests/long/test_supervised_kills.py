"""Ranks of supervised jobs are killed, stopped or cut off at random moments, rank 0 and the HTTP process too.

Nothing hangs, each text is that of an undisturbed job, nothing is lost, doubled or left behind.
"""

import contextlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.long.asking import Stream, ask, random_request
from tests.supervisor.test_serving import Service, service
from tests.support.jobs import finish, until
from tests.support.namespaces import hosts, missing
from tests.support.serving import size
from tests.support.supervised import Supervised

pytestmark = pytest.mark.long

N_SERVICES, N_ROUNDS = 4, int(os.environ.get("SUPERVISED_ROUNDS", "25"))
N_BATCHES, N_CUTS = 10, int(os.environ.get("SUPERVISED_CUTS", "6"))
N_STREAMS = 4
GROWTH_KIB = 4096
"""Of the supervisor, while the job is struck."""

WORDS = ["serve", "--port", "0", "-t", "1", "-c", "4096", "--rank-timeout", "3"]
MANY = ["--restarts", "100000"]


@pytest.fixture(autouse=True)
def ranks_join_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped before it has joined is waited for."""
    monkeypatch.setenv("PIPEINFER_JOIN_TIMEOUT", "20")


def strike(rng: random.Random, job: Supervised, with_http: bool) -> str:
    """Some process of the job; what was done to it."""
    victims = list(job.ranks().items())
    if with_http and rng.random() < 0.1 and (http := job.http()):
        victims = [(-1, http)]
    if not victims:
        return "nothing, between two jobs"
    rank, pid = rng.choice(victims)
    number = signal.SIGSTOP if rng.random() < 0.15 else signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return f"{number.name} to {f'rank {rank}' if rank >= 0 else 'the process that speaks HTTP'}"


def read(stream: Stream, url: httpx.URL) -> None:
    """A client comes again where its connection was lost: with the process that speaks HTTP."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        stream.text, stream.at_s = "", []
        with contextlib.suppress(httpx.HTTPError), httpx.Client(base_url=url, timeout=180) as http:
            stream.read(http)
            return
        time.sleep(0.2)
    raise AssertionError(f"request {stream.number} gets no answer")


@pytest.mark.parametrize("seed", range(N_SERVICES))
def test_streams_survive(seed: int) -> None:
    rng = random.Random(seed)
    with service(3, WORDS, MANY) as served:
        numbers = range(40)
        texts = {number: ask(served.http, *random_request(number)) for number in numbers}
        struck, kib = list[str](), list[int]()
        for _ in range(N_ROUNDS):
            struck.append(round_of(rng, served, texts))
            kib.append(size(served.job.process.pid)[0])
        print(
            f"{sum(text.count(' to ') for text in struck)} strikes, "
            f"{served.errors.count('the job starts again')} restarts, the supervisor's KiB: {kib[:: N_ROUNDS // 5]}",
            flush=True,
        )
        assert kib[-1] <= kib[N_ROUNDS // 5] + GROWTH_KIB
        served.http = httpx.Client(base_url=served.http.base_url)


def round_of(rng: random.Random, served: Service, texts: dict[int, str]) -> str:
    """Streams, and strikes while they are read. What was struck."""
    streams = [Stream(number) for number in rng.sample(sorted(texts), N_STREAMS)]
    threads = [threading.Thread(target=read, args=(stream, served.http.base_url), daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    struck = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        time.sleep(rng.choice((rng.uniform(0, 0.3), rng.uniform(0, 3))))
        struck.append(strike(rng, served.job, with_http=True))
    for thread in threads:
        thread.join(timeout=330)
    wrong = [stream.number for stream in streams if stream.text != texts[stream.number]]
    assert not wrong, f"requests {wrong} after {struck}: {[stream.text for stream in streams]}\n{served.errors[-3000:]}"
    return ", ".join(struck)


@pytest.mark.parametrize("seed", range(N_BATCHES))
def test_batches_survive(tmp_path: Path, seed: int) -> None:
    rng = random.Random(100 + seed)
    words = batch_of(tmp_path, rng)
    job, struck = Supervised(3, [*words, str(tmp_path / "out")], MANY), list[str]()
    for _ in range(rng.randint(1, 4)):
        time.sleep(rng.uniform(0, 5))
        if job.process.poll() is None:
            struck.append(strike(rng, job, with_http=False))
    code, _, errors = job.finish(timeout_s=180)
    assert code == 0, f"{struck}: {errors}"
    check_results(tmp_path, words, struck)
    until(lambda: not job.processes(), 5)


@pytest.mark.parametrize("seed", range(N_CUTS))
def test_batches_survive_cut_links(tmp_path: Path, seed: int) -> None:
    """Some are mended before anyone notices, some while the job ends or starts again."""
    if why := missing():
        pytest.skip(why)
    rng, cut, said = random.Random(200 + seed), list[str](), list[str]()
    words = batch_of(tmp_path, rng)
    with hosts(4, tmp_path) as made:
        job = made.start([*words, str(tmp_path / "out")], supervised=True)
        ended = threading.Timer(300, job.kill)
        ended.start()
        reading = threading.Thread(target=lambda: said.append(job.communicate()[1]))
        reading.start()
        for _ in range(rng.randint(1, 3)):
            time.sleep(rng.uniform(0, 5))
            name, lasts_s = rng.choice(made.names[1:]), rng.choice((rng.uniform(0, 3), rng.uniform(3, 12)))
            cut.append(f"{name} for {lasts_s:.1f} s")
            made.cut(name)
            time.sleep(lasts_s)
            made.mend(name)
        reading.join()
        ended.cancel()
        print(f"{', '.join(cut)}; {said[0].count('the job starts again')} restarts", flush=True)
        assert job.returncode == 0, (cut, said)
    check_results(tmp_path, words, cut)


def batch_of(folder: Path, rng: random.Random) -> list[str]:
    """Words of a command that answers it; the file for results comes last."""
    lines = [
        json.dumps(
            {
                "prompt": f"def f{n}(",
                "ignore_eos": True,
                "max_tokens": rng.randint(20, 150),
                "seed": n,
                "temperature": 0.7,
            }
        )
        for n in range(12)
    ]
    (folder / "in").write_text("\n".join(lines))
    return ["batch", str(folder / "in"), "--parallel", "4", "-t", "1", "--rank-timeout", "3", "-o"]


def check_results(folder: Path, words: list[str], struck: list[str]) -> None:
    """Those of an undisturbed job, nothing lost or doubled."""
    assert finish(1, [*words, str(folder / "whole"), "--policy", "iterative"]).returncode == 0
    found, whole = (
        sorted((result["index"], result["text"]) for result in map(json.loads, path.read_text().splitlines()))
        for path in (folder / "out", folder / "whole")
    )
    assert found == whole, struck
