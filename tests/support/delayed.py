"""The `pipeinfer` command with random pauses in every rank, so that messages meet in orders that are rare otherwise.

`python -m tests.support.delayed run …` in place of `pipeinfer run …`. A pause may come before an evaluation (of a stage
or of a draft), between two layers, before a message goes out, and before the next one of its kind is seen. The pauses
of each rank are drawn from DELAY_SEED and the rank; DELAY_MS is the mean of one.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tests.support.jobs import environment, launcher

COMMAND = [sys.executable, "-m", "tests.support.delayed"]
REPORT = "delayed:"  # begins the line in which each rank says how often it paused
MEAN_MS = 2.0
OFTEN, SELDOM = 0.5, 0.1  # how likely a pause is
LONGEST = 8.0  # of a pause, in means


class Pauses:
    """One rank's random pauses."""

    def __init__(self, seed: str, mean_s: float) -> None:
        self.rng, self.mean_s, self.n = random.Random(seed), mean_s, 0

    def draw_s(self, share: float) -> float:
        """Nothing, or in that share of the cases some time."""
        if self.rng.random() >= share:
            return 0.0
        self.n += 1
        return min(self.rng.expovariate(1 / self.mean_s), LONGEST * self.mean_s)

    def sleep(self, share: float) -> None:
        time.sleep(self.draw_s(share))


def pause_everywhere(pauses: Pauses) -> None:
    """Put the pauses into this process's models and messages."""
    from pipeinfer.cluster.transport import Inbox, Outbox  # initialises MPI
    from pipeinfer.models.llama.stage import LlamaStage

    evaluate, send, poll = LlamaStage.evaluate, Outbox.send, Inbox.poll
    blind_until_s: dict[int, float] = {}

    def paused_evaluate(model: LlamaStage, batch: Any, stop: Callable[[], bool]) -> Any:
        def paused_stop() -> bool:
            pauses.sleep(SELDOM)
            return stop()

        pauses.sleep(OFTEN)
        return evaluate(model, batch, paused_stop)

    def paused_send(outbox: Outbox, *arguments: Any) -> Any:
        pauses.sleep(OFTEN)
        return send(outbox, *arguments)

    def paused_poll(inbox: Inbox) -> Any:
        if time.monotonic() < blind_until_s.get(id(inbox), 0.0):
            return None
        message = poll(inbox)
        if message is not None:
            blind_until_s[id(inbox)] = time.monotonic() + pauses.draw_s(OFTEN)
        return message

    for owner, name, paused in (
        (LlamaStage, "evaluate", paused_evaluate),
        (Outbox, "send", paused_send),
        (Inbox, "poll", paused_poll),
    ):
        setattr(owner, name, paused)


def run_delayed(n_ranks: int, arguments: Sequence[str], seed: int, timeout_s: float = 120) -> dict[str, Any]:
    """What `run --json` gives on that many ranks, each of which paused.

    Raises AssertionError when the job failed or a rank did not pause; kills a job that hangs and raises TimeoutExpired.
    """
    done = subprocess.run(
        [*launcher(n_ranks), *COMMAND, "run", "--json", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment() | {"DELAY_SEED": str(seed)},
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    pauses = [int(n) for n in re.findall(rf"{REPORT} (\d+) pauses", done.stderr)]  # lines of two ranks may run together
    assert len(pauses) == n_ranks and min(pauses) > 0, f"{pauses} pauses"
    return result


def main() -> None:
    from pipeinfer.cli import main as pipeinfer
    from pipeinfer.cluster.hosts import launch
    from pipeinfer.cluster.hosts.launch import rank_from_environment

    seed = f"{os.environ.get('DELAY_SEED', '0')}/{rank_from_environment()}"
    pauses = Pauses(seed, 1e-3 * float(os.environ.get("DELAY_MS", MEAN_MS)))
    pause_everywhere(pauses)
    leave = launch.leave

    def report_and_leave(code: int) -> NoReturn:
        print(f"{REPORT} {pauses.n} pauses", file=sys.stderr, flush=True)
        leave(code)

    launch.leave = report_and_leave
    pipeinfer()


if __name__ == "__main__":
    main()
