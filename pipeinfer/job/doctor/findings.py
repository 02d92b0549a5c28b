"""What checks say: faults as texts with the command that mends them, and findings, a line each. Knows no check."""

import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from pipeinfer.child import ROOT
from pipeinfer.job.doctor.connections import Ring, Way
from pipeinfer.job.doctor.host_list import HostList
from pipeinfer.job.doctor.host_session import HostSession, NoAnswer
from pipeinfer.job.options.options import JobModels, RunOptions

NO_JOB = RunOptions(models=JobModels(target=Path()))  # the options of a Cluster of which no job is known
COMMANDS = ("at", "copy", "replace", "copy_file", "command")  # fields of a fix that are commands; others: a word


class Severity(IntEnum):
    """Also the exit code."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(slots=True)
class HostReport:
    """What is known of a host. `has_address`: its name resolves here. `failure`: of its session, `facts_failure`: of
    the program there. `clock_s`: seconds that its clock is ahead of this machine's, beyond what the answer took.
    `hashes`: path -> that of the whole file, `hashes_failure`: of reading them. `ranks`: those that run there;
    `other_facts`: by rank, of those after the first, where ranks have RPC servers of their own."""

    name: str
    is_here: bool
    address: str = ""
    has_address: bool = True
    session: HostSession | None = None
    failure: NoAnswer | None = None
    connect_s: float = 0.0
    clock_s: float = 0.0
    base: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    facts_failure: NoAnswer | None = None
    hashes: dict[str, Any] = field(default_factory=dict)
    hashes_failure: NoAnswer | None = None
    ranks: Sequence[int] = (0,)
    other_facts: dict[int, dict[str, Any]] = field(default_factory=dict)

    def facts_of(self, rank: int) -> dict[str, Any]:
        return self.other_facts.get(rank, self.facts)


@dataclass(slots=True)
class Cluster:
    """All hosts. `is_timed`: `ways` were timed for a second each. `other_ways`: over interfaces that are not taken.
    `ring`: None where it was not tried. `hashed`: the paths of the files that were read as a whole."""

    hosts: HostList
    options: RunOptions
    reports: Mapping[str, HostReport]
    is_timed: bool = False
    ways: list[Way] = field(default_factory=list)
    other_ways: list[Way] = field(default_factory=list)
    ring: Ring | None = None
    hashed: Sequence[str] = ()

    @property
    def first(self) -> HostReport:
        """Rank 0's host, or the first one whose program answers."""
        reports = list(self.reports.values())
        return next((each for each in reports if "version" in each.facts), reports[0])

    def ways_from(self, report: HostReport) -> list[Way]:
        return [way for way in self.ways if way.start == report.name]


@dataclass(frozen=True, slots=True)
class Finding:
    """`host`: empty where it is of all of them. `fix`: empty where nothing is wrong."""

    check: str
    host: str
    level: Severity
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.text}" + (f" -> {self.fix}" if self.fix else "")


@dataclass(frozen=True, slots=True)
class Fault:
    """What a check may find. `text`, `fix`: with {fields}; those of every fault are in `on`."""

    text: str
    fix: str
    level: Severity = Severity.ERROR

    def on(self, host: HostReport, **fields: object) -> Finding:
        """The finding, without its check."""
        values = {
            "host": host.name,
            "at": "" if host.is_here else f"ssh {host.name} ",
            "python": sys.executable,
            "copy": _copy_program(host.name),
            "replace": _copy_program(host.name, is_there=True),
        } | fields
        words = {name: value if name in COMMANDS else shlex.quote(_shown(value)) for name, value in values.items()}
        return Finding("", host.name, self.level, _shown(self.text.format(**values)), _shown(self.fix.format(**words)))


def _copy_program(host: str, is_there: bool = False) -> str:
    """The fix that brings the program to a host: a copy, where it is in an environment of its own. `is_there`: another
    version is there and is moved away first, as files that the copy lacks would stay."""
    program = Path(ROOT if Path(sys.prefix).is_relative_to(ROOT) else sys.prefix)
    if sys.prefix == sys.base_prefix or not Path(ROOT).is_relative_to(program):
        return f"on {host}: make install, at the same path as here"
    parent, folder = shlex.quote(str(program.parent)), shlex.quote(program.name)
    remote, old = shlex.quote(f"tar -C {parent} -x"), shlex.quote(f"{program}.old")
    move = f"ssh {host} mv -T --backup=t {shlex.quote(str(program))} {old}; " if is_there else ""
    return f"if {program} is not shared: {move}tar -C {parent} -c {folder} | ssh {host} {remote}"


def _shown(text: object) -> str:
    """On one line, without what steers a terminal: it may come from another host."""
    return "".join(each for each in " ".join(str(text).split()) if each.isprintable())


Result = Finding | str | None  # of a look: a fault; what is right; None: nothing is known, and another check says why
Look = Callable[[HostReport, Cluster], Result]


@dataclass(frozen=True, slots=True)
class Check:
    """`faults`: all that `look` may find. `needs`: a fact, or "base", without which it is not made. `of_all`: once."""

    look: Look
    meaning: str
    faults: tuple[Fault, ...]
    needs: str = ""
    of_all: bool = False

    @property
    def name(self) -> str:
        return self.look.__name__.replace("_", " ")

    def finding(self, report: HostReport, cluster: Cluster) -> Finding | None:
        if self.needs and not (report.base if self.needs == "base" else self.needs in report.facts):
            return None
        result = self.look(report, cluster)
        if isinstance(result, str):
            result = Finding("", report.name, Severity.OK, _shown(result))
        return result and replace(result, check=self.name, host="" if self.of_all else result.host)


def check(meaning: str, *faults: Fault, needs: str = "", of_all: bool = False) -> Callable[[Look], Check]:
    """Makes a check of the function that looks, under its name."""
    return lambda look: Check(look, meaning, faults, needs, of_all)


def problems(checks: Iterable[Check], report: HostReport, cluster: Cluster) -> list[Finding]:
    """Warnings and errors."""
    findings = [check.finding(report, cluster) for check in checks]
    return [finding for finding in findings if finding and finding.level > Severity.OK]


def errors(checks: Iterable[Check], report: HostReport, cluster: Cluster) -> list[Finding]:
    return [finding for finding in problems(checks, report, cluster) if finding.level is Severity.ERROR]
