"""The words that start a job's ranks, MPICH's, Open MPI's or srun's, and the same without the hosts that are lost.

Knows command lines; starts nothing.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.cluster.hosts.launcher_words import (
    HOSTS,
    HOSTS_FILES,
    HostEntry,
    find_option,
    index_of_pipeinfer,
    option_value,
    read_hosts,
)
from pipeinfer.errors import UserError

RANKS = ("-np", "-n", "--np", "--n", "--ntasks")
NODES = ("-N", "--nodes")
CONVERSATION = ("-cnv", "--conversation")
COMMANDS = ("run", "chat", "batch", "serve")


@dataclass(frozen=True, slots=True)
class Launcher:
    """`words`: the launcher's; none for a job of one process. `command`: pipeinfer's. `hosts`: in the order of ranks;
    empty where the launcher's words name none."""

    words: tuple[str, ...]
    command: tuple[str, ...]
    hosts: tuple[HostEntry, ...]

    @property
    def is_srun(self) -> bool:
        return bool(self.words) and os.path.basename(self.words[0]) == "srun"

    @property
    def is_chat(self) -> bool:
        at = index_of_pipeinfer(self.command)
        return "chat" in self.command[at + 1 : at + 2] or bool({*CONVERSATION} & {*self.command})

    @property
    def n_ranks(self) -> int:
        """0 where the words do not say."""
        return _number(self.words, RANKS)

    def host_of(self, rank: int, name: str) -> str:
        """The host of a rank in the launcher's words, for the name that the host has for itself; empty if unknown."""
        for host in self.hosts:
            if name and host.name.partition(".")[0] == name.partition(".")[0]:
                return host.name
        ranks = [host.name for host in self.hosts for _ in range(host.n_slots)]
        return ranks[rank % len(ranks)] if ranks and not self.is_srun else ""

    def without(self, lost: Collection[str], hosts_file: Path) -> list[str]:
        """The words that start the job on the other hosts, with fewer ranks where these do not take as many;
        `hosts_file` is written where there was a file. Raises UserError where no host remains."""
        return [*self._words(lost, hosts_file), *self.command]

    def trial(self, host: str, hosts_file: Path) -> list[str]:
        """The words that start nothing, on one host."""
        words = self._words({each.name for each in self.hosts} - {host}, hosts_file)
        _replace(words, RANKS, "1")
        return [*words, "true"]

    def _words(self, lost: Collection[str], hosts_file: Path) -> list[str]:
        words = list(self.words)
        if not lost:
            return words
        hosts = [host for host in self.hosts if host.name not in lost]
        if not hosts:
            raise UserError(f"no host is left to start the job on: {', '.join(sorted(lost))} are lost")
        if self.is_srun:
            n_before = _number(words, NODES) or len(self.hosts)
            n_nodes = min(n_before, len(hosts))
            words[1:1] = [f"--exclude={','.join(sorted(lost))}"]
            _replace(words, NODES, str(n_nodes))
            _replace(words, RANKS, str(max(1, self.n_ranks * n_nodes // n_before)))
            return words
        if self.n_ranks:  # a launcher may put more ranks on a host than it has slots
            n_slots_before, n_slots = (sum(host.n_slots for host in each) for each in (self.hosts, hosts))
            _replace(words, RANKS, str(min(self.n_ranks, n_slots * -(-self.n_ranks // n_slots_before))))
        if option_value(words, HOSTS_FILES) is not None:
            hosts_file.write_text("".join(f"{host.text}\n" for host in hosts))
            _replace(words, HOSTS_FILES, str(hosts_file))
        _replace(words, HOSTS, ",".join(host.text for host in hosts))
        return words


def read_launcher(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> Launcher:
    """Raises UserError for words that start no command of pipeinfer that can be supervised."""
    at = index_of_pipeinfer(words)
    first = at - 2 if at > 1 and words[at - 1] == "-m" else at
    if ":" in words:
        raise UserError("a job of several groups (:) cannot be supervised; give the launcher one group")
    if not {*words[at + 1 : at + 2]} & {*COMMANDS}:
        raise UserError(f"give the launcher and the command, as in mpirun -np 3 pipeinfer {'|'.join(COMMANDS)} …")
    launcher = Launcher(tuple(words[:first]), tuple(words[first:]), read_hosts(words[:first], environ))
    if launcher.is_chat and "--json" in launcher.command:
        raise UserError("--json of a chat has other figures after each start, so it cannot be supervised; leave --json "
                        "out, or supervise serve")  # fmt: skip
    return launcher


def _number(words: Sequence[str], names: Sequence[str]) -> int:
    value = option_value(words, names) or ""
    return int(value) if value.isdecimal() else 0


def _replace(words: list[str], names: Sequence[str], value: str) -> None:
    at, before = find_option(words, names)
    if at >= 0:
        words[at] = f"{before}{value}"
