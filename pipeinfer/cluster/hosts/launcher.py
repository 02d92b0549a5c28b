"""The command line (its words) of a job's launcher, MPICH's, Open MPI's or srun: the hosts that it names, and the same
command without hosts that are lost. Starts nothing. Standard library alone."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeinfer.errors import UserError

HOSTS_FILES = ("-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile", "-machine")
RANKS = ("-np", "-n", "--np", "--n", "--ntasks")
NODES = ("-N", "--nodes")
CONVERSATION = ("-cnv", "--conversation")
COMMANDS = ("run", "chat", "batch", "serve")
HOSTS = ("-hosts", "-host", "--host", "-H")
# a lost node's step keeps the cores of the others for minutes; 60: seconds to wait for what is not there
AGAIN = ("--overlap", "--immediate=60")
STDIN_NAMES = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
NODE_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
SLOTS = re.compile(r"[:\s]\s*(?:slots\s*=\s*)?(\d+)")


class HostEntry(NamedTuple):
    """A line of a hosts file, or an item of a list of hosts. `n_slots`: ranks that it takes."""

    text: str
    name: str
    n_slots: int


def named_hosts(words: Sequence[str], environ: Mapping[str, str], folder: Path = Path()) -> tuple[HostEntry, ...]:
    """The hosts that a launcher's words name, or srun's allocation. `folder`: where that runs. Raises UserError."""
    if words and os.path.basename(words[0]) == "srun":
        names = expand_nodes(environ.get("SLURM_JOB_NODELIST", ""))
        return tuple(HostEntry(name, name, 1) for name in names)
    if (listed := option_value(words, HOSTS)) is not None:
        return tuple(map(_host_entry, filter(None, listed.split(","))))
    if (path := option_value(words, HOSTS_FILES)) is None:
        return ()
    try:
        lines = (folder / path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"hosts file {path}: {getattr(error, 'strerror', None) or 'it is no UTF-8 text'}") from None
    return tuple(_host_entry(line) for line in lines if line.partition("#")[0].strip())


def index_of_pipeinfer(words: Sequence[str]) -> int:
    """The index of `pipeinfer` among the words, where possible before a command: folders may have the same name. The
    number of words if it is not there."""
    places = [at for at, word in enumerate(words) if os.path.basename(word) == "pipeinfer"]
    return next((at for at in places if {*words[at + 1 : at + 2]} & {*COMMANDS}), (*places, len(words))[0])


def _host_entry(text: str) -> HostEntry:
    name = re.split(r"[:\s]", text.strip())[0]
    slots = SLOTS.match(text.strip()[len(name) :])
    return HostEntry(text.strip(), name, max(1, int(slots[1])) if slots else 1)


def expand_nodes(nodes: str) -> list[str]:
    """The names of Slurm's list of nodes, `a[1-3,7],b`. Raises UserError."""
    if any(not NODE_RANGES.fullmatch(each) for each in re.findall(r"\[([^\]]*)", nodes)):
        raise UserError(f"Slurm's list of nodes is {nodes}, which should be such as a[1-3,7]; unset its variable")
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        before, _, ranges = part.partition("[")
        inside, _, after = ranges.partition("]")
        for each in inside.split(",") if ranges else []:
            low, _, high = each.partition("-")
            numbers = (f"{before}{number:0{len(low)}}" for number in range(int(low), int(high or low) + 1))
            names += [number + end for number in numbers for end in expand_nodes(after) or [""]]
        names += [] if ranges else [part]
    return names


def find_option(words: Sequence[str], names: Sequence[str]) -> tuple[int, str]:
    """(index of the word with the value of an option, the part of that word before the value); -1 without one."""
    for at, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name in names:
            return (at, f"{name}=") if equals else (at + 1 if at + 1 < len(words) else -1, "")
        if word[:2] in names and word[2:].isdigit():  # -N2
            return at, word[:2]
    return -1, ""


def option_value(words: Sequence[str], names: Sequence[str]) -> str | None:
    at, before = find_option(words, names)
    return None if at < 0 else words[at][len(before) :]


def hosts_by_rank(words: Sequence[str], folder: Path, size: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The host of each rank, if the launcher of these `words`, or without any srun, fills each host's slots in turn;
    empty where its words name none."""
    entries: Sequence[HostEntry] = ()
    with suppress(UserError):
        entries = named_hosts(_with_one_list(words[: index_of_pipeinfer(words)]), environ, folder)
    if not words and environ.get("SLURM_STEP_NUM_TASKS") == str(size):
        tasks = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        counts = [int(count) for count, times in tasks for _ in range(int(times or 1))]
        names = expand_nodes(environ.get("SLURM_STEP_NODELIST", ""))
        entries = [HostEntry(name, name, count) for name, count in zip(names, counts, strict=False)]
    slots = [entry.name for entry in entries for _ in range(entry.n_slots)]
    return [slots[rank % len(slots)] for rank in range(size)] if slots else []


def _with_one_list(words: Sequence[str]) -> Sequence[str]:
    """The words of a process. Hydra overwrites `,` and `:` in its list of hosts with zero bytes, which part words."""
    at, _ = find_option(words, HOSTS)
    if at < 0:
        return words
    end = next((end for end in range(at + 1, len(words)) if words[end].startswith(("-", "/"))), len(words))
    listed = words[at] + "".join(f":{part}" if part.isdigit() else f",{part}" for part in words[at + 1 : end])
    return [*words[:at], listed, *words[end:]]


# -- jobs that are started again


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
    def reads_input(self) -> bool:
        """Whether the command may read standard input: it is a chat, or a word of it, such as `--file=-`, names it."""
        return self.is_chat or any(word.rpartition("=")[2] in STDIN_NAMES for word in self.command)

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

    def without(self, lost: Collection[str], hosts_file: Path, again: bool = False) -> list[str]:
        """The words that start the job on the other hosts, with fewer ranks where these do not take as many;
        `hosts_file` is written where there was a file. `again`: a job of these words has run. Raises UserError where no
        host remains."""
        return [*self._words(lost, hosts_file, again), *self.command]

    def trial(self, host: str, hosts_file: Path) -> list[str]:
        """The words that start nothing, on one host."""
        words = self._words({each.name for each in self.hosts} - {host}, hosts_file, again=True)
        _replace(words, RANKS, "1")
        return [*words, "true"]

    def _words(self, lost: Collection[str], hosts_file: Path, again: bool) -> list[str]:
        words = list(self.words)
        if again and self.is_srun:
            words[1:1] = AGAIN
        if not lost:
            return words
        hosts = [host for host in self.hosts if host.name not in lost]
        if not hosts:
            raise UserError(f"no host is left to start the job on: {', '.join(sorted(lost))} are lost")
        if self.is_srun:
            n_before = _number(words, NODES) or min(self.n_ranks or len(self.hosts), len(self.hosts))
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
    if ":" in words[:first] or _has_groups(words[first:]):
        raise UserError("a job of several groups (:) cannot be supervised; give the launcher one group")
    if not {*words[at + 1 : at + 2]} & {*COMMANDS}:
        raise UserError(f"give the launcher and the command, as in mpirun -np 3 pipeinfer {'|'.join(COMMANDS)} …")
    launcher = Launcher(tuple(words[:first]), tuple(words[first:]), named_hosts(words[:first], environ))
    program, is_here = words[at], not (launcher.hosts or launcher.is_srun)
    if is_here and os.sep in program and not os.path.exists(program):
        raise UserError(f"{program}: No such file or directory; check the path")
    if launcher.is_chat and "--json" in launcher.command:
        reason = "--json of a chat has other figures after each start, so it cannot be supervised"
        raise UserError(f"{reason}; leave --json out, or supervise serve")
    return launcher


def _has_groups(command: Sequence[str]) -> bool:
    """Whether a colon begins another group: the command itself may have such a word."""
    groups = (command[at:] for at, word in enumerate(command) if word == ":")
    return any(index_of_pipeinfer(group) < len(group) for group in groups)


def _number(words: Sequence[str], names: Sequence[str]) -> int:
    value = option_value(words, names) or ""
    return int(value) if value.isdecimal() else 0


def _replace(words: list[str], names: Sequence[str], value: str) -> None:
    at, before = find_option(words, names)
    if at >= 0:
        words[at] = f"{before}{value}"
