"""Hosts in the words of a launcher: MPICH's, Open MPI's or srun's. Knows command lines; starts nothing. Standard
library alone."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipeinfer.errors import UserError

HOSTS_FILES = ("-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile", "-machine")
HOSTS = ("-hosts", "-host", "--host", "-H")
SLOTS = re.compile(r"[:\s](?:slots\s*=\s*)?(\d+)")


class HostEntry(NamedTuple):
    """A line of a hosts file, or an item of a list of hosts. `n_slots`: ranks that it takes."""

    text: str
    name: str
    n_slots: int


def read_hosts(words: Sequence[str], environ: Mapping[str, str], folder: Path = Path()) -> tuple[HostEntry, ...]:
    """Those that the words name, or srun's allocation. `folder`: where the launcher runs. Raises UserError."""
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
    """Its index among the words; their number if it is not there."""
    return next((at for at, word in enumerate(words) if os.path.basename(word) == "pipeinfer"), len(words))


def _host_entry(text: str) -> HostEntry:
    name = re.split(r"[:\s]", text.strip())[0]
    slots = SLOTS.match(text.strip()[len(name) :])
    return HostEntry(text.strip(), name, max(1, int(slots[1])) if slots else 1)


def expand_nodes(nodes: str) -> list[str]:
    """The names of Slurm's list of nodes, `a[1-3,7],b`."""
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        before, _, ranges = part.partition("[")
        inside, _, after = ranges.partition("]")
        for each in inside.split(",") if ranges else []:
            low, _, high = each.partition("-")
            names += [f"{before}{number:0{len(low)}}{after}" for number in range(int(low), int(high or low) + 1)]
        names += [] if ranges else [part]
    return names


def find_option(words: Sequence[str], names: Sequence[str]) -> tuple[int, str]:
    """(index of the word with the value of an option, the part of that word before the value); -1 without one."""
    for at, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name in names:
            return (at, f"{name}=") if equals else (at + 1 if at + 1 < len(words) else -1, "")
    return -1, ""


def option_value(words: Sequence[str], names: Sequence[str]) -> str | None:
    at, before = find_option(words, names)
    return None if at < 0 else words[at][len(before) :]


def hosts_by_rank(words: Sequence[str], folder: Path, size: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The host of each rank, if the launcher of these `words`, or without any srun, fills each host's slots in turn;
    empty where its words name none."""
    entries: Sequence[HostEntry] = ()
    with suppress(UserError):
        entries = read_hosts(_with_one_list(words[: index_of_pipeinfer(words)]), environ, folder)
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
