"""Clients of a supervised service see a pause when a rank is lost: their streams go on to the same text."""

import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from pipeinfer.models.demo import DRAFT, TARGET
from tests.long.asking import Stream, ask, random_request
from tests.support.cases import in_long
from tests.support.jobs import until
from tests.support.paces import pace_words, slow_runs
from tests.support.serving import open_texts
from tests.support.supervised import Supervised

WORDS = ["serve", "--port", "0", "-t", "1", "-c", "4096", "--rank-timeout", "5"]


class Service:
    """A supervised one, that listens."""

    def __init__(self, n_ranks: int = 3, words: Sequence[str] = WORDS, options: Sequence[str] = ()) -> None:
        self.job, self.lines = Supervised(n_ranks, words, options), list[str]()
        self._urls: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.http = httpx.Client(base_url=self._urls.get(timeout=180), timeout=60)
        except queue.Empty:
            self.job.end()
            raise AssertionError(f"it does not listen: {self.errors}") from None

    def _read(self) -> None:
        assert self.job.process.stderr
        for line in self.job.process.stderr:
            self.lines.append(line.decode())
            if b"listening on " in line:
                self._urls.put(line.decode().rpartition(" ")[2].strip())

    @property
    def errors(self) -> str:
        return "".join(self.lines)

    def counted(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


@contextmanager
def service(n_ranks: int = 3, words: Sequence[str] = WORDS, options: Sequence[str] = ()) -> Iterator[Service]:
    """It ends in order, and leaves nothing."""
    served = Service(n_ranks, words, options)
    try:
        yield served
        served.http.close()
        served.job.process.send_signal(signal.SIGINT)
        assert served.job.process.wait(timeout=40) == 130, served.errors
        until(lambda: not served.job.processes(), 10)
    finally:
        served.job.end()


def streams(served: Service, numbers: range) -> tuple[list[Stream], list[threading.Thread]]:
    """They are being read, each by a thread."""
    found = [Stream(number) for number in numbers]
    threads = [threading.Thread(target=stream.read, args=(served.http,), daemon=True) for stream in found]
    for thread in threads:
        thread.start()
    return found, threads


def test_streams_go_on_whichever_rank_dies() -> None:
    numbers, begin_s = range(12), time.monotonic()
    with service() as served:
        texts = [ask(served.http, *random_request(number)) for number in numbers]
        for at, rank in ((0, 1), (4, 0), (8, 2)):
            reading, threads = streams(served, numbers[at : at + 4])
            until(lambda reading=reading: any(stream.text for stream in reading), 60)  # type: ignore[misc]
            served.job.strike(rank)
            for thread in threads:
                thread.join(timeout=90)
            assert [stream.text for stream in reading] == texts[at : at + 4], served.errors
        until(lambda: served.counted("pipeinfer:recoveries_total") >= 3)  # a text may be complete before
        assert served.counted("pipeinfer:recoveries_total") == served.errors.count("the job starts again")
        assert 0 < served.counted("pipeinfer:recovery_seconds_total") < time.monotonic() - begin_s


def test_it_says_that_it_recovers(tmp_path: Path) -> None:
    """The launcher starts nothing while there is a file."""
    (gate := tmp_path / "gate").write_text(f'#!/bin/sh\nwhile test -e {tmp_path}/shut; do sleep 0.1; done\nexec "$@"\n')
    gate.chmod(0o755)
    with service(options=[str(gate)]) as served, ThreadPoolExecutor(1) as pool:
        (tmp_path / "shut").touch()
        served.job.strike(2)
        until(lambda: served.http.get("/health").status_code == 503)
        until(lambda: served.http.get("/health").json()["reason"] != "the job was lost")
        found = served.http.get("/health").json()
        assert found["status"] == "recovering", found
        assert "rank 2" in found["reason"] and "died of SIGKILL" in found["reason"], found
        text = pool.submit(ask, served.http, *random_request(1))
        until(lambda: bool(open_texts(served.http)))
        (tmp_path / "shut").unlink()
        assert text.result() and served.http.get("/health").json() == {"status": "ok"}
        assert "from another machine: ssh -L " in served.errors


def test_health_is_known_while_nobody_asks() -> None:
    """A rank that stands still is silent for the watch after a minute; a token that does not come is noticed before."""
    with service(2, [*WORDS[:-2], "--rank-timeout", "100"]) as served:
        rank = served.job.ranks()[1]
        os.kill(rank, signal.SIGSTOP)
        until(lambda: served.http.get("/health").json().get("status") == "stalled", 120)
        assert "no token has come for" in served.http.get("/health").json()["reason"]
        os.kill(rank, signal.SIGCONT)
        until(lambda: served.http.get("/health").json() == {"status": "ok"})


@pytest.mark.parametrize("number", [in_long(signal.SIGKILL), signal.SIGSTOP])
def test_the_process_that_speaks_http_is_replaced(number: int) -> None:
    with service(2) as served:
        text, http = ask(served.http, *random_request(3)), served.job.http()
        os.kill(http, number)

        def answers() -> bool:
            try:
                with httpx.Client(base_url=served.http.base_url, timeout=5) as client:
                    return client.get("/health").status_code == 200 and ask(client, *random_request(3)) == text
            except httpx.HTTPError:
                time.sleep(0.2)
                return False

        until(answers, 90)
        assert served.job.http() != http
        served.http = httpx.Client(base_url=served.http.base_url)


def test_another_model_in_its_place_ends_it(tmp_path: Path) -> None:
    """Its tokens would be written with the vocabulary of the first one."""
    model = tmp_path / "model.gguf"
    shutil.copy(TARGET, model)
    served = Service(2, [*WORDS, "-m", str(model), "-md", "none"])
    shutil.copy(DRAFT, tmp_path / "other")
    (tmp_path / "other").rename(model)
    served.job.strike(1)
    try:
        assert served.job.process.wait(timeout=60) == 2, served.errors
        until(lambda: "not those with which this job began" in served.errors)
    finally:
        served.job.end()


def test_clients_are_told_when_the_supervisor_dies(tmp_path: Path) -> None:
    """Nothing of the job is left then."""
    pace = pace_words(tmp_path, slow_runs(100))
    served, found = Service(2, [*WORDS, *pace]), list[httpx.Response]()
    path, asked = random_request(0)
    body = asked | {"max_tokens": 900, "ignore_eos": True}
    asking = threading.Thread(target=lambda: found.append(served.http.post(path, json=body)))
    asking.start()
    until(lambda: bool(open_texts(served.http)))
    served.job.process.kill()
    asking.join(timeout=60)
    until(lambda: not served.job.processes())
    # the launcher ends with the supervisor, and rank 0 may say so first
    said = ("the job behind this server has ended", "the server has stopped before this was complete")
    assert found[0].status_code == 503 and any(text in found[0].text for text in said)
