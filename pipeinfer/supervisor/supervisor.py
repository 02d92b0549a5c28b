"""Start a job, and start it again where it was when a rank or a host is lost. Above MPI: launchers kill jobs, rank 0's
too. Knows no request."""

import contextlib
import math
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path

from pipeinfer.child import is_open_mpi
from pipeinfer.cluster.hosts.launcher import Launcher
from pipeinfer.cluster.watch.protocol import SUPERVISOR, mark_of
from pipeinfer.errors import UserError
from pipeinfer.job.process.signals import on_signals
from pipeinfer.job.process.stop import ONE_PRESS_S
from pipeinfer.job.process.streams import RawTerminal, complain, report_lost_output
from pipeinfer.job.process.supervised import Attempt
from pipeinfer.supervisor.job import Job, KeptInput, KeptOutput, Loss
from pipeinfer.supervisor.links import Links
from pipeinfer.text import count_text

WINDOW_S = 600.0  # `restarts` and `N_DEATHS` are limits within this time
N_NEVER = 4  # attempts, if rank 0 has begun in none: the launcher's command is wrong, or its hosts are
N_DEATHS = 2  # a host on which ranks have died so often is left out, while there are others
PROBE_S = 20.0  # how long a launcher may take to start nothing on a host
BACK_S = 5.0  # the same for a host that is left out
SECOND_S = 5.0  # how long a job may take to end after a second signal
LONGEST_DELAY_S = 30.0
LOOK_S = 0.05
OTHER_FOLDER = "set TMPDIR to a folder with more room"
IN_ORDER = (0, 2)
"""Exit codes of a job that is not started again: it is complete, or its input is wrong and stays wrong."""

INTERRUPTED = 128 + signal.SIGINT  # the exit code of a chat that its user has left with Ctrl-C


class Supervisor:
    """`restarts`: at most, within `WINDOW_S`."""

    def __init__(self, launcher: Launcher, restarts: int, environ: Mapping[str, str]) -> None:
        self.launcher, self.restarts, self.environ = launcher, restarts, environ
        # Open MPI passes only variables that it is given to ranks on other hosts
        by_open_mpi = bool(launcher.words) and not launcher.is_srun and is_open_mpi(launcher.words[0])
        self._pass_variable = ["-x", SUPERVISOR] if by_open_mpi else []
        self.excluded: dict[str, str] = {}  # hosts that are left out, and why
        self._name, self._now_s = secrets.token_hex(8), time.time()
        self._output = KeptOutput("--json" in launcher.command)
        self._links = Links(not launcher.hosts, self._output, mark_of(self._name))
        self._terminal: RawTerminal | None = None
        self._job: Job | None = None
        self._is_begun = False  # whether rank 0 of the last attempt has connected
        self._has_begun = False  # whether it has in any
        self._stopped_by, self._stopped_s = 0, math.inf  # the last signal's number, the first one's time
        self._kill_s = math.inf  # when a job that got two signals is killed
        self._ignored_s = -math.inf  # when an interrupt was ignored last
        self._starts_s = deque[float]()  # of restarts
        self._deaths: dict[str, deque[float]] = {}  # by host
        self._n_fruitless = 0  # attempts in a row that got nowhere

    def run(self) -> int:
        """Returns the exit code."""
        on_signals(self._on_signal)
        with contextlib.ExitStack() as files:
            number, hosts_file = 0, Path()
            try:
                if self.launcher.hosts:  # this process may be killed, and leaves a folder then
                    hosts_file = Path(files.enter_context(tempfile.TemporaryDirectory(prefix="pipeinfer-"))) / "hosts"
                file = files.enter_context(tempfile.TemporaryFile()) if self.launcher.reads_input else None
            except OSError as error:
                raise UserError(f"no temporary file can be made: {error.strerror}; {OTHER_FOLDER}") from None
            if file:
                self._terminal = self._take_terminal(files)
                self._links.input = KeptInput(file, self._terminal.act) if self._terminal else KeptInput(file)
            while True:
                number += 1
                code, loss = self._attempt(number, hosts_file)
                in_order = code in IN_ORDER or (self.launcher.is_chat and code == INTERRUPTED)
                if self._stopped_by or self._output.error or self._input_error or (in_order and not loss):
                    self._output.end()
                    self._links.close()
                    return self._exit_code(code, loss)
                reported = self._job and self._job.reported
                try:
                    self._prepare_restart(loss or reported or Loss(f"the job ended with exit code {code}"))
                except UserError as error:
                    complain(str(error))
                    self._links.close()
                    if self._stopped_by:
                        return 128 + self._stopped_by
                    return (code or 1) if self._has_begun else 2

    @property
    def _input_error(self) -> str:
        """Why standard input cannot be kept; empty if it can."""
        return self._links.input.error if self._links.input else ""

    def _exit_code(self, code: int, loss: Loss | None) -> int:
        """The supervisor's, for the last attempt's; prints what went wrong with its streams."""
        if self._output.error:
            return report_lost_output(self._output.error)
        if self._input_error:
            complain(f"standard input cannot be kept in {tempfile.gettempdir()}: {self._input_error}; {OTHER_FOLDER}")
            return 2
        failed = loss or code not in IN_ORDER or not self._is_begun  # a launcher that starts no rank may end with 0
        return 128 + self._stopped_by if self._stopped_by and failed else code

    def _take_terminal(self, files: contextlib.ExitStack) -> RawTerminal | None:
        """The terminal of a chat's user: rank 0, which may be on another host, edits the lines. None without one."""
        if not (self.launcher.is_chat and os.isatty(0) and os.isatty(2)):
            return None
        size = os.get_terminal_size(0)
        if size.columns and size.lines:
            self.environ = {**self.environ, "COLUMNS": str(size.columns), "LINES": str(size.lines)}
        try:
            return files.enter_context(contextlib.closing(RawTerminal(os.dup(0), os.getpid())))
        except OSError:  # no process can be started: the launcher reports it too
            return None

    def _attempt(self, number: int, hosts_file: Path) -> tuple[int, Loss | None]:
        """(exit code, why the job was lost). What is lost after rank 0's last act does not matter."""
        self._links.begin(number)
        try:
            words = self.launcher.without(self.excluded, hosts_file, again=number > 1)
        except OSError as error:
            raise UserError(f"{hosts_file} cannot be written: {error.strerror}; {OTHER_FOLDER}") from None
        words[1:1] = self._pass_variable
        keys = self._links.input is not None, os.isatty(0), self._terminal is not None
        choices = self._links.numerics, self._links.fitted, self._now_s
        attempt = Attempt(self._name, number, self._links.rendezvous, *keys, *choices)
        try:
            self._job = Job(attempt, words, self.environ)
        except OSError as error:
            raise UserError(f"{words[0]}: {error.strerror}; check PATH, or give its path") from None

        def must_end() -> bool:
            # there is nothing to keep before rank 0 has connected, and a launcher that only starts may lose a signal
            is_stopped = self._stopped_by and not self._links.is_connected
            return bool(self._output.error or self._input_error or is_stopped or time.monotonic() > self._kill_s)

        code = self._job.wait(must_end)
        self._is_begun = self._links.is_connected
        self._has_begun |= self._is_begun
        self._links.end(must_end=lambda: time.monotonic() > self._kill_s)
        own_code = self._links.exit_code
        return (code, self._job.loss) if own_code is None else (own_code, None)

    def _prepare_restart(self, loss: Loss) -> None:
        """Decide with which hosts and when the job starts again. Raises UserError if it does not."""
        self._links.lose(loss.why)
        now_s = time.monotonic()
        for times in (self._starts_s, *self._deaths.values()):
            while times and times[0] < now_s - WINDOW_S:
                times.popleft()
        if len(self._starts_s) >= self.restarts:
            times_text = f"{count_text(self.restarts, 'time')} within {WINDOW_S:g} s (--restarts)"
            raise UserError(f"{loss.why}; the job was started again {times_text}, and is not any more")
        self._starts_s.append(now_s)
        self._n_fruitless = 0 if self._links.has_progress else self._n_fruitless + 1
        if not self._has_begun and self._n_fruitless >= N_NEVER:
            hosts = ", ".join({each.name: None for each in self.launcher.hosts})
            way_out = f"check the launcher's words{hosts and f', and that its hosts can be reached: {hosts}'}"
            raise UserError(f"{loss.why}; no rank has started in {N_NEVER} attempts: {way_out}")
        self._take_back()
        host = self.launcher.host_of(loss.rank, loss.host) if loss.rank >= 0 else ""
        if host:
            self._deaths.setdefault(host, deque()).append(now_s)
            if loss.is_unreachable or len(self._deaths[host]) >= N_DEATHS:
                self._leave_out(host, loss.why)
        elif self.launcher.hosts and self._n_fruitless:
            self._probe()
        delay_s = min(LONGEST_DELAY_S, 2.0 ** (self._n_fruitless - 2)) if self._n_fruitless > 1 else 0.0
        without = f", without {', '.join(self.excluded)}" if self.excluded else ""
        later = f" in {delay_s:g} s" if delay_s else ""
        complain(f"{loss.why}; the job starts again{later}{without} (restart {len(self._starts_s)} of {self.restarts})")
        while time.monotonic() < now_s + delay_s and not self._stopped_by:
            time.sleep(LOOK_S)
        if self._stopped_by:
            raise UserError("stopped before the job started again")

    def _leave_out(self, host: str, why: str) -> None:
        if len(self.excluded) + 1 < len({each.name for each in self.launcher.hosts}):
            self.excluded[host] = why

    def _take_back(self) -> None:
        """Hosts that are left out, and on which the launcher starts programs again."""
        tried = [host for host in self.excluded if len(self._deaths.get(host, ())) < N_DEATHS]
        for host in {*tried} - self._failing(tried, BACK_S, untried=True):
            del self.excluded[host]
            complain(f"host {host} can be reached again, and is taken again")

    def _probe(self) -> None:
        """Leave out hosts on which the launcher starts nothing any more: a host that is down reports nothing."""
        for host in self._failing({each.name for each in self.launcher.hosts} - self.excluded.keys(), PROBE_S):
            self._leave_out(host, "nothing can be started there")

    def _failing(self, hosts: Collection[str], limit_s: float, untried: bool = False) -> set[str]:
        """Those on which the launcher starts nothing within the limit. `untried`: whether those count too that are not
        tried, where no file can be made for it."""
        failing = {*hosts} if untried else set[str]()
        processes: dict[str, subprocess.Popen[bytes]] = {}
        with (
            contextlib.suppress(OSError),
            tempfile.TemporaryDirectory(prefix="pipeinfer-") as folder,
            contextlib.ExitStack() as running,
        ):
            for number, host in enumerate(hosts):
                words = self.launcher.trial(host, Path(folder) / str(number))
                none, environ = subprocess.DEVNULL, dict(self.environ)
                process = subprocess.Popen(words, stdin=none, stdout=none, stderr=none, env=environ)
                processes[host] = running.enter_context(process)
                running.callback(process.kill)
            deadline = time.monotonic() + limit_s
            for host, process in processes.items():
                try:
                    code = process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    code = -1
                if code:
                    failing.add(host)
                else:
                    failing.discard(host)
        return failing

    def _ignores_interrupt(self) -> bool:
        """Whether an interrupt is ignored: a chat that starts again has no answer to stop, and ends with the second."""
        now_s, before_s = time.monotonic(), self._ignored_s
        if not self._starts_s or now_s < before_s + SECOND_S:
            return False
        self._ignored_s = now_s
        complain("the chat starts again; press Ctrl-C again to end it")
        return True

    def _on_signal(self, number: int) -> None:
        """Forward it: the job ends in order, and is not started again. In a chat Ctrl-C may stop an answer instead."""
        if number == signal.SIGINT and self.launcher.is_chat and (self._links.interrupt() or self._ignores_interrupt()):
            return
        now_s = time.monotonic()
        if now_s > self._stopped_s + ONE_PRESS_S:
            self._kill_s = min(self._kill_s, now_s + SECOND_S)
        self._stopped_by, self._stopped_s = number, min(self._stopped_s, now_s)
        if self._job:
            self._job.signal(number)
