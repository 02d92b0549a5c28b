"""Version, host and settings of each rank at the start of a job, and whether they fit together; their clocks and
links; and the MPI that is installed. Its library is loaded by a child process, so that no MPI starts here and a broken
one does no harm."""

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import pipeinfer
from pipeinfer.child import python_command
from pipeinfer.cluster.watch.rendezvous import own_location
from pipeinfer.cluster.wire import Buffer
from pipeinfer.errors import UserError
from pipeinfer.text import shortened

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.cluster.transport import Link

RankInfo = tuple[str, str, str, dict[str, str]]
"""(version, host, location, settings by name): plain types, which another version of this program can unpickle."""

MESSAGE_BYTES, N_MESSAGES = 1 << 22, 4  # of which the fastest tells a link's bandwidth
COMMAND = "the command"  # the name of the entry with the settings' type, which differs between commands


def own_info(settings: object) -> RankInfo:
    """This rank's; `settings`: a dataclass."""
    assert is_dataclass(settings)
    location = own_location()
    return version_text(), location.host, location.where, {COMMAND: type(settings).__name__, **dict(_named(settings))}


def _named(settings: Any) -> Iterator[tuple[str, str]]:
    """Every field of a dataclass as text; dataclasses in it are flattened."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name.startswith("_"):
            continue  # internal
        if is_dataclass(value):
            yield field.name, type(value).__name__
            yield from _named(value)
        elif field.compare:  # else it is no setting, but learned while running
            yield field.name, _text(value)


def _text(value: Any) -> str:
    """The value nearly as on the command line; different values have different texts."""
    return ",".join(map(_text, value)) if isinstance(value, tuple) and value else str(value)


@cache
def version_text() -> str:
    """The version and a digest of the program's files, because not every change has its own version."""
    root, digest = os.path.dirname(pipeinfer.__file__), hashlib.sha256()
    files = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    for path in sorted(path for path in files if path.endswith(".py")):
        with open(path, "rb", buffering=0) as file:
            digest.update(file.read())
    return f"{pipeinfer.__version__} ({digest.hexdigest()[:8]})"


def check_alike(infos: Sequence[RankInfo]) -> None:
    """Raises UserError when a rank has another version of the program or other settings than rank 0."""
    our_version, our_host, _, ours = infos[0]
    first, way_out = f"rank 0 (host {our_host})", "give every rank the same command line"
    for rank, (version, host, _, theirs) in enumerate(infos):
        other = f"rank {rank} (host {host})"
        if version != our_version:
            raise UserError(
                f"{other} runs pipeinfer {version} and {first} {our_version}; install the same on every host"
            )
        if theirs.get(COMMAND) != ours.get(COMMAND):
            raise UserError(f"{other} was started with another command than {first}; {way_out}")
        for name in sorted(ours.keys() | theirs.keys()):
            if theirs.get(name) != ours.get(name):
                each = f"with {name} {_shown(theirs.get(name))} and {first} with {_shown(ours.get(name))}"
                raise UserError(f"{other} was started {each}; {way_out}")


def _shown(text: str | None) -> str:
    return "nothing" if text is None else shortened(text)


def library_name(text: str) -> str:
    """Of what MPI says of its library, the first line."""
    return " ".join(text.partition("\n")[0].split())


PROBE = """
import ctypes, json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps({"library": MPI.Get_library_version(), "standard": ".".join(map(str, MPI.Get_version())),
                  "mpi4py": mpi4py.__version__}))
"""

PROBE_TIMEOUT_S = 20.0


def describe_mpi() -> dict[str, Any]:
    """Its library, its standard and mpi4py's version; `error` if it cannot be loaded."""
    try:
        done = subprocess.run(
            python_command(PROBE), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PROBE_TIMEOUT_S
        )
        versions: dict[str, Any] = json.loads(done.stdout)
        return versions | {"library": library_name(versions["library"]), "error": None}
    except subprocess.TimeoutExpired:
        why = f"it does not answer within {PROBE_TIMEOUT_S:.0f} s"
    except ValueError:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"library": None, "standard": None, "mpi4py": None, "error": why}


# -- clocks and links, timed: collective


def clock_offset_s(link: "Link", clock: Callable[[], float], ranks: Iterable[int], n_rounds: int = 8) -> float:
    """Seconds to add to this rank's clock to get rank 0's; 0 unless it is one of `ranks`, whose clocks may differ. The
    round with the least delay counts."""
    offset_s, time_s = 0.0, np.zeros(1)
    for rank in ranks:
        if link.rank == 0:
            for _ in range(n_rounds):
                link.receive_awake(time_s, rank)
                time_s[0] = clock()
                link.send_awake(time_s, rank)
        elif link.rank == rank:
            offset_s = min(_ask_clock(link, clock, time_s) for _ in range(n_rounds))[1]
    return offset_s


def _ask_clock(link: "Link", clock: Callable[[], float], time_s: npt.NDArray[np.float64]) -> tuple[float, float]:
    """(delay, offset) of one question to rank 0."""
    start_s = clock()
    link.send_awake(time_s, 0)
    link.receive_awake(time_s, 0)
    delay_s = clock() - start_s
    return delay_s, float(time_s[0]) - (start_s + delay_s / 2)


def bandwidth_gbit(link: "Link") -> float:
    """The bandwidth of the slowest link between neighbouring ranks, in Gbit/s. Needs two ranks."""
    buffer, slowest_s = np.zeros(MESSAGE_BYTES, np.uint8), 0.0
    for rank in range(1, link.size):
        if link.rank == rank - 1:
            slowest_s = max(slowest_s, min(_round_trip_s(link, buffer, rank) for _ in range(N_MESSAGES)))
        elif link.rank == rank:
            for _ in range(N_MESSAGES):
                link.receive_awake(buffer, rank - 1)
                link.send_awake(buffer, rank - 1)
    return 8e-9 * 2 * MESSAGE_BYTES / max(link.all_gather(slowest_s))


def _round_trip_s(link: "Link", buffer: Buffer, rank: int) -> float:
    start_s = time.perf_counter()
    link.send_awake(buffer, rank)
    link.receive_awake(buffer, rank)
    return time.perf_counter() - start_s
