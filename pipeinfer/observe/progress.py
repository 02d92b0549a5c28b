"""Tell on standard error how far a long prompt or a batch is. Knows counts and a clock, no engine."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

PATIENCE_S = 1.0
"""A prompt that is read by then is not spoken of."""

LONGEST_S = 60.0
"""Between two lines about a batch."""


class PromptProgress:
    """A bar on a terminal, which disappears with the last row; else a line after 1, 2, 4, … seconds."""

    def __init__(self, console: Console, clock: Callable[[], float], n_rows: int) -> None:
        """The prompt, of `n_rows` rows, begins now."""
        self.console, self.clock, self.n_rows = console, clock, n_rows
        self._start_s = clock()
        self._next_s = PATIENCE_S
        self._bar: Progress | None = None

    def update(self, n_done: int) -> None:
        """So many rows of the prompt have been evaluated."""
        waited_s = self.clock() - self._start_s
        if n_done >= self.n_rows:
            self.close()
        elif self._bar:
            self._bar.update(self._bar.task_ids[0], completed=n_done)
        elif waited_s >= self._next_s:
            self._show(n_done, waited_s)

    def _show(self, n_done: int, waited_s: float) -> None:
        if self.console.is_terminal:
            columns = (TextColumn("prompt"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.add_task("prompt", total=self.n_rows, completed=n_done)
            self._bar.start()
            return
        while self._next_s <= waited_s:
            self._next_s *= 2
        self.console.print(f"prompt: {n_done} of {self.n_rows} tokens after {waited_s:.1f} s", style="dim")

    def close(self) -> None:
        """Take the bar away. May be called twice."""
        if self._bar:
            self._bar.stop()
            self._bar = None


class TransferProgress:
    """Bytes on their way to a rank: a bar on a terminal, which disappears, else a line after 1, 2, 4, … seconds."""

    def __init__(self, console: Console, clock: Callable[[], float], what: str, n_bytes: int) -> None:
        """It begins now."""
        self.console, self.clock, self.what, self.n_bytes, self.n_done = console, clock, what, n_bytes, 0
        self._start_s = clock()
        self._next_s = PATIENCE_S
        columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=n_bytes)
        self._bar.start()

    def advance(self, n_bytes: int) -> None:
        """So many more are out."""
        self.n_done += n_bytes
        self._bar.update(self._task, completed=self.n_done)
        passed_s = self.clock() - self._start_s
        if not self.console.is_terminal and passed_s >= self._next_s and self.n_done < self.n_bytes:
            while self._next_s <= passed_s:
                self._next_s *= 2
            share = f"{self.n_done / 1e6:.0f} of {self.n_bytes / 1e6:.0f} MB"
            self.console.print(f"{self.what}: {share} after {passed_s:.0f} s", style="dim")

    def close(self) -> None:
        """Take the bar away. May be called twice."""
        self._bar.stop()


class BatchProgress:
    """Requests that are done, of all, and tokens a second: a bar on a terminal, else a line after 1, 2, 4, … seconds,
    and from then on each minute."""

    def __init__(self, console: Console, clock: Callable[[], float], n_total: int, n_done: int) -> None:
        """`n_done`: of the requests, before this job."""
        self.console, self.clock, self.n_total, self.n_tokens = console, clock, n_total, 0
        self._start_s = clock()
        self._next_s = PATIENCE_S
        # plain lines where there is no terminal to draw on
        columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"),
                   TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())  # fmt: skip
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=n_total, completed=n_done, speed="")
        self._bar.start()

    def update(self, n_done: int, n_tokens: int) -> None:
        """So many requests are done, so many further tokens have come."""
        self.n_tokens += n_tokens
        passed_s = self.clock() - self._start_s
        speed = f"{self.n_tokens / max(passed_s, 1e-9):.1f} tokens/s"
        if self.console.is_terminal:
            self._bar.update(self._task, completed=n_done, speed=speed)
        elif passed_s >= self._next_s:
            while self._next_s <= passed_s:
                self._next_s += min(self._next_s, LONGEST_S)
            self.console.print(f"{n_done} of {self.n_total} requests after {passed_s:.0f} s, {speed}", style="dim")

    def close(self) -> None:
        self._bar.stop()
