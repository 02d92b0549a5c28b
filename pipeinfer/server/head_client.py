"""The HTTP process's end of the channel to rank 0: open requests and their output. Knows no HTTP and no text."""

import asyncio
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.job.requests.answers import Entry
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.serve import channel
from pipeinfer.server.choices import Answer, Changed, Choice
from pipeinfer.server.errors import DRAINING_S, FULL_S, LOADING_S, Refusal, lost
from pipeinfer.server.front import most_of_one
from pipeinfer.server.metrics import Metrics

LINE_BYTES = 1 << 26
N_WRITES = 16
"""Clients that get output one after the other: most of its cost is waking who reads, and an awake reader need not be
woken for the next one. More would delay the first."""

RETRY = {"loading": ("the models are being loaded", LOADING_S), "draining": ("the server is shutting down", DRAINING_S)}


class HeadState(Enum):
    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"  # requests are accepted, and wait
    DRAINING = "draining"
    LOST = "lost"


class HeadClient:
    """`n_most`: choices that may be open or waiting. `is_followed`: another rank 0 follows a lost one."""

    def __init__(self, n_most: int, metrics: Metrics, is_followed: bool = False) -> None:
        self.n_most, self.metrics, self.is_followed = n_most, metrics, is_followed
        self.state = HeadState.LOADING
        self.choices: dict[int, Choice] = {}
        self.verdict_s = self.trial_s = -math.inf  # of the last tokens, and of the last request of `try_out`
        self.is_listening = False
        self.limit = 0  # tokens of a request
        self.reason, self.lost_s = "", math.nan  # while it recovers
        self.closing_s = 0.0  # how long clients have once rank 0 is gone
        self._ids = itertools.count()
        self._watchers: set[asyncio.Queue[channel.Snapshot]] = set()
        self.writer: asyncio.StreamWriter | None = None

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Receive messages until rank 0 is lost."""
        try:
            while line := await reader.readline():
                self._receive(channel.decode(line))
                await asyncio.sleep(0)  # buffered lines are read at once, and heartbeats must not wait for all
        except (OSError, ValueError):  # ValueError: a line that is too long, or no message
            pass

    def give_up(self) -> None:
        """End all requests: no rank 0 will follow."""
        self.state = HeadState.LOST
        for choice in list(self.choices.values()):
            self._finish(choice, channel.Finished(choice.id, ""))

    def recover(self, why: str = "") -> None:
        """Rank 0 is gone and may be restarted; open requests wait for it. Not once it was given up. `why`: it was lost,
        whatever it said before."""
        if self.state is HeadState.LOST:
            return
        if self.state is not HeadState.RECOVERING:
            self.state, self.lost_s, self.reason = HeadState.RECOVERING, time.monotonic(), "the job was lost"
        self.reason, self.writer, self.trial_s = why or self.reason, None, -math.inf
        self.closing_s = 0.0 if why else self.closing_s
        for choice in self.choices.values():
            choice.has_turn = False

    def _ready(self, limit: int) -> None:
        """Submit the open requests again, but for those that no longer fit."""
        before, self.state, self.limit = self.state, HeadState.READY, limit
        if before is HeadState.RECOVERING:
            self.metrics.recovered(time.monotonic() - self.lost_s)
            for choice in list(self.choices.values()):
                if choice.request.n_ctx > limit:
                    self._finish(choice, channel.Finished(choice.id, ""))
                else:
                    request = replace(choice.request, begun=choice.resume())
                    self.tell(channel.Ask(choice.id, choice.client, request))
            if self._watchers:
                self.tell(channel.SendSnapshots(True))

    # -- requests

    def check_ready(self) -> None:
        """Raises Refusal while no request is accepted."""
        if self.state is HeadState.LOST:
            raise lost()
        if self.state not in (HeadState.READY, HeadState.RECOVERING):
            message, retry_s = RETRY[self.state.value]
            raise Refusal(503, message, retry_s)

    def ask(self, requests: Sequence[GenerationRequest], client: str) -> Answer:
        """Submit requests. Raises Refusal when there is no room."""
        self.check_ready()
        if (n := len(requests)) > (n_most := most_of_one(self.n_most)):
            raise Refusal(
                400, f"the request wants {n} texts, and one address may have {n_most} at a time; ask for fewer"
            )
        n_client = sum(choice.client == client for choice in self.choices.values())
        limits = (len(self.choices), self.n_most, ""), (n_client, most_of_one(self.n_most), " of this address")
        for n_open, n_most, whose in limits:
            if n_open + len(requests) > n_most:
                load = f"{n_open} texts{whose} are being written or wait"
                more = f"with {len(requests)} more they were more than {n_most}"
                raise Refusal(429, f"{load}, and {more}; ask again later", FULL_S)
        if outgrown := self.outgrown(requests):
            raise outgrown
        answer = Answer([next(self._ids) for _ in requests], requests, client)
        for choice in answer.choices:
            self.choices[choice.id] = choice
            if self.state is HeadState.READY:
                self.tell(channel.Ask(choice.id, client, choice.request))
        return answer

    def outgrown(self, requests: Iterable[GenerationRequest]) -> Refusal | None:
        """The refusal of requests that no longer fit, if any of them does not."""
        if not self.limit or (n := max(each.n_ctx for each in requests)) <= self.limit:
            return None
        size = f"the request has {n} tokens with the text to come"
        return Refusal(503, f"{size}, and since hosts were lost the job holds {self.limit}; ask for less")

    @property
    def stalls_s(self) -> float:
        """How long the request of `try_out` has had no token; 0 once it has."""
        return time.monotonic() - self.trial_s if self.trial_s > self.verdict_s else 0.0

    async def try_out(self, prompt: Sequence[int], idle_s: float) -> None:
        """Request a token whenever the server was idle for `idle_s`, to notice a job that does nothing."""
        while True:
            await asyncio.sleep(idle_s)
            is_idle = self.state is HeadState.READY and not self.choices
            if is_idle and not self.stalls_s and time.monotonic() - self.verdict_s >= idle_s:
                self.trial_s = time.monotonic()
                trial = GenerationRequest(tuple(prompt), 1, len(prompt) + 1, SamplingParams(0, 0.0), frozenset())
                self.tell(channel.Ask(next(self._ids), "", trial))  # its output has no reader

    def cancel(self, answer: Answer) -> None:
        """Cancel what is open of an answer whose client has gone."""
        for choice in answer.choices:
            if choice.finish is None and choice.id in self.choices:
                del self.choices[choice.id]
                choice.finish, choice.was_cancelled = "", True
                self.tell(channel.Cancel(choice.id))
                self.metrics.ended(choice, 0)

    def watch(self) -> asyncio.Queue[channel.Snapshot]:
        """A queue of the newest snapshot, until `unwatch`."""
        queue = asyncio.Queue[channel.Snapshot](1)
        self._watchers.add(queue)
        self.tell(channel.SendSnapshots(True))
        return queue

    def unwatch(self, queue: asyncio.Queue[channel.Snapshot]) -> None:
        self._watchers.discard(queue)
        if not self._watchers:
            self.tell(channel.SendSnapshots(False))

    def listen(self) -> None:
        """Tell rank 0 that clients can connect."""
        self.is_listening = True
        self.tell(channel.Listening())

    def tell(self, message: channel.FromFront) -> None:
        if self.writer and self.state is not HeadState.LOST:
            self.writer.write(channel.encode(message))

    # -- messages of rank 0

    def _receive(self, message: channel.FromHead) -> None:
        match message:
            case channel.TextUpdates():
                self._update(message)
            case channel.Finished(finish="") if self.is_followed:
                pass  # launchers stop rank 0 when another rank dies: the next one resumes what it gives up
            case channel.Finished(id) if id in self.choices:
                self._finish(self.choices[id], message)
            case channel.PromptProgress(id, n_tokens, n_cached) if id in self.choices:
                choice = self.choices[id]
                choice.n_read, choice.n_cached = n_tokens, n_cached
                choice.changed.set()
            case channel.PromptScores(id, entries) if id in self.choices:
                self.choices[id].score([Entry(*entry) for entry in entries])
            case channel.Started(id) | channel.Preempted(id) if id in self.choices:
                self._turn(self.choices[id], isinstance(message, channel.Started))
            case channel.Ready(limit):
                self._ready(limit)
            case channel.Draining():
                self.state = HeadState.DRAINING
            case channel.Closing(grace_s):
                self.closing_s = grace_s
            case channel.Snapshot():
                self._show(message)

    def _update(self, updates: channel.TextUpdates) -> None:
        """Metrics are counted after all output was written."""
        self.verdict_s = time.monotonic()
        parts = [(self.choices[part[0]], part) for part in updates.parts if part[0] in self.choices]
        before_s, counts = [choice.heard_s for choice, _ in parts], []
        for choice, (_, tokens, text, entries) in parts:
            choice.verdict_s, choice.told_s, choice.heard_s = updates.at_s, updates.told_s, self.verdict_s
            counts.append(choice.add(tokens, text, [Entry(*entry) for entry in entries]))
        changes = list({choice.changed: None for choice, _ in parts})
        for start in range(0, len(changes), N_WRITES):
            self._write(changes[start : start + N_WRITES])
        for (choice, _), each_s, n_tokens in zip(parts, before_s, counts, strict=True):
            if n_tokens:
                self.metrics.generated(choice, n_tokens, each_s)

    def _write(self, changes: Sequence[Changed]) -> None:
        """Write what can be written now, and wake the coroutines of the rest."""
        writes = []
        for changed in changes:
            if write := changed.push() if changed.push else None:
                writes.append(write)
            else:
                changed.set()
        for write in writes:
            write()

    def _turn(self, choice: Choice, has_turn: bool) -> None:
        choice.n_read, choice.has_turn = 0, has_turn
        if has_turn and math.isnan(choice.started_s):
            choice.started_s = time.monotonic()
            self.metrics.started(choice)
        choice.changed.set()

    def _finish(self, choice: Choice, message: channel.Finished) -> None:
        choice.finish, choice.stop, choice.timings = message.finish, message.stop, message.timings
        del self.choices[choice.id]
        self.metrics.ended(choice, message.n_runs)
        choice.changed.set()

    def _show(self, snapshot: channel.Snapshot) -> None:
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()  # a slow watcher misses some
            queue.put_nowait(snapshot)
        self.metrics.ranks_reported(snapshot)
