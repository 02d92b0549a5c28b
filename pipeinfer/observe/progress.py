"""Tell on standard error how far a long prompt, a transfer or a batch is. Knows counts and a clock, no engine."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

PATIENCE_S = 1.0
"""What has ended by then is not spoken of."""

LONGEST_S = 60.0
"""Between two lines."""


class ProgressBar:
    """From PATIENCE_S on a bar on a terminal, else a line after 1, 2, 4, … seconds and from then on each minute."""

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float],
        what: str,
        n_total: int,
        unit: str,
        per_unit: float = 1,
        columns: tuple[ProgressColumn, ...] = (MofNCompleteColumn(),),
        stays: bool = False,
    ) -> None:
        """It begins now. Lines count `n_total / per_unit` of `unit`; `columns`: of a bar, which `stays` at the end or
        not."""
        self.console, self.clock, self.what, self.n_total = console, clock, what, n_total
        self._unit, self._per_unit, self._columns, self._stays = unit, per_unit, columns, stays
        self._n_done = self._n_tokens = 0
        self._start_s, self._next_s = clock(), PATIENCE_S
        self._bar: Progress | None = None

    def advance(self, n_more: int) -> None:
        self.update(self._n_done + n_more)

    def update(self, n_done: int, n_tokens: int = 0) -> None:
        """`n_done` of all, and so many further tokens have come, whose rate is told if there are any."""
        self._n_done, self._n_tokens = n_done, self._n_tokens + n_tokens
        passed_s = self.clock() - self._start_s
        rate = f", {self._n_tokens / max(passed_s, 1e-9):.1f} tokens/s" if self._n_tokens else ""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=n_done, rate=rate)
        elif passed_s >= self._next_s and n_done < self.n_total:
            self._show(passed_s, rate)
        if n_done >= self.n_total:
            self.close()

    def _show(self, passed_s: float, rate: str) -> None:
        if self.console.is_terminal:
            columns = (TextColumn(self.what), BarColumn(), *self._columns, TextColumn("{task.fields[rate]}"),
                       TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())  # fmt: skip
            self._bar = Progress(*columns, console=self.console, transient=not self._stays)
            self._bar.add_task("", total=self.n_total, completed=self._n_done, rate=rate)
            self._bar.start()
            return
        while self._next_s <= passed_s:
            self._next_s += min(self._next_s, LONGEST_S)
        done, total = (f"{n / self._per_unit:.0f}" for n in (self._n_done, self.n_total))
        self.console.print(f"{self.what}: {done} of {total} {self._unit} after {passed_s:.1f} s{rate}", style="dim")

    def close(self) -> None:
        """End the bar. May be called twice."""
        if self._bar:
            self._bar.stop()
            self._bar = None


def transfer_bar(console: Console, clock: Callable[[], float], what: str, n_bytes: int) -> ProgressBar:
    """Of bytes on their way."""
    return ProgressBar(console, clock, what, n_bytes, "MB", 1e6, (DownloadColumn(), TransferSpeedColumn()))
