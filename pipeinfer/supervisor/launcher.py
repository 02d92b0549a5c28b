"""The words that start a job's ranks, MPICH's, Open MPI's or srun's, and the same without the hosts that are lost.

Knows command lines; starts nothing.
"""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeinfer.errors import UserError

RANKS = ("-np", "-n", "--np", "--n", "--ntasks")
NODES = ("-N", "--nodes")
HOSTS_FILES = ("-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile", "-machine")
HOSTS = ("-hosts", "-host", "--host", "-H")
CONVERSATION = ("-cnv", "--conversation")
COMMANDS = ("run", "chat", "batch", "serve")
SLOTS = re.compile(r"[:\s](?:slots\s*=\s*)?(\d+)")


class Host(NamedTuple):
    """A line of a hosts file, or an item of a list of hosts. `n_slots`: ranks that it takes."""

    text: str
    name: str
    n_slots: int


@dataclass(frozen=True, slots=True)
class Launcher:
    """`words`: of the launcher alone; none for a job of one process. `command`: of pipeinfer. `hosts`: in the order of
    ranks; empty where the launcher is told none."""

    words: tuple[str, ...]
    command: tuple[str, ...]
    hosts: tuple[Host, ...]

    @property
    def is_srun(self) -> bool:
        return bool(self.words) and os.path.basename(self.words[0]) == "srun"

    @property
    def is_chat(self) -> bool:
        at = _at_pipeinfer(self.command)
        return "chat" in self.command[at + 1 : at + 2] or bool({*CONVERSATION} & {*self.command})

    @property
    def n_ranks(self) -> int:
        """0 where the words do not say."""
        found = _value(self.words, RANKS)
        return int(found) if found and found.isdecimal() else 0

    def host_of(self, rank: int, name: str) -> str:
        """The host of a rank in the launcher's words, for the name by which it calls itself; empty where it has
        none."""
        for host in self.hosts:
            if name and host.name.partition(".")[0] == name.partition(".")[0]:
                return host.name
        ranks = [host.name for host in self.hosts for _ in range(host.n_slots)]
        return ranks[rank % len(ranks)] if ranks and not self.is_srun else ""

    def without(self, lost: Collection[str], hosts_file: Path) -> list[str]:
        """The words that start the job on the other hosts, with fewer ranks where these do not take as many;
        `hosts_file` is written where there was a file. Raises UserError where no host is left."""
        return [*self._words(lost, hosts_file), *self.command]

    def trial(self, host: str, hosts_file: Path) -> list[str]:
        """The words that start nothing, on one host."""
        words = self._words({each.name for each in self.hosts} - {host}, hosts_file)
        _replace(words, RANKS, "1")
        return [*words, "true"]

    def _words(self, lost: Collection[str], hosts_file: Path) -> list[str]:
        if not lost:
            return [*self.words]
        left = [host for host in self.hosts if host.name not in lost]
        if not left:
            raise UserError(f"no host is left to start the job on: {', '.join(sorted(lost))} are lost")
        n_slots, n_left = (sum(host.n_slots for host in hosts) for hosts in (self.hosts, left))
        words = list(self.words)
        if self.is_srun:
            n_nodes = _value(words, NODES)
            n_used = int(n_nodes) if n_nodes and n_nodes.isdecimal() else len(self.hosts)
            n_now = min(n_used, len(left))
            words[1:1] = [f"--exclude={','.join(sorted(lost))}"]
            _replace(words, NODES, str(n_now))
            _replace(words, RANKS, str(max(1, self.n_ranks * n_now // n_used)))
            return words
        if self.n_ranks:  # a launcher may put more ranks on a host than it has slots
            most = n_left * -(-self.n_ranks // n_slots)
            _replace(words, RANKS, str(min(self.n_ranks, most)))
        if _value(words, HOSTS_FILES) is not None:
            hosts_file.write_text("".join(f"{host.text}\n" for host in left))
            _replace(words, HOSTS_FILES, str(hosts_file))
        _replace(words, HOSTS, ",".join(host.text for host in left))
        return words


def read_launcher(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> Launcher:
    """Raises UserError for words that start no command of pipeinfer that can be supervised."""
    at = _at_pipeinfer(words)
    first = at - 2 if at > 1 and words[at - 1] == "-m" else at
    if ":" in words:
        raise UserError("a job of several groups (:) cannot be supervised; give the launcher one group")
    if not {*words[at + 1 : at + 2]} & {*COMMANDS}:
        raise UserError(f"give the launcher and the command, as in mpirun -np 3 pipeinfer {'|'.join(COMMANDS)} …")
    launcher = tuple(words[:first])
    found = Launcher(launcher, tuple(words[first:]), _hosts(launcher, environ))
    if found.is_chat and "--json" in found.command:
        raise UserError("--json of a chat has other figures after each start, so it cannot be supervised; leave --json "
                        "out, or supervise serve")  # fmt: skip
    return found


def _at_pipeinfer(words: Sequence[str]) -> int:
    """Where it is among the words; behind all of them if it is not."""
    return next((at for at, word in enumerate(words) if os.path.basename(word) == "pipeinfer"), len(words))


def _hosts(words: Sequence[str], environ: Mapping[str, str]) -> tuple[Host, ...]:
    if words and os.path.basename(words[0]) == "srun":
        names = _expand(environ.get("SLURM_JOB_NODELIST", ""))
        return tuple(Host(name, name, 1) for name in names)
    if (listed := _value(words, HOSTS)) is not None:
        return tuple(map(_host, filter(None, listed.split(","))))
    if (path := _value(words, HOSTS_FILES)) is None:
        return ()
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"hosts file {path}: {getattr(error, 'strerror', None) or 'it is no UTF-8 text'}") from None
    return tuple(_host(line) for line in lines if line.partition("#")[0].strip())


def _host(text: str) -> Host:
    name = re.split(r"[:\s]", text.strip())[0]
    slots = SLOTS.match(text.strip()[len(name) :])
    return Host(text.strip(), name, max(1, int(slots[1])) if slots else 1)


def _expand(nodes: str) -> list[str]:
    """Slurm's list of nodes, `a[1-3,7],b`, as names."""
    found = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        before, _, ranges = part.partition("[")
        inside, _, after = ranges.partition("]")
        for each in inside.split(",") if ranges else []:
            low, _, high = each.partition("-")
            found += [f"{before}{number:0{len(low)}}{after}" for number in range(int(low), int(high or low) + 1)]
        found += [] if ranges else [part]
    return found


def _at(words: Sequence[str], names: Sequence[str]) -> tuple[int, str]:
    """(index of the word that has the value of an option, what stands before the value in it); -1: there is none."""
    for at, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name in names:
            return (at, f"{name}=") if equals else (at + 1 if at + 1 < len(words) else -1, "")
    return -1, ""


def _value(words: Sequence[str], names: Sequence[str]) -> str | None:
    at, before = _at(words, names)
    return None if at < 0 else words[at][len(before) :]


def _replace(words: list[str], names: Sequence[str], value: str) -> None:
    at, before = _at(words, names)
    if at >= 0:
        words[at] = f"{before}{value}"
